"""What the runner's rooms share: the ports, the tables of live jobs, pods and attempts, and the engine's letter box.

Plain state and no decisions. Everything here is touched by the event loop's thread only.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from firepool_broker.core.asks import Ask
from firepool_broker.core.events import Event
from firepool_broker.core.ids import AttemptId, Caller, JobId, PodName
from firepool_broker.core.pools import Pool
from firepool_broker.shell.metrics import Metrics
from firepool_broker.shell.ports import (
    AgentClient,
    BlobStore,
    ConfigStore,
    JobStore,
    LogStore,
    PodProvider,
    TokenStore,
)
from firepool_broker.shell.runner.clock import Clock
from firepool_wire.agentapi import ExitRecord, Hello
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The implementations that `main` built and the runner joins. `providers`: by name, as pools name them."""

    store: JobStore
    blobs: BlobStore
    logs: LogStore
    tokens: TokenStore
    config: ConfigStore
    agents: AgentClient
    providers: Mapping[str, PodProvider]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The durable answer to a submission; `replayed`: the idempotency key was used before, with the same body."""

    job: str
    state: JobState
    replayed: bool


@dataclass(slots=True, kw_only=True)
class LiveJob:
    """A job that is not terminal, or whose end is not durable yet."""

    ask: Ask
    spec: JobSpec
    #: Inline arguments were dropped from `spec` while the job waits; its launch reads them from the store again.
    light: bool = False
    body_digest: str
    argv: bool
    state: JobState
    #: Resolved by `Accept`, `Refuse` or a replay; None for jobs found at a start.
    answer: "asyncio.Future[Accepted] | None" = None
    stored: bool = False
    #: Done at the next durable write, where somebody waits for one.
    recorded: "asyncio.Future[None] | None" = None
    #: Version and place in the order of changes after the last durable write.
    version: int = 1
    seq: int = 0
    #: What the last `CommitEnd` wrote, so that the terminal row need not be read back.
    facts: dict[str, Any] = field(default_factory=dict)
    result: bytes | None = None
    result_blob: str | None = None
    retry_count: int = 0
    infra_retries: int = 0
    path: str | None = None
    why_not_warmer: str = ""
    cancel_requested: bool = False
    pods: tuple[PodName, ...] = ()
    retire_after: tuple[bool, ...] = ()


@dataclass(slots=True, kw_only=True)
class LivePod:
    """A pod whose agent answered, or may."""

    name: PodName
    sku: str
    provider: PodProvider
    address: str = ""
    hello: Hello | None = None
    #: Digests known to be in the pod's blob cache.
    blobs: set[str] = field(default_factory=set)
    #: Unreachable since (engine's clock); None = answers.
    struck_at: float | None = None
    #: Set once the pod is verified gone: whoever waits for its agent gives up.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    #: The last call that changes whose the pod is: the next one waits for it.
    turn: "asyncio.Task[None] | None" = None
    #: Readers of event logs on this pod; they may finish before `PodGone` is told.
    readers: set["asyncio.Task[None]"] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Run:
    """One pod's part of an attempt, as far as the shell follows it."""

    attempt: AttemptId
    pod: PodName
    rank: int
    launched: bool = False
    #: Its event log was read before, by this broker or an earlier one.
    read_before: bool = False
    #: Exit record, once its event log was read to the end and everything produced is stored.
    exit: ExitRecord | None = None
    #: What the launch failed with, whole.
    error: dict[str, Any] | None = None
    #: Result frames (rank 0): inline bytes, or the digest of the blob that holds them.
    result: bytes | None = None
    result_blob: str | None = None
    result_bytes: int = 0
    #: Output files with the digest of their blob: [{"path", "bytes", "digest"}].
    outputs: list[dict[str, Any]] = field(default_factory=list)
    #: What the agent wanted told (installing, unpacking, …).
    notes: list[dict[str, Any]] = field(default_factory=list)


class Desk:
    """The shared state; `emit` hands an event to the engine."""

    def __init__(self, parts: Parts, metrics: Metrics, emit: Callable[[Event], None]) -> None:
        self.parts = parts
        self.metrics = metrics
        self.emit = emit
        self.clock = Clock()
        self.log: Any = structlog.get_logger("firepool.runner")
        self.pools: dict[str, Pool] = {}
        self.jobs: dict[JobId, LiveJob] = {}
        self.pods: dict[PodName, LivePod] = {}
        #: Parts of attempts by attempt and pod; kept until the attempt's end is durable.
        self.runs: dict[AttemptId, dict[PodName, Run]] = {}
        #: (caller, idempotency key) → live job.
        self.keys: dict[tuple[Caller, str], JobId] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    def spawn(
        self,
        work: Coroutine[Any, Any, None],
        doing: str,
        otherwise: Callable[[Exception], Event | None] | None = None,
    ) -> "asyncio.Task[None]":
        """Run a piece of work; if it breaks in a way it did not foresee, say so and answer the engine with `otherwise`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                return
            self.metrics.surprises.inc()
            self.log.error("surprise", doing=doing, exc_info=error)
            event = otherwise(error) if otherwise is not None and isinstance(error, Exception) else None
            if event is not None and not self.closing:
                self.emit(event)

        task.add_done_callback(ended)
        return task

    async def stop_tasks(self) -> None:
        """Cancel whatever is under way and wait for it."""
        self.closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def tasks(self) -> int:
        """Pieces of work under way."""
        return len(self._tasks)
