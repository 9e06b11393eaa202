"""Facts that cross the engine's door: what a caller asks, what a store or a provider found, how an attempt ended.

Frozen data without behaviour. The engine never sees payloads, environment or arguments: only what a decision needs.
"""

from dataclasses import dataclass
from typing import Literal

from firepool_broker.core.ids import (
    AttemptId,
    Caller,
    Card,
    JobId,
    Person,
    PodName,
    Queue,
    ReuseTag,
    Sku,
    TemplateDigest,
)
from firepool_wire.words import Fault, JobState, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The part of a job spec that decisions need."""

    job: JobId
    caller: Caller
    person: Person
    sku: Sku
    pods: int = 1
    queue: Queue = Queue("default")
    priority: int = 0
    tag: ReuseTag | None = None
    single_use: bool = False
    preemptible: bool = False
    #: Digest of the requirement set ("" = none): among equal owner pods the one that has it installed is preferred.
    requirements: str = ""
    #: Minimum isolation level, "" = the pool's.
    isolation: str = ""
    queue_timeout_s: float | None = None
    start_timeout_s: float | None = None
    run_timeout_s: float | None = None
    client_lease_s: float | None = None
    max_retries: int = 0
    retry_on: tuple[str, ...] = ()
    #: Jobs whose results are arguments: the job is PENDING until all of them have succeeded.
    depends: tuple[JobId, ...] = ()
    #: First submission, seconds on the engine's clock; kept over every re-queue.
    submitted_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as the core sees it: a code of the table, whose fault, whether a retry can help, and words for people."""

    code: str
    message: str
    fault: Fault
    retryable: bool
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an attempt ended on one pod. `failure` None = success. `exit_code` None = no process ever exited."""

    exit_code: int | None = None
    signal: int | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUse:
    """Who used a pod last, from the store's bindings, the agent's disk, or the pod's annotations (spec §3)."""

    caller: Caller
    queue: Queue
    tag: ReuseTag | None
    #: Release time on the engine's clock; None = not released (still in use, or the witness does not know). An agent says
    #: one only after a reset that it proved clean: a used pod without a release is not claimable before one.
    released_at: float | None = None
    hold_deadline: float | None = None
    #: The pod must retire after the job it runs now (boundary decision taken at claim time).
    retire_after: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPod:
    """A live pod that the provider lists at start, with what its annotations and its agent say."""

    pod: PodName
    sku: Sku
    template: TemplateDigest
    created_at: float
    ready: bool
    single_use: bool = False
    cards: tuple[Card, ...] = ()
    isolation: str = ""
    #: Last use as annotated; None = annotated as never used (or not annotated).
    annotated: LastUse | None = None
    #: Last use as the agent's own disk says; None = never used; meaningless when `agent_answered` is False.
    agent: LastUse | None = None
    agent_answered: bool = False
    #: Its deletion is under way: it counts until verified gone, and serves nobody.
    terminating: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A non-terminal job that the store holds at start, with the bindings of its current attempt when RUNNING."""

    ask: Ask
    state: JobState
    retry_count: int
    version: int
    infra_retries: int = 0
    cancel_requested: bool = False
    pods: tuple[PodName, ...] = ()
    path: Path | None = None
    retire_after: bool = False
    why_not_warmer: str = ""
    started_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """From the store: who was bound to a pod by the newest committed start (the first witness of its last use)."""

    pod: PodName
    attempt: AttemptId
    caller: Caller
    queue: Queue
    tag: ReuseTag | None
    retire_after: bool = False


ProbeVerdict = Literal["live", "ended", "unknown", "unreachable", "gone"]
