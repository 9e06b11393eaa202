"""The end of an attempt (spec §2–§4): every part over → one durable end or re-queue; every pod reset or retired by itself.

A part of an attempt is over when its exit record is there, its pod is verified gone, or a reset proved that nothing of it
runs. Nothing else ends it: not a time-out of a call, not a refused connection (S47). A cancelled job is CANCELLED only when
every process tree is proven gone. Which failures are retried is decided here, and only here.
"""

from math import inf

from firepool_broker.core import claims, fleet, queueing, rows, starts
from firepool_broker.core.asks import Exit, Failure
from firepool_broker.core.effects import MarkReleased, ProbeAttempt, ResetPod, StopAttempt
from firepool_broker.core.errors import failure
from firepool_broker.core.events import (
    AttemptEnded,
    EndCommitFailed,
    LaunchFailed,
    PodGone,
    PodSettled,
    ResetClean,
    ResetUnclean,
)
from firepool_broker.core.ids import AttemptId, job_of
from firepool_broker.core.jobs import CANCELLED, FAILED, QUEUED, SUCCEEDED, JobRecord
from firepool_broker.core.leases import ACTIVE, ENDING, OVER, PREPARING, VERIFIED, Lease
from firepool_broker.core.pods import RESETTING, RUNNING, PodRecord
from firepool_broker.core.state import State
from firepool_wire.words import Fault

#: A stop that was not confirmed for so long ends with the deletion of the pod (its verified end ends the attempt).
STOP_WAIT_S = 60.0
#: A failed write of an end is issued again after this, doubling up to the last.
_AGAIN_FIRST_S, _AGAIN_LAST_S = 0.25, 5.0
#: Back-off between infrastructure re-queues; the first is immediate.
_REQUEUE_FIRST_S, _REQUEUE_LAST_S = 0.25, 10.0

_SUCCESS = rows.Verdict(SUCCEEDED, None)


# -- parts ----------------------------------------------------------------------------------------------------------


def attempt_ended(s: State, event: AttemptEnded) -> None:
    """The exit record of one pod's part: the pod goes its way at once, the attempt ends with its last part."""
    found = s.lease_of(event.attempt, event.pod)
    if found is None or found[0].phase is not ACTIVE:
        return
    lease, rank = found
    _part_over(s, lease, rank, event.exit, event.exit.failure)
    _release(s, lease, rank)
    _finish(s, lease)


def launch_failed(s: State, event: LaunchFailed) -> None:
    """A failure for the whole set (S40). The part is over only when the reset proves that nothing of it runs."""
    found = s.lease_of(event.attempt, event.pod)
    if found is None or found[0].phase is not ACTIVE:
        return
    lease, rank = found
    if lease.parts[rank] < OVER:
        _release(s, lease, rank)
        _blame(s, lease, rank, event.failure, None)


def committed(s: State, attempt: AttemptId) -> None:
    """The start is durable: launch, unless the job was cancelled or lost a pod meanwhile; then every pod is reset."""
    lease = starts.committed(s, attempt)
    if lease is None:
        return
    if lease.job.cancel is None and lease.cause is None:
        starts.launch(s, lease)
        return
    if lease.cause is None:
        lease.cause = lease.job.cancel
    for rank in range(len(lease.pods)):
        _release(s, lease, rank)
    _finish(s, lease)


def pod_gone(s: State, lease: Lease, rank: int, event: PodGone) -> None:
    """A pod of the set is verified gone: its part is over, and nothing of it runs any more."""
    if s.leases.get(lease.attempt) is not lease:
        return
    if lease.phase is PREPARING:
        starts.undo(s, lease)
        starts.place(s, lease.job)
        return
    if lease.parts[rank] < OVER:
        name = lease.pods[rank].name
        code = "OOM" if event.oom else "HostLost"
        what = "used more memory than it has" if event.oom else "was lost"
        why = f": {event.why}" if event.why else ""
        _part_over(s, lease, rank, None, failure(code, f"pod {name} {what}{why}", pod=name))
    _verified(s, lease, rank)


def proven_over(s: State, lease: Lease, rank: int, ended: Exit | None, cause: Failure | None) -> None:
    """A probe showed that the part does not run (any more): as an exit record, or because it never was launched."""
    if lease.parts[rank] < OVER:
        _part_over(s, lease, rank, ended, cause)
        _release(s, lease, rank)
        _finish(s, lease)


def ask_again(s: State, lease: Lease, pod: PodRecord) -> None:
    """A pod that is being deleted as unreachable answered: what became of its part?"""
    if s.leases.get(lease.attempt) is lease and lease.parts[pod.rank] < OVER:
        s.emit(ProbeAttempt(lease.attempt, pod.name))


def _part_over(s: State, lease: Lease, rank: int, ended: Exit | None, cause: Failure | None) -> None:
    if lease.parts[rank] >= OVER:
        return
    lease.parts[rank] = OVER
    lease.exits[rank] = ended
    lease.open -= 1
    job = lease.job
    claims.release_use(job.usage, job.pool, 1)
    if job.usage.parked:
        starts.freed(s, job.usage)
    if cause is not None:
        _blame(s, lease, rank, cause, ended)
    if not lease.open:
        lease.at_ended = s.now


def _blame(s: State, lease: Lease, rank: int, cause: Failure, ended: Exit | None) -> None:
    """The first failure is the attempt's; any rank's failure stops the others."""
    if lease.cause is not None:
        return
    lease.cause, lease.cause_rank, lease.cause_exit = cause, rank, ended
    if lease.open and len(lease.pods) > 1 and lease.phase is ACTIVE:
        stop(s, lease, failure("RankFailed", f"rank {rank} failed first: {cause.code}", rank=rank, code=cause.code))


def stop(s: State, lease: Lease, cause: Failure) -> None:
    """Ask every pod on which the attempt may run to end it; unconfirmed stops end with the pod (`stop_by`)."""
    if lease.cause is None:
        lease.cause = cause
    for rank, pod in enumerate(lease.pods):
        if lease.parts[rank] < OVER and pod.state is RUNNING and pod.lease is lease:
            s.emit(StopAttempt(lease.attempt, pod.name, cause))
    lease.start_by = lease.run_by = 0.0
    lease.stop_by = s.now + STOP_WAIT_S
    s.timers.arm_by(lease.job, lease.stop_by)


def _release(s: State, lease: Lease, rank: int) -> None:
    """Send one pod of the set on its way: to its reset, or, as decided at claim time, to its end."""
    pod = lease.pods[rank]
    if pod.lease is not lease or pod.state is not RUNNING:
        return
    if lease.retire_after[rank] or pod.doomed or pod.rack.pool.removed:
        fleet.retire(s, pod, "retires after this job")
        s.tend(pod.rack.pool)
        return
    pod.strikes, pod.unreachable_since = 0, -1.0
    s.tracker.reset(pod)
    s.emit(ResetPod(pod.name, lease.attempt))


def _verified(s: State, lease: Lease, rank: int) -> None:
    """Nothing of the attempt runs on this pod: that also ends a part whose exit record will never come."""
    if lease.parts[rank] is VERIFIED:
        return
    _part_over(s, lease, rank, None, None)
    lease.parts[rank] = VERIFIED
    lease.unverified -= 1
    _finish(s, lease)


# -- the whole attempt ----------------------------------------------------------------------------------------------


def _finish(s: State, lease: Lease) -> None:
    """When every part is over: write what the job ends as, or its re-queue."""
    if lease.open or lease.phase is not ACTIVE or s.leases.get(lease.attempt) is not lease:
        return
    job = lease.job
    verdict = _verdict(lease)
    if verdict.state is CANCELLED and lease.unverified:
        return
    lease.phase = ENDING
    rows.commit_end(s, job, verdict, lease.exits[0])


def _verdict(lease: Lease) -> rows.Verdict:
    """What the attempt's end makes of the job."""
    job = lease.job
    cause = lease.cause
    if cause is None or all(ended is not None and ended.failure is None for ended in lease.exits):
        # Also when a stop was asked for: the job was done before it came.
        return _SUCCESS
    if job.cancel is not None:
        return rows.Verdict(rows.end_state(job.cancel), job.cancel)
    told = _told(lease, cause)
    infra = rows.is_infra(cause, lease.cause_exit)
    if infra:
        again = job.infra_retries < job.pool.pool.max_infra_retries
    else:
        used = job.retry_count - job.infra_retries
        wanted = job.ask.retry_on
        again = used < job.ask.max_retries and (not wanted or cause.code in wanted or told.code in wanted)
    return rows.Verdict(QUEUED if again else FAILED, told, infra)


def _told(lease: Lease, cause: Failure) -> Failure:
    """The failure as the job reports it: a gang whose rank failed says which."""
    if len(lease.pods) == 1 or lease.cause_rank < 0 or cause.fault is not Fault.USER:
        return cause
    rank = lease.cause_rank
    return failure("RankFailed", f"rank {rank} failed first: {cause.code}: {cause.message}", rank=rank, code=cause.code)


def end_committed(s: State, attempt: AttemptId) -> None:
    """The end, or the re-queue, is durable."""
    lease = s.leases.pop(attempt, None)
    job = lease.job if lease is not None else s.jobs.get(job_of(attempt))
    if job is None or job.end is None or job.end.attempt != attempt:
        if lease is not None:
            s.leases[attempt] = lease
        return
    end, job.end, job.lease = job.end, None, None
    job.end_failures = 0
    job.version += 1
    s.move(job, end.state)
    rows.accept(s, job)
    rows.notify(s, job)
    if end.state is not QUEUED:
        queueing.forget(s, job, end.failure)
        return
    was_infra = end.infra_retries > job.infra_retries
    job.next_attempt(end.retry_count, end.infra_retries)
    _again(s, job, was_infra)


def _again(s: State, job: JobRecord, was_infra: bool) -> None:
    """The job waits for its next attempt, in the place of its first submission."""
    job.refused_at = inf
    never = job.cancel or queueing.never_servable(job.pool, job.pods)
    if never is not None:
        queueing.end_waiting(s, job, never)
        return
    if was_infra and job.infra_retries > 1:
        job.not_before = s.now + min(_REQUEUE_LAST_S, _REQUEUE_FIRST_S * 2.0 ** (job.infra_retries - 2))
    starts.place(s, job)


def end_commit_failed(s: State, event: EndCommitFailed) -> None:
    """Write it again after a while: the exit record is still with the agent."""
    job = s.jobs.get(job_of(event.attempt))
    if job is None or job.end is None or job.end.attempt != event.attempt:
        return
    s.story.note(job, f"end not written: {event.failure.code}")
    job.end_again = s.now + min(_AGAIN_LAST_S, _AGAIN_FIRST_S * 2.0 ** min(job.end_failures, 10))
    job.end_failures += 1
    s.timers.arm_by(job, job.due())


# -- the pod's way back ---------------------------------------------------------------------------------------------


def reset_clean(s: State, event: ResetClean) -> None:
    """The agent proved the reset: the pod is held for its owner, claimable once its bytes are free."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None or pod.state is not RESETTING:
        return
    lease, rank = pod.lease, pod.rank
    if lease is not None and lease.attempt != event.attempt:
        return
    pool = pod.rack.pool
    if pool.removed or pod.doomed:
        fleet.retire(s, pod, "no longer wanted")
        s.tend(pool)
    else:
        pod.layers = event.layers
        _hold(s, pod, event.settling)
        owner = pod.owner
        if pod.rack.stale:
            s.tend(pool)
        elif not event.settling and owner is not None and pool.queue.jobs:
            s.feed_owner(pool, owner)
            s.tend(pool)
    if lease is not None:
        _verified(s, lease, rank)


def _hold(s: State, pod: PodRecord, settling: bool) -> None:
    """Released now; but a pod whose reset was only repeated after a restart keeps its clock (S15)."""
    released, deadline = s.now, s.now + pod.rack.pool.pool.hold_s
    if pod.lease is None and pod.hold_deadline:
        released, deadline = pod.released_at, pod.hold_deadline
    s.tracker.hold(pod, released, deadline, settling=settling)
    s.timers.arm_by(pod, deadline)
    s.emit(MarkReleased(pod.name, released, deadline))


def reset_unclean(s: State, event: ResetUnclean) -> None:
    """Not confirmed: the pod retires; the finished job keeps its result; a part that is not over waits for the pod's end."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None or not (pod.state is RESETTING or pod.settling):
        return
    if pod.lease is not None and pod.lease.attempt != event.attempt:
        return
    fleet.retire(s, pod, f"unclean: {event.why}")
    s.tend(pod.rack.pool)


def settled(s: State, event: PodSettled) -> None:
    """The trash's bytes are free: the pod is claimable by its owner."""
    pod = s.tracker.pods.get(event.pod)
    if pod is not None and pod.settling:
        s.tracker.settle(pod)
        if pod.owner is not None:
            s.feed_owner(pod.rack.pool, pod.owner)
        if pod.rack.stale:
            s.tend(pod.rack.pool)
