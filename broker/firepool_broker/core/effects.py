"""What the engine may ask for, in the imperative. A shell carries every effect out and answers with events; each
docstring names the answers. Effects of one `handle` call are started in their order and may finish in any; but calls to
one pod's agent arrive in the order of their effects (an `AbandonLease` never overtakes its `PrepareLease`, nor a later prepare
an earlier one), and a prepare that was given up is refused by its deadline when it arrives after all.
"""

from dataclasses import dataclass

from firepool_broker.core.asks import Ask, Exit, Failure
from firepool_broker.core.ids import AttemptId, Caller, JobId, Person, PodName, Queue, ReuseTag, Sku, TemplateDigest
from firepool_wire.words import JobState, Path


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Woke` at this time (the engine's clock). Only the earliest outstanding wake-up matters."""

    at: float


# -- the submitter --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer the submitter: the job is durable in `state`."""

    job: JobId
    state: JobState


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the submitter: refused at once, nothing was written."""

    job: JobId
    failure: Failure


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell whoever watches the job that something visible changed (state, position, blocker, pods)."""

    job: JobId
    state: JobState


# -- the store: writes are applied in the order of their effects ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Insert the job as PENDING or QUEUED. Answers: `JobStored` | `JobStoreFailed`."""

    ask: Ask
    state: JobState


@dataclass(frozen=True, slots=True)
class QueueJob:
    """PENDING → QUEUED for a stored job whose inputs are there now. No answer (idempotent; recovery repeats it)."""

    job: JobId
    version: int


@dataclass(frozen=True, slots=True)
class CommitStart:
    """Write the start with its bindings; conditional on the row's `version` (ignored when `insert`: written once,
    already RUNNING). Answers: `Committed` | `CommitLost` | `CommitUnknown`."""

    attempt: AttemptId
    insert: bool
    version: int
    pods: tuple[PodName, ...]
    path: Path
    why_not_warmer: str
    #: Per pod: the boundary decision taken at claim time (who owns it afterwards, whether it must then retire).
    retire_after: tuple[bool, ...]
    caller: Caller
    queue: Queue
    tag: ReuseTag | None


@dataclass(frozen=True, slots=True)
class SettleCommit:
    """Read the row's dispatch token after `CommitUnknown`. Answers: `Committed` | `CommitLost` (retried until known)."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class RecordCancel:
    """Set `cancel_requested` on a RUNNING job. No answer."""

    job: JobId
    version: int


@dataclass(frozen=True, slots=True)
class CommitEnd:
    """Write a terminal state or a re-queue (`state` QUEUED, retry count raised). `attempt` is the one that ended; for a
    job that never started it is the attempt it would have had. Answers: `EndCommitted` | `EndCommitFailed`."""

    attempt: AttemptId
    version: int
    state: JobState
    #: Exit of rank 0 as the job reports it; None for a job that never started.
    exit: Exit | None
    failure: Failure | None
    retry_count: int
    infra_retries: int
    path: Path | None
    why_not_warmer: str
    #: Milestones in seconds on the engine's clock: submitted, accepted, queued, claimed, prepared, committed,
    #: gate_open, launched, first_instruction, ended (those that were reached).
    times: tuple[tuple[str, float], ...] = ()


# -- agents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareLease:
    """Have the pod's agent record the attempt and fork its process. Answers: `LeasePrepared` | `LeasePrepareFailed`."""

    attempt: AttemptId
    pod: PodName
    caller: Caller
    person: Person
    queue: Queue
    tag: ReuseTag | None


@dataclass(frozen=True, slots=True)
class AbandonLease:
    """Undo a prepare that will not be launched. No answer: a pod that cannot be undone answers `PodUnreachable`."""

    attempt: AttemptId
    pod: PodName


@dataclass(frozen=True, slots=True)
class MarkRunning:
    """Write owner and timing annotations in a patch that is already due. Best effort, no answer (S7)."""

    attempt: AttemptId
    pod: PodName
    caller: Caller
    queue: Queue
    tag: ReuseTag | None
    retire_after: bool


@dataclass(frozen=True, slots=True)
class MarkReleased:
    """Annotate release time and hold deadline. Best effort, no answer."""

    pod: PodName
    released_at: float
    hold_deadline: float


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """Deliver, unpack, install and release the attempt on all its pods, then follow their event streams.

    Answers per pod: `Launched` | `LaunchFailed`, `FirstInstruction`, `AttemptEnded`, `PodUnreachable`."""

    attempt: AttemptId
    pods: tuple[PodName, ...]


@dataclass(frozen=True, slots=True)
class FollowAttempt:
    """Re-attach to a live attempt after a start, from the offset that the store has. Answers as `LaunchAttempt`."""

    attempt: AttemptId
    pods: tuple[PodName, ...]


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """End the attempt on one pod with the job's grace period; `failure` becomes its error. Answer: `AttemptEnded`."""

    attempt: AttemptId
    pod: PodName
    failure: Failure


@dataclass(frozen=True, slots=True)
class ProbeAttempt:
    """Ask the pod's agent what it knows: 3 probes, 0.5 s apart, each 2 s (spec §10). Answer: `AttemptProbed`."""

    attempt: AttemptId
    pod: PodName


@dataclass(frozen=True, slots=True)
class ResetPod:
    """Reset the pod after the attempt. Answers: `ResetClean` (then maybe `PodSettled`) | `ResetUnclean`."""

    pod: PodName
    attempt: AttemptId


# -- pods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod; idempotent by name. Answers: `PodReady` | `PodCreateFailed` | `PodGone`."""

    pod: PodName
    sku: Sku
    template: TemplateDigest
    single_use: bool = False


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod off the critical path. Answer: `PodGone` once verified."""

    pod: PodName
    why: str


Effect = (
    WakeAt
    | Accept
    | Refuse
    | Notify
    | StoreJob
    | QueueJob
    | CommitStart
    | SettleCommit
    | RecordCancel
    | CommitEnd
    | PrepareLease
    | AbandonLease
    | MarkRunning
    | MarkReleased
    | LaunchAttempt
    | FollowAttempt
    | StopAttempt
    | ProbeAttempt
    | ResetPod
    | CreatePod
    | DeletePod
)
