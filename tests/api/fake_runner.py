"""A runner without engine and agents, over the real store: jobs do what their argv says, like `tests/shell/fake_agent.py`.

["print", text, ...]   lines of the log, SUCCEEDED         ["exit", code]      FAILED with NonZeroExit
["wait"]               runs until cancelled or `finish`ed  ["write", path, x]  an output file
["result", base64]     raw RESULT frames                   ["queue"]           stays QUEUED
"""

import asyncio
import base64
import hashlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from firepool_broker.core.engine import Engine
from firepool_broker.core.events import PoolsConfigured
from firepool_broker.core.pools import CallerLimits, Pool
from firepool_broker.shell.ports import EndAttempt, Identity, InsertJob, JobRow, Lost, StartAttempt
from firepool_wire.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    FirepoolError,
    NonZeroExit,
    NotFound,
    PackageError,
    PayloadTooLarge,
    UnknownSku,
)
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import TERMINAL, JobState


@dataclass(frozen=True)
class Taken:
    job: str
    state: JobState
    replayed: bool


@dataclass(frozen=True)
class Told:
    job: str
    state: JobState
    seq: int
    row: JobRow | None


class Window:
    def __init__(self, runner: "FakeRunner", caller: str, room: int) -> None:
        self.runner, self.caller, self.ended = runner, caller, False
        self._told: deque[Told] = deque(maxlen=room)
        self._lost = False
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.runner.windows.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.windows.discard(self)

    async def take(self, timeout_s: float) -> Sequence[Told]:
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        told = list(self._told)
        self._told.clear()
        return told

    def overflowed(self) -> bool:
        lost, self._lost = self._lost, False
        return lost

    def put(self, told: Told) -> None:
        self._lost |= len(self._told) == self._told.maxlen
        self._told.append(told)
        self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()


class MemoryBlobs:
    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    async def has(self, caller: str, digest: str) -> bool:
        return (caller, digest) in self.kept

    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        data = b"".join([c async for c in chunks])
        if len(data) > limit_bytes:
            raise PayloadTooLarge("too large")
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if expect not in (None, digest):
            raise PackageError(f"the bytes have the digest {digest}, not {expect}")
        self.kept[caller, digest] = data
        return digest

    async def put_bytes(self, caller: str, data: bytes) -> str:
        async def one() -> AsyncIterator[bytes]:
            yield data

        return await self.put(caller, one(), None, len(data))

    async def get(self, caller: str, digest: str) -> bytes:
        if (caller, digest) not in self.kept:
            raise NotFound(f"no blob {digest}")
        return self.kept[caller, digest]

    async def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]:
        data = (await self.get(caller, digest))[start:]
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    async def size(self, caller: str, digest: str) -> int:
        return len(await self.get(caller, digest))

    async def local_path(self, caller: str, digest: str) -> Path:
        raise NotFound("kept in memory")

    async def aclose(self) -> None: ...


class MemoryLogs:
    def __init__(self) -> None:
        self._logs: dict[tuple[str, int], bytearray] = {}
        self._done: set[tuple[str, int]] = set()
        self._grown: dict[tuple[str, int], asyncio.Event] = {}

    def _tell(self, key: tuple[str, int]) -> None:
        self._grown.setdefault(key, asyncio.Event()).set()
        self._grown[key] = asyncio.Event()

    def append(self, attempt: str, rank: int, stream: int, data: bytes, event_offset: int) -> None:
        self._logs.setdefault((attempt, rank), bytearray()).extend(data)
        self._tell((attempt, rank))

    def event_offset(self, attempt: str, rank: int) -> int:
        return 0

    def read(self, attempt: str, rank: int, offset: int, limit: int) -> bytes:
        return bytes(self._logs.get((attempt, rank), b"")[offset : offset + limit])

    def size(self, attempt: str, rank: int) -> int:
        return len(self._logs.get((attempt, rank), b""))

    def finish(self, attempt: str, rank: int) -> None:
        self._done.add((attempt, rank))
        self._tell((attempt, rank))

    def finished(self, attempt: str, rank: int) -> bool:
        return (attempt, rank) in self._done

    async def more(self, attempt: str, rank: int, offset: int) -> None:
        while self.size(attempt, rank) <= offset and not self.finished(attempt, rank):
            await self._grown.setdefault((attempt, rank), asyncio.Event()).wait()


@dataclass
class FakeRunner:
    store: Any
    tokens: Any
    pools: list[Pool]
    window_room: int = 1000
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    logs: MemoryLogs = field(default_factory=MemoryLogs)
    windows: set[Window] = field(default_factory=set)
    limits: dict[str, CallerLimits] = field(default_factory=dict)
    renewed: list[list[str]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    #: Held: submissions wait here (overload tests).
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    #: Raised by the next submit.
    broken: BaseException | None = None

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._versions: dict[str, int] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.gate.set()
        self.engine = Engine()
        self.engine.handle(PoolsConfigured(tuple(self.pools)), self.now())

    def now(self) -> float:
        return time.time()

    async def submit(self, who: Identity, spec: JobSpec, body_digest: str) -> Taken:
        await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        if spec.sku not in {p.sku for p in self.pools}:
            raise UnknownSku(f"no pool {spec.sku!r}", known=[p.sku for p in self.pools])
        if spec.idempotency_key is not None:
            known = await self.store.by_key(who.caller, spec.idempotency_key)
            if known is not None:
                if known[1] != body_digest:
                    raise Conflict("the key was used with another body", job_id=known[0])
                return Taken(known[0], JobState.QUEUED, True)
        job = f"job{next(self._ids):06d}"
        insert = InsertJob(
            job=job,
            caller=who.caller,
            person=who.person,
            spec=spec,
            state=JobState.QUEUED,
            submitted_at=self.now(),
            body_digest=body_digest,
        )
        won = await self.store.write(insert)
        assert not isinstance(won, Lost), won
        self._versions[job] = won.version
        self._ends[job] = asyncio.Event()
        await self._tell(job)
        await self._run(job, who, list(spec.entrypoint.argv or ("print",)))
        return Taken(job, JobState.QUEUED, False)

    async def submit_many(self, who: Identity, specs: Sequence[tuple[JobSpec, str]]) -> list[Taken | FirepoolError]:
        out: list[Taken | FirepoolError] = []
        for spec, digest in specs:
            try:
                out.append(await self.submit(who, spec, digest))
            except FirepoolError as error:
                out.append(error)
        return out

    # -- what a job does -----------------------------------------------------------------------------------------------

    async def _run(self, job: str, who: Identity, argv: list[str]) -> None:
        if argv[0] == "queue":
            return
        await self._start(job, who.caller, 0)
        match argv:
            case ["wait"]:
                return
            case ["print", *texts]:
                for text in texts:
                    self.log(job, text.encode() + b"\n")
                await self.finish(job)
            case ["exit", code]:
                await self.finish(job, NonZeroExit(f"exit code {code}", exit_code=int(code)), int(code))
            case ["write", path, text]:
                digest = await self.blobs.put_bytes(who.caller, text.encode())
                await self.finish(job, outputs=[{"path": path, "bytes": len(text), "digest": digest}])
            case ["result", text]:
                await self.finish(job, result=base64.b64decode(text))
            case _:
                raise AssertionError(argv)

    async def _start(self, job: str, caller: str, attempt: int) -> None:
        start = StartAttempt(
            job=job,
            attempt=f"{job}:{attempt}",
            version=self._versions[job],
            token="t",
            pods=("pod-1",),
            path="warm",
            why_not_warmer="",
            retire_after=(False,),
            caller=caller,
            queue="default",
            tag=None,
            at=self.now(),
        )
        won = await self.store.write(start)
        assert not isinstance(won, Lost), won
        self._versions[job] = won.version
        await self._tell(job)

    def log(self, job: str, data: bytes, attempt: int = 0) -> None:
        self.logs.append(f"{job}:{attempt}", 0, 1, data, 0)

    async def finish(
        self,
        job: str,
        error: FirepoolError | None = None,
        code: int = 0,
        *,
        outputs: list[dict[str, Any]] | None = None,
        result: bytes | None = None,
        result_blob: str | None = None,
        attempt: int = 0,
    ) -> None:
        state = JobState.SUCCEEDED if error is None else JobState.FAILED
        state = JobState.CANCELLED if isinstance(error, Cancelled) else state
        await self._end(
            job, state, 0, error, code, attempt=attempt, outputs=outputs, result=result, result_blob=result_blob
        )
        self._ends[job].set()

    async def requeue(self, job: str, attempt: int) -> None:
        """End attempt number `attempt`; the job waits for its next."""
        await self._end(job, JobState.QUEUED, attempt + 1, None, 1, attempt=attempt)

    async def restart(self, job: str, attempt: int) -> None:
        """Start attempt number `attempt`."""
        row = await self.row(job)
        assert row is not None
        await self._start(job, row.caller, attempt)

    async def _end(
        self,
        job: str,
        state: JobState,
        retries: int,
        error: FirepoolError | None,
        code: int,
        *,
        attempt: int = 0,
        outputs: list[dict[str, Any]] | None = None,
        result: bytes | None = None,
        result_blob: str | None = None,
    ) -> None:
        now = self.now()
        row = await self.row(job)
        assert row is not None
        facts = {
            "exit_code": code if row.attempt else None,
            "error": {**error.to_json(), "job_id": job} if error else None,
            "times": {"claimed": now - 2, "committed": now - 2, "first_instruction": now - 1, "ended": now},
            "usage": {"peak_rss_bytes": 1000, "cpu_s": 0.5, "peak_device_bytes": None},
            "outputs": outputs or [],
            "result_bytes": len(result or b""),
        }
        end = EndAttempt(
            job=job,
            attempt=f"{job}:{attempt}",
            version=self._versions[job],
            state=state,
            retry_count=max(retries, row.retry_count),
            infra_retries=0,
            facts=facts,
            at=now,
            result=result,
            result_blob=result_blob,
        )
        won = await self.store.write(end)
        assert not isinstance(won, Lost), won
        self._versions[job] = won.version
        self.logs.finish(f"{job}:{attempt}", 0)
        await self._tell(job)

    async def _tell(self, job: str) -> None:
        row = await self.row(job)
        assert row is not None
        told = Told(job, row.state, row.seq, row if row.state in TERMINAL else None)
        for window in self.windows:
            if window.caller == row.caller:
                window.put(told)

    # -- the rest of the protocol --------------------------------------------------------------------------------------

    async def cancel(self, who: Identity, job: str, failure: FirepoolError | None = None) -> None:
        await self.finish(job, failure or Cancelled("cancelled", job_id=job), 143)

    async def renew(self, who: Identity, jobs: Sequence[str]) -> None:
        self.renewed.append(list(jobs))

    def pool_problems(self, pools: Sequence[Pool]) -> list[str]:
        return [f"pool {p.sku}: its floor is over its ceiling" for p in pools if p.min_count > p.max_count]

    async def configure(self, pools: Sequence[Pool]) -> None:
        if found := self.pool_problems(pools):
            raise BadRequest("; ".join(found), problems=found)
        self.pools = list(pools)
        self.engine.handle(PoolsConfigured(tuple(pools)), self.now())

    async def limit(self, caller: str, limits: CallerLimits) -> None:
        self.limits[caller] = limits

    def watch(self, caller: str) -> Window:
        return Window(self, caller, self.window_room)

    async def wait_terminal(self, job: str, timeout_s: float) -> JobRow | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ends[job].wait()
        except TimeoutError:
            return None
        return await self.row(job)

    async def row(self, job: str) -> JobRow | None:
        row: JobRow | None = await self.store.get(job)
        return row

    async def result_pieces(self, row: JobRow) -> AsyncIterator[bytes]:
        ended = await self.wait_terminal(row.job, 60)
        assert ended is not None
        yield ended.result or b""

    def interpreters(self) -> list[dict[str, Any]]:
        return [{"sku": "cpu", "python": "/usr/bin/python3", "version": "3.11", "pickle": 5}]

    def problems(self) -> list[str]:
        return self.trouble

    def render_metrics(self) -> bytes:
        return b"# EOF\n"
