"""The job store in memory: what tests of other rooms use, and the model that the real one is compared with.

`MemoryJobs.fail` makes the next writes fail, to try out what a broken disk does.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Sequence

from firepool_broker.core.asks import Binding
from firepool_broker.core.ids import AttemptId, Caller, PodName, Queue, ReuseTag
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
from firepool_wire.errors import BadRequest
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
