"""What may happen to the engine, in the past tense. Every event is a frozen fact; `Engine.handle` matches on all of them.

Both shells speak only these. An event about an attempt carries its id, so a late answer for an old attempt never
changes a newer one (audit S41).
"""

from dataclasses import dataclass

from firepool_broker.core.asks import Ask, Binding, Exit, Failure, FoundJob, FoundPod, ProbeVerdict
from firepool_broker.core.ids import AttemptId, Caller, Card, JobId, PodName
from firepool_broker.core.pools import CallerLimits, Pool

# -- configuration and life of the broker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolsConfigured:
    """The operator's pools replace the running ones as a whole; a pool that vanished drains."""

    pools: tuple[Pool, ...]


@dataclass(frozen=True, slots=True)
class CallerLimited:
    """A caller's limits were set."""

    caller: Caller
    limits: CallerLimits


@dataclass(frozen=True, slots=True)
class BrokerStarted:
    """The facts of a start: live pods, non-terminal jobs, newest binding per pod. Nothing is dispatched before it (S43)."""

    pods: tuple[FoundPod, ...] = ()
    jobs: tuple[FoundJob, ...] = ()
    bindings: tuple[Binding, ...] = ()


@dataclass(frozen=True, slots=True)
class Woke:
    """A time that the engine asked for with `WakeAt` has come (also the 3 s fallback tick and the 30 s reconcile)."""


# -- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A validated, authenticated job; its blobs are in the store."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class JobStored:
    """The write of `StoreJob` is durable."""

    job: JobId


@dataclass(frozen=True, slots=True)
class JobStoreFailed:
    """The write of `StoreJob` failed; the submitter gets the error and the job is forgotten."""

    job: JobId
    failure: Failure


@dataclass(frozen=True, slots=True)
class DependencyEnded:
    """A job that another waits for ended; `failure` None = its result is there."""

    job: JobId
    dependency: JobId
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Someone with the right to do so wants the job gone; `failure` says as what (Cancelled, ClientGone, …)."""

    job: JobId
    failure: Failure
    actor: str = ""


@dataclass(frozen=True, slots=True)
class ClientRenewed:
    """A client of the jobs renewed their lease."""

    jobs: tuple[JobId, ...]


# -- the saga of a start --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeasePrepared:
    """A pod's agent recorded the attempt and its user on disk; its process waits."""

    attempt: AttemptId
    pod: PodName


@dataclass(frozen=True, slots=True)
class LeasePrepareFailed:
    """A pod's agent did not prepare (error, time-out, or answered as another boot): the pods retire (S6)."""

    attempt: AttemptId
    pod: PodName
    failure: Failure


@dataclass(frozen=True, slots=True)
class Committed:
    """The start is durable: user code may run."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class CommitLost:
    """The start was not written (version moved, cancelled, leadership or disk lost): the claim is undone exactly (S5).

    `cancelled`: the row is already terminal. Otherwise the job is still QUEUED.
    """

    attempt: AttemptId
    failure: Failure
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class CommitUnknown:
    """The connection was lost inside the commit: nothing is returned or launched until `CommitSettled` (2.30)."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Launched:
    """The agent of one pod released the attempt's process."""

    attempt: AttemptId
    pod: PodName


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """Delivery, unpacking, installing or the launch itself failed on one pod: an attempt failure for the whole set."""

    attempt: AttemptId
    pod: PodName
    failure: Failure


@dataclass(frozen=True, slots=True)
class FirstInstruction:
    """User code runs; `at` on the engine's clock."""

    attempt: AttemptId
    pod: PodName
    at: float


# -- the end of an attempt, and the pod's way back ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The exit record of one pod's part of the attempt, with everything it produced already in the broker's store."""

    attempt: AttemptId
    pod: PodName
    exit: Exit


@dataclass(frozen=True, slots=True)
class EndCommitted:
    """The end (or the re-queue) of the attempt is durable."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class EndCommitFailed:
    """The write of the end failed; the effect is issued again after a delay: the exit record is still with the agent."""

    attempt: AttemptId
    failure: Failure


@dataclass(frozen=True, slots=True)
class ResetClean:
    """The agent proved the reset. `settling`: bytes are still being freed; claimable only after `PodSettled`."""

    pod: PodName
    attempt: AttemptId
    settling: bool = False
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSettled:
    """The trash's bytes are free again."""

    pod: PodName


@dataclass(frozen=True, slots=True)
class ResetUnclean:
    """Something could not be confirmed (or the agent did not answer), also while a clean pod settles: the pod retires."""

    pod: PodName
    attempt: AttemptId
    why: str


# -- pods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodCreateFailed:
    """The provider refused or failed to create the pod."""

    pod: PodName
    failure: Failure


@dataclass(frozen=True, slots=True)
class PodReady:
    """The pod's agent answered `hello`."""

    pod: PodName
    cards: tuple[Card, ...] = ()
    isolation: str = ""


@dataclass(frozen=True, slots=True)
class PodUnreachable:
    """An agent call timed out or broke (a strike). Neither proves the job dead."""

    pod: PodName
    why: str


@dataclass(frozen=True, slots=True)
class PodReachable:
    """A struck agent answered again, same boot."""

    pod: PodName


@dataclass(frozen=True, slots=True)
class PodGone:
    """Verified gone (locally a pidfd exit): whatever it ran is dead."""

    pod: PodName
    why: str = ""
    #: The pod was killed for its memory: its attempt is `OOM`, not `HostLost`.
    oom: bool = False


@dataclass(frozen=True, slots=True)
class AttemptProbed:
    """Answer to `ProbeAttempt` after a start: live, ended (with its exit), unknown to the agent, unreachable, pod gone."""

    attempt: AttemptId
    pod: PodName
    verdict: ProbeVerdict
    exit: Exit | None = None
    why: str = ""


#: What nearly every job goes through: the engine looks for these first.
HotEvent = (
    JobSubmitted | LeasePrepared | Committed | Launched | FirstInstruction | AttemptEnded | EndCommitted | ResetClean
)

RareEvent = (
    Woke
    | JobStored
    | PodReady
    | PodGone
    | PodSettled
    | ClientRenewed
    | CancelRequested
    | DependencyEnded
    | JobStoreFailed
    | LeasePrepareFailed
    | CommitLost
    | CommitUnknown
    | LaunchFailed
    | EndCommitFailed
    | ResetUnclean
    | PodCreateFailed
    | PodUnreachable
    | PodReachable
    | AttemptProbed
    | PoolsConfigured
    | CallerLimited
    | BrokerStarted
)

Event = HotEvent | RareEvent
