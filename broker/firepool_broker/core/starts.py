"""The saga of a start (spec §3): claim → prepare → commit → launch, with every way in which a step may fail.

No user code runs before the commit. A failed prepare retires the pods, a lost commit undoes the claim exactly, an unknown
commit is read back before anything is returned or launched; what goes wrong after the commit ends the attempt (`endings`).
"""

from math import inf

from firepool_broker.core import claims, fleet, queueing, rows
from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import AbandonLease, LaunchAttempt, MarkRunning, Notify, PrepareLease, SettleCommit
from firepool_broker.core.events import CommitLost, FirstInstruction, Launched, LeasePrepared, LeasePrepareFailed
from firepool_broker.core.ids import AttemptId
from firepool_broker.core.jobs import NOT_STORED, QUEUED, RUNNING, STORED, JobRecord
from firepool_broker.core.leases import (
    ACTIVE,
    CLAIMED,
    COMMITTING,
    LAUNCHED,
    PREPARED,
    PREPARING,
    SETTLING,
    STARTED,
    Lease,
)
from firepool_broker.core.pods import ASSIGNED, PodRecord
from firepool_broker.core.quota import Usage
from firepool_broker.core.state import State
from firepool_wire.words import WhyNotWarmer

_QUOTA = WhyNotWarmer.CALLER_QUOTA

#: A job whose lease is not prepared by then is written QUEUED first: a hung agent must not delay the durable answer.
STORE_AFTER_S = 0.02
#: The agent enforces the run time-out; the engine stops the attempt itself only this much later.
RUN_MARGIN_S = 30.0
#: Back-off after a lost commit: doubles from the first to the last.
_LOST_FIRST_S, _LOST_LAST_S = 0.0625, 4.0


def place(s: State, job: JobRecord) -> None:
    """Start the job now if its pods are there and nobody before it still has to be looked at; else let it wait."""
    pool = job.pool
    if job.not_before <= s.now and s.started and pool not in s.hungry_pools and try_start(s, job):
        return
    queueing.wait(s, job)
    if pool in s.hungry_pools:
        s.feed_owner(pool, job.ask.caller)


def try_start(s: State, job: JobRecord) -> bool:
    """Claim the job's pods and have their agents prepare; False when it must wait."""
    found = claims.claim(s.tracker, job, s.now)
    if not isinstance(found, Lease):
        if job.why is None:
            job.why = found
        if found is not _QUOTA and job.refused_at > s.now:
            job.refused_at = s.now
        return False
    if found.why is not None and job.why is None:
        job.why = found.why
    if job.lane is not None:
        queueing.leave(s, job)
    job.queue_until = inf
    found.begin()
    job.lease = found
    s.leases[found.attempt] = found
    ask = job.ask
    emit = s.emit
    for pod in found.pods:
        emit(PrepareLease(found.attempt, pod.name, ask.caller, ask.person, ask.queue, ask.tag))
    if job.row is NOT_STORED:
        due = s.now + STORE_AFTER_S
        s.store_by.append((due, found))
        if due < s.timers.earliest:
            s.timers.earliest = due
    if job.pool.floor or job.single_use:
        s.tend(job.pool)
    return True


def store_late(s: State) -> None:
    """Write jobs QUEUED whose lease was not prepared in time."""
    waiting = s.store_by
    while waiting and (waiting[0][0] <= s.now or waiting[0][1].job.row is not NOT_STORED):
        _, lease = waiting.popleft()
        job = lease.job
        if job.lease is lease and job.row is NOT_STORED and lease.phase is PREPARING:
            rows.store(s, job, QUEUED)


def prepared(s: State, event: LeasePrepared) -> None:
    """One agent has the attempt on its disk. The last one lets the start be written."""
    lease = s.leases.get(event.attempt)
    if lease is None or lease.phase is not PREPARING:
        return
    for pod in lease.pods:
        if pod.name == event.pod and lease.parts[pod.rank] is CLAIMED:
            lease.parts[pod.rank] = PREPARED
            lease.prepared += 1
            if lease.prepared == len(lease.pods):
                lease.job.pool.unfit = 0
                lease.at_prepared = s.now
                rows.commit_start(s, lease)
            return


def prepare_failed(s: State, event: LeasePrepareFailed) -> None:
    """The pods of the set retire, the job goes back to its place, and no retry is used (S6).

    New pods that fail so, one after another, slow the pool down as failed creations do: their image may be broken.
    """
    lease = s.leases.get(event.attempt)
    if lease is None or lease.phase is not PREPARING:
        return
    s.story.note(lease.job, f"lease not prepared on {event.pod}: {event.failure.code}")
    pool = lease.job.pool
    if any(pod.owner is None for pod in lease.pods):
        pool.unfit += 1
        fleet.back_off(s, pool, pool.unfit)
    for pod in lease.pods:
        if pod.lease is lease and pod.state is ASSIGNED:
            pod.doomed = True
    undo(s, lease)
    place(s, lease.job)


def undo(s: State, lease: Lease) -> None:
    """Undo a claim whose start is not durable: owner, tag, hold deadline and used flag are as before (S5).

    Pods marked `doomed`, and those whose hold ran out meanwhile, retire instead.
    """
    job = lease.job
    pool = job.pool
    members = [pod for pod in lease.pods if pod.lease is lease and pod.state is ASSIGNED]
    del s.leases[lease.attempt]
    job.lease = None
    s.story.note(job, "claim undone")
    claims.give_back(s.tracker, lease)
    for pod in members:
        s.emit(AbandonLease(lease.attempt, pod.name))
        _back(s, pod)
    freed(s, job.usage)
    s.tend(pool)
    s.feed(pool)


def _back(s: State, pod: PodRecord) -> None:
    """Take up the clocks of a pod that was given back where they stood."""
    pool = pod.rack.pool
    if pod.doomed:
        fleet.retire(s, pod, "its lease could not be prepared")
    elif pod.owner is not None:
        # A hold that ran out meanwhile fires before anybody is fed.
        s.timers.arm_by(pod, pod.hold_deadline)
        s.feed_owner(pool, pod.owner)
    elif not pod.single_use:
        s.timers.arm_by(pod, pod.ready_at + pool.pool.idle_timeout_s)


def freed(s: State, usage: Usage) -> None:
    """The caller's use shrank: its lanes that were parked for quota are looked at again."""
    if usage.parked:
        for lane in list(usage.parked):
            del usage.parked[lane]
            lane.queue.unpark(lane)
        for pool in s.tracker.pools.values():
            if usage.caller in pool.queue.by_caller:
                s.feed(pool)
                s.feed_owner(pool, usage.caller)


# -- the commit -----------------------------------------------------------------------------------------------------


def committed(s: State, attempt: AttemptId) -> Lease | None:
    """The start is durable: user code may run. Returns the lease; None for an answer that nobody waits for."""
    lease = s.leases.get(attempt)
    if lease is None or lease.phase not in (COMMITTING, SETTLING):
        return None
    job = lease.job
    lease.phase = ACTIVE
    lease.at_committed = s.now
    job.row = STORED
    job.version += 1
    job.lost_commits = 0
    s.move(job, RUNNING)
    rows.accept(s, job)
    ask = job.ask
    emit = s.emit
    for pod in lease.pods:
        if pod.lease is lease and pod.state is ASSIGNED:
            s.tracker.run(pod, ask.caller, job.key)
            emit(MarkRunning(attempt, pod.name, ask.caller, ask.queue, ask.tag, lease.retire_after[pod.rank]))
    return lease


def launch(s: State, lease: Lease) -> None:
    """Release the attempt on all its pods, and begin to follow it."""
    job = lease.job
    s.emit(LaunchAttempt(lease.attempt, lease.names))
    rows.notify(s, job)
    limit = job.ask.start_timeout_s
    limit = job.pool.pool.start_timeout_s if limit is None else limit
    if limit is not None:
        lease.start_by = s.now + limit
        s.timers.arm_by(job, lease.start_by)


def commit_unknown(s: State, attempt: AttemptId) -> None:
    """The connection was lost inside the commit: read the row back; until then nothing is returned or launched."""
    lease = s.leases.get(attempt)
    if lease is not None and lease.phase is COMMITTING:
        lease.phase = SETTLING
        s.emit(SettleCommit(attempt))


def commit_lost(s: State, event: CommitLost) -> None:
    """The start was not written: the claim is undone exactly, and the job waits a little before it claims again."""
    lease = s.leases.get(event.attempt)
    if lease is None or lease.phase not in (COMMITTING, SETTLING):
        return
    job = lease.job
    s.story.note(job, f"commit lost: {event.failure.code}")
    if lease.insert:
        job.row = NOT_STORED
    # The store may be down: do not claim and lose again at once.
    job.lost_commits += 1
    job.not_before = s.now + min(_LOST_LAST_S, _LOST_FIRST_S * 2.0 ** min(job.lost_commits - 1, 10))
    undo(s, lease)
    if event.terminal:
        _ended_elsewhere(s, job, event.failure)
    elif job.cancel is not None:
        queueing.end_waiting(s, job, job.cancel)
    else:
        queueing.wait(s, job)


def _ended_elsewhere(s: State, job: JobRecord, cause: Failure) -> None:
    """The row is terminal already, written by somebody else: nothing is left to do here but to say so."""
    s.emit(Notify(job.id, rows.end_state(cause)))
    rows.refuse(s, job, cause)
    queueing.forget(s, job, cause)


# -- running --------------------------------------------------------------------------------------------------------


def launched(s: State, event: Launched) -> None:
    """One agent released the attempt's process."""
    found = s.lease_of(event.attempt, event.pod)
    if found is None or found[0].phase is not ACTIVE:
        return
    lease, rank = found
    if lease.parts[rank] < LAUNCHED:
        lease.parts[rank] = LAUNCHED
        lease.at_launched = s.now


def first_instruction(s: State, event: FirstInstruction) -> None:
    """User code runs on one pod; on all of them the start time-out is over and the run time-out counts."""
    found = s.lease_of(event.attempt, event.pod)
    if found is None or found[0].phase is not ACTIVE:
        return
    lease, rank = found
    if lease.parts[rank] >= STARTED:
        return
    lease.parts[rank] = STARTED
    lease.started += 1
    lease.at_first = max(lease.at_first, event.at)
    if lease.started == len(lease.pods):
        bound_run(s, lease)


def bound_run(s: State, lease: Lease) -> None:
    """Every rank runs: from now on only the run time-out counts, as a backstop behind the agents' own."""
    job = lease.job
    lease.start_by = 0.0
    limit = job.ask.run_timeout_s
    limit = job.pool.pool.run_timeout_s if limit is None else limit
    if limit is not None:
        lease.run_by = s.now + limit + RUN_MARGIN_S
        s.timers.arm_by(job, lease.run_by)
