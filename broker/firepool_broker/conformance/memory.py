"""The durable ports in memory: what tests of other rooms use, and the model that the real stores are compared with.

They pass the suites of this package. `MemoryJobs.fail` makes the next writes fail, to try out what a broken disk does.
"""

import asyncio
import copy
import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from firepool_broker.core.asks import Binding
from firepool_broker.core.ids import AttemptId, Caller, PodName, Queue, ReuseTag
from firepool_broker.shell.ports import Identity
from firepool_broker.shell.rows import (
    EndAttempt,
    InsertJob,
    JobFilter,
    JobRow,
    Lost,
    MoveJob,
    StartAttempt,
    StoreDown,
    Won,
    Write,
)
from firepool_wire.errors import BadRequest, Conflict, NotFound, PackageError, PayloadTooLarge
from firepool_wire.jobspec import JobSpec, from_sparse, sparse
from firepool_wire.words import TERMINAL, JobState


class MemoryJobs:
    """`ports.JobStore`; every write is applied at once and answered on the loop's next turn."""

    def __init__(self) -> None:
        #: Failures of the next writes, in order.
        self.fail: list[StoreDown] = []
        #: Whether a write whose outcome is `unknown` was in truth made.
        self.apply_unknown = False
        self._rows: dict[str, JobRow] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._digests: dict[str, str] = {}
        self._bindings: dict[str, Binding] = {}
        self._seq = 0

    async def open(self) -> None:
        """Nothing to open."""

    def write(self, write: Write) -> Awaitable[Won | Lost]:
        """Apply a write; answered on the next turn of the loop. The awaitable raises BadRequest, TypeError, StoreDown."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Won | Lost] = loop.create_future()
        failure = self.fail.pop(0) if self.fail else None
        applied = failure is None or (failure.unknown and self.apply_unknown)
        try:
            answer = self._apply(write) if applied else Lost("not applied")
        except (BadRequest, TypeError) as error:
            future.set_exception(error)
            return future
        loop.call_soon(_answer, future, failure or answer)
        return future

    async def get(self, job: str) -> JobRow | None:
        """The row of a job."""
        return copy.deepcopy(self._rows.get(job))

    async def get_many(self, jobs: Sequence[str]) -> list[JobRow]:
        """The rows of those of the jobs that exist, in the order asked for."""
        return [copy.deepcopy(self._rows[j]) for j in jobs if j in self._rows]

    async def by_key(self, caller: str, key: str) -> tuple[str, str] | None:
        """(job id, body digest) of an idempotency key, or None."""
        job = self._keys.get((caller, key))
        return None if job is None else (job, self._digests[job])

    async def page(self, where: JobFilter) -> tuple[list[JobRow], str | None]:
        """A page, newest submission first, and the cursor of the next."""
        if where.cursor is not None and not (where.cursor.isascii() and where.cursor.isdigit()):
            raise BadRequest(f"{where.cursor!r} is not a cursor of an earlier page", field="cursor")
        places = {job: n for n, job in enumerate(self._rows, 1)}
        last = int(where.cursor) if where.cursor else len(places) + 1
        rows = [r for r in reversed(self._rows.values()) if places[r.job] < last and _fits(r, where)]
        page = rows[: where.limit]
        more = str(places[page[-1].job]) if len(rows) > len(page) else None
        return copy.deepcopy(page), more

    async def unfinished(self) -> list[JobRow]:
        """Every job that is not terminal, oldest submission first."""
        return copy.deepcopy([r for r in self._rows.values() if r.state not in TERMINAL])

    async def bindings(self, pods: Sequence[str]) -> list[Binding]:
        """The newest binding of each pod that ever had one."""
        return [self._bindings[p] for p in dict.fromkeys(pods) if p in self._bindings]

    async def ended_since(self, caller: str, seq: int, limit: int) -> list[JobRow]:
        """Terminal rows of a caller behind `seq`, in the order of their ends."""
        rows = [r for r in self._rows.values() if r.caller == caller and r.seq > seq and r.state in TERMINAL]
        return copy.deepcopy(sorted(rows, key=lambda r: r.seq)[:limit])

    async def newest_seq(self, caller: str) -> int:
        """The place of the caller's newest change (0: none)."""
        return max((r.seq for r in self._rows.values() if r.caller == caller), default=0)

    async def counts(self, caller: str | None, run: str | None) -> dict[str, int]:
        """Jobs by state."""
        out: dict[str, int] = {}
        for row in self._rows.values():
            if caller in (None, row.caller) and run in (None, row.spec.run):
                out[row.state.value] = out.get(row.state.value, 0) + 1
        return out

    async def aclose(self) -> None:
        """Nothing to close."""

    def _apply(self, write: Write) -> Won | Lost:
        _check(write)
        self._seq += 1
        if isinstance(write, InsertJob):
            return self._insert(write)
        row = self._rows.get(write.job)
        if row is None:
            return Lost("there is no such job")
        if write.version not in (None, row.version) or row.state in TERMINAL:
            return Lost(f"the row is at version {row.version}", row.state)
        if not _allowed(write, row.state):
            return Lost(f"the job is {row.state}", row.state)
        match write:
            case StartAttempt():
                row.state = JobState.RUNNING
                self._start(row, write)
            case EndAttempt():
                _end(row, write)
            case MoveJob():
                row.state = write.state or row.state
                if write.cancel_requested is not None:
                    row.cancel_requested = write.cancel_requested
        row.version += 1
        row.seq = self._seq
        return Won(row.version, row.seq)

    def _insert(self, write: InsertJob) -> Won | Lost:
        key = write.spec.idempotency_key
        if key is not None and (taken := self._keys.get((write.caller, key))) is not None:
            return Lost("the idempotency key is taken", self._rows[taken].state, taken)
        if (existing := self._rows.get(write.job)) is not None:
            return Lost("the job id is taken", existing.state, write.job)
        row = self._rows[write.job] = JobRow(
            job=write.job,
            caller=write.caller,
            person=write.person,
            spec=from_sparse(JobSpec, sparse(write.spec)),
            state=write.state,
            version=1,
            retry_count=0,
            infra_retries=0,
            cancel_requested=False,
            submitted_at=write.submitted_at,
            updated_at=write.submitted_at,
            attempt=None,
            token=None,
            pods=(),
            retire_after=(),
            path=None,
            why_not_warmer="",
            facts={},
            result=None,
            result_blob=None,
            seq=self._seq,
        )
        self._digests[write.job] = write.body_digest
        if key is not None:
            self._keys[write.caller, key] = write.job
        if write.start is not None:
            self._start(row, write.start)
        return Won(1, self._seq)

    def _start(self, row: JobRow, start: StartAttempt) -> None:
        row.attempt, row.token, row.path = start.attempt, start.token, start.path
        row.why_not_warmer, row.updated_at = start.why_not_warmer, start.at
        row.pods, row.retire_after = start.pods, start.retire_after
        for pod, retire in zip(start.pods, start.retire_after, strict=True):
            self._bindings.pop(pod, None)
            self._bindings[pod] = Binding(
                pod=PodName(pod),
                attempt=AttemptId(start.attempt),
                caller=Caller(start.caller),
                queue=Queue(start.queue),
                tag=None if start.tag is None else ReuseTag(start.tag),
                retire_after=retire,
            )


def _check(write: Write) -> None:
    """What a database could not store is refused here too."""
    if isinstance(write, EndAttempt):
        json.dumps(write.facts)
    if isinstance(write, InsertJob):
        spec = write.spec
        texts = (
            write.job,
            write.caller,
            write.person,
            spec.sku,
            spec.queue,
            spec.run or "",
            spec.idempotency_key or "",
        )
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"A text of the job is not valid Unicode: {error.reason}") from None


def _answer(future: "asyncio.Future[Won | Lost]", outcome: Won | Lost | StoreDown) -> None:
    if future.done():
        return
    if isinstance(outcome, StoreDown):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _allowed(write: StartAttempt | EndAttempt | MoveJob, state: JobState) -> bool:
    match write:
        case StartAttempt():
            return state is JobState.QUEUED
        case EndAttempt():
            return write.state is not JobState.QUEUED or state is JobState.RUNNING
        case MoveJob():
            return write.state is None or state is JobState.PENDING


def _end(row: JobRow, write: EndAttempt) -> None:
    row.state, row.retry_count, row.infra_retries = write.state, write.retry_count, write.infra_retries
    row.facts, row.updated_at = copy.deepcopy(dict(write.facts)), write.at
    row.result, row.result_blob = write.result, write.result_blob
    if write.state is JobState.QUEUED:
        row.attempt = row.token = None
        row.pods = row.retire_after = ()


def _fits(row: JobRow, where: JobFilter) -> bool:
    return (
        where.caller in (None, row.caller)
        and (where.states is None or row.state in where.states)
        and where.sku in (None, row.spec.sku)
        and where.queue in (None, row.spec.queue)
        and where.run in (None, row.spec.run)
        and all(row.spec.labels.get(k) == v for k, v in where.labels.items())
    )


class MemoryBlobs:
    """`ports.BlobStore`; `local_path` writes a temporary file."""

    def __init__(self) -> None:
        self._blobs: dict[tuple[str, str], bytes] = {}
        self._files = tempfile.TemporaryDirectory(prefix="firepool-blobs-", ignore_cleanup_errors=True)

    async def has(self, caller: str, digest: str) -> bool:
        """Whether the caller stored it."""
        return (caller, digest) in self._blobs

    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        """Store a stream; returns its digest. Raises: PayloadTooLarge, PackageError."""
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            if len(data) > limit_bytes:
                raise PayloadTooLarge(f"The blob is over the limit of {limit_bytes} bytes.", limit_bytes=limit_bytes)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if expect not in (None, digest):
            raise PackageError(f"The bytes have digest {digest}, not {expect}.")
        self._blobs[caller, digest] = bytes(data)
        return digest

    async def put_bytes(self, caller: str, data: bytes) -> str:
        """Store bytes; returns their digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self._blobs[caller, digest] = bytes(data)
        return digest

    async def get(self, caller: str, digest: str) -> bytes:
        """All bytes of a blob. Raises: NotFound."""
        try:
            return self._blobs[caller, digest]
        except KeyError:
            raise NotFound(f"There is no blob {digest[:80]} for this caller.") from None

    async def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]:
        """The bytes from `start` on. Raises: NotFound."""
        data = (await self.get(caller, digest))[start:]
        if data:
            yield data

    async def size(self, caller: str, digest: str) -> int:
        """Bytes of a blob. Raises: NotFound."""
        return len(await self.get(caller, digest))

    async def local_path(self, caller: str, digest: str) -> Path:
        """A file with the blob's bytes. Raises: NotFound."""
        data = await self.get(caller, digest)
        path = Path(self._files.name) / digest.removeprefix("sha256:")
        path.write_bytes(data)
        return path

    async def aclose(self) -> None:
        """Remove the temporary files."""
        self._files.cleanup()


@dataclass(slots=True)
class _Log:
    data: bytearray = field(default_factory=bytearray)
    event_offset: int = 0
    finished: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLogs:
    """`ports.LogStore`."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, int], _Log] = {}

    def append(self, attempt: str, rank: int, stream: int, data: bytes, event_offset: int) -> None:
        """Add a frame's bytes, once."""
        log = self._logs.setdefault((attempt, rank), _Log())
        if event_offset > log.event_offset:
            log.data += data
            log.event_offset = event_offset
            self._change(log)

    def event_offset(self, attempt: str, rank: int) -> int:
        """Offset in the agent's event log behind the last appended frame."""
        return self._log(attempt, rank).event_offset

    def read(self, attempt: str, rank: int, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset` on."""
        return bytes(self._log(attempt, rank).data[offset : offset + limit])

    def size(self, attempt: str, rank: int) -> int:
        """Bytes so far."""
        return len(self._log(attempt, rank).data)

    def finish(self, attempt: str, rank: int) -> None:
        """Nothing follows."""
        log = self._logs.setdefault((attempt, rank), _Log())
        log.finished, log.event_offset = True, (1 << 63) - 1
        self._change(log)

    def finished(self, attempt: str, rank: int) -> bool:
        """Whether nothing follows."""
        return self._log(attempt, rank).finished

    async def more(self, attempt: str, rank: int, offset: int) -> None:
        """Return once bytes lie behind `offset` or the log is finished."""
        log = self._logs.setdefault((attempt, rank), _Log())
        while len(log.data) <= offset and not log.finished:
            await log.changed.wait()

    def _log(self, attempt: str, rank: int) -> _Log:
        return self._logs.get((attempt, rank)) or _Log()

    def _change(self, log: _Log) -> None:
        # Waiters hold the old event: setting it wakes them all, the new one is for who comes later.
        log.changed.set()
        log.changed = asyncio.Event()


class MemoryTokens:
    """`ports.TokenStore`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        #: token text → (name, identity)
        self._tokens: dict[str, tuple[str, Identity]] = {}

    async def identify(self, token: str) -> Identity | None:
        """Who the token speaks for; None: unknown, expired or revoked."""
        _, identity = self._tokens.get(token, ("", None))
        if identity is None or (identity.expires_at is not None and identity.expires_at <= self._clock()):
            return None
        return replace(identity)

    async def create(self, identity: Identity, name: str) -> str:
        """A new token's text. Raises: BadRequest, Conflict."""
        if identity.role not in ("viewer", "submitter", "team-admin", "operator"):
            raise BadRequest(f"No such role: {identity.role!r}.", field="role")
        for what, value in (("caller", identity.caller), ("person", identity.person), ("name", name)):
            if not value or not value.isprintable():
                raise BadRequest(f"A {what} is one or more printable characters, not {value!r}.", field=what)
        for token, (known, owner) in list(self._tokens.items()):
            if (known, owner.caller) == (name, identity.caller):
                if await self.identify(token) is not None:
                    raise Conflict(f"The caller {identity.caller} already has a token named {name}; revoke it first.")
                del self._tokens[token]
        token = "fp_" + secrets.token_urlsafe(32)
        self._tokens[token] = (name, identity)
        return token

    async def revoke(self, name: str, caller: str) -> bool:
        """Make the caller's token of that name void; False: there is none."""
        found = [t for t, (n, i) in self._tokens.items() if n == name and i.caller == caller]
        for token in found:
            del self._tokens[token]
        return bool(found)
