"""The writes to the job's row, and the row's version. The engine is the only writer and its writes are applied in the order
of their effects, so the version after every write is known when it is emitted.
"""

from dataclasses import dataclass

from firepool_broker.core.asks import Exit, Failure
from firepool_broker.core.effects import Accept, CommitEnd, CommitStart, Notify, Refuse, StoreJob
from firepool_broker.core.ids import JobId
from firepool_broker.core.jobs import BEING_STORED, CANCELLED, FAILED, NOT_STORED, QUEUED, STORED, JobRecord
from firepool_broker.core.leases import COMMITTING, Lease
from firepool_broker.core.state import State
from firepool_wire.words import Fault, JobState


def store(s: State, job: JobRecord, state: JobState) -> None:
    """Insert the row; the submitter is answered when it is durable."""
    s.move(job, state)
    job.row = BEING_STORED
    job.version = 1
    s.emit(StoreJob(job.ask, state))


def stored(s: State, name: JobId) -> None:
    """The row is durable: the submitter has its answer, the job is ours to keep."""
    job = s.jobs.get(name)
    if job is not None:
        if job.row is BEING_STORED:
            job.row = STORED
        accept(s, job)


def accept(s: State, job: JobRecord) -> None:
    """Answer the submitter, once."""
    if not job.accepted and job.state is not None:
        job.accepted = True
        job.at_accepted = s.now
        s.emit(Accept(job.id, job.state))


def refuse(s: State, job: JobRecord, cause: Failure) -> None:
    """Answer the submitter that nothing was written, if it still waits."""
    if not job.accepted:
        job.accepted = True
        s.emit(Refuse(job.id, cause))


def commit_start(s: State, lease: Lease) -> None:
    """Write the start with its bindings: as the job's first write where nothing is stored yet."""
    job = lease.job
    lease.phase = COMMITTING
    lease.insert = job.row is NOT_STORED
    if lease.insert:
        job.row = BEING_STORED
        job.version = 0
    ask = job.ask
    s.emit(
        CommitStart(
            lease.attempt,
            lease.insert,
            job.version,
            lease.names,
            lease.path,
            job.why.value if job.why is not None else "",
            lease.retire_after,
            ask.caller,
            ask.queue,
            ask.tag,
        )
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a job ends as, or QUEUED when it gets another attempt; `infra`: one that does not use up its retries."""

    state: JobState
    cause: Failure | None
    infra: bool = False


def commit_end(s: State, job: JobRecord, verdict: Verdict, ended: Exit | None) -> None:
    """Write a terminal state, or a re-queue under the next retry count; a failed write is issued again."""
    lease = job.lease
    requeue = verdict.state is QUEUED
    end = CommitEnd(
        job.attempt,
        job.version,
        verdict.state,
        ended,
        verdict.cause,
        job.retry_count + requeue,
        job.infra_retries + (requeue and verdict.infra),
        lease.path if lease is not None else None,
        job.why.value if job.why is not None else "",
        times(job, lease),
    )
    job.end = end
    s.emit(end)


def end_state(cause: Failure) -> JobState:
    """The terminal state that an asked-for end means."""
    return CANCELLED if cause.code in ("Cancelled", "ClientGone") else FAILED


def is_infra(cause: Failure, ended: Exit | None) -> bool:
    """Whether an infrastructure re-queue applies: no exit record of user code exists for the part that failed."""
    return (
        cause.fault is Fault.INFRA
        and cause.retryable
        and (ended is None or (ended.exit_code is None and ended.signal is None))
    )


def notify(s: State, job: JobRecord) -> None:
    """Tell whoever watches the job."""
    if job.state is not None:
        s.emit(Notify(job.id, job.state))


def times(job: JobRecord, lease: Lease | None) -> tuple[tuple[str, float], ...]:
    """The milestones that were reached, of an attempt that is over (before that, those still to come are negative)."""
    before = (("submitted", job.ask.submitted_at), ("accepted", job.at_accepted), ("queued", job.at_queued))
    if lease is None:
        return _reached(before)
    after: tuple[tuple[str, float], ...] = (
        ("claimed", lease.at_claimed),
        ("prepared", lease.at_prepared),
        ("committed", lease.at_committed),
        # No standby yet: the gate of a pod's own card is open when its start is committed.
        ("gate_open", lease.at_committed),
        ("launched", lease.at_launched),
        ("first_instruction", lease.at_first),
        ("ended", lease.at_ended),
    )
    if lease.at_first < 0.0 or lease.at_launched < 0.0 or lease.at_prepared < 0.0:
        after = _reached(after)
    if job.at_queued < 0.0:
        return (*before[:2], *after) if job.at_accepted >= 0.0 else (before[0], *after)
    return (*_reached(before), *after)


def _reached(milestones: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple([milestone for milestone in milestones if milestone[1] >= 0.0])
