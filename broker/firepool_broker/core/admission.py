"""What comes in: which jobs are taken, which are refused at once because nobody could ever serve them, and which wait for
the results of others first.
"""

from firepool_broker.core import queueing, rows, starts
from firepool_broker.core.asks import Ask, Failure
from firepool_broker.core.effects import QueueJob, Refuse
from firepool_broker.core.errors import failure
from firepool_broker.core.events import DependencyEnded
from firepool_broker.core.fleet import demanded
from firepool_broker.core.ids import JobId
from firepool_broker.core.jobs import PENDING, QUEUED, JobRecord
from firepool_broker.core.queue import Lane
from firepool_broker.core.quota import Usage
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.records import Record
from firepool_broker.core.state import State

# -- admission ------------------------------------------------------------------------------------------------------


def submit(s: State, ask: Ask) -> None:
    """Admit a job, and start it at once if pods are there; else it is stored and waits."""
    if ask.job in s.jobs:
        s.story.note(s.jobs[ask.job], "submitted again, ignored")
        return
    pool = s.tracker.pools.get(ask.sku)
    usage = s.quota.of(ask.caller)
    refusal = _unknown(s, ask) if pool is None else _refusal(pool, usage, ask)
    if pool is None or refusal is not None:
        assert refusal is not None
        stranger = Record(ask.job)
        s.story.note(stranger, f"refused: {refusal.code}")
        s.story.bury(stranger)
        s.emit(Refuse(ask.job, refusal))
        return
    job = JobRecord(ask, pool, usage, demanded(pool, ask.isolation) if ask.isolation else 0)
    s.jobs[ask.job] = job
    if ask.client_lease_s is not None:
        job.client_until = s.now + ask.client_lease_s
        s.timers.arm_by(job, job.client_until)
    if ask.depends:
        _await_inputs(s, job)
    else:
        starts.place(s, job)


def _unknown(s: State, ask: Ask) -> Failure:
    known = ", ".join(sorted(s.tracker.pools))
    return failure("UnknownSku", f"no pool is called {ask.sku!r}; there are: {known or 'none'}", known=known)


def _refusal(pool: PoolRecord, usage: Usage, ask: Ask) -> Failure | None:
    if ask.pods > pool.ceiling or not pool.open:
        return queueing.never_servable(pool, ask.pods)
    if pool.queue.jobs >= pool.pool.max_queue_length:
        limit = pool.pool.max_queue_length
        return failure(
            "CapacityUnavailable", f"{limit} jobs wait for {pool.sku} already", limit="max_queue_length", sku=pool.sku
        )
    if not usage.ever_allows(ask.pods, ask.pods * pool.processors):
        return failure("QuotaExceeded", f"{ask.pods} pods of {pool.sku} are more than {ask.caller} may ever have")
    if ask.isolation:
        return _too_isolated(pool, demanded(pool, ask.isolation), ask.isolation)
    return None


def _too_isolated(pool: PoolRecord, strength: int, isolation: str) -> Failure | None:
    if pool.strength_seen is None or strength <= pool.strength_seen:
        return None
    return failure(
        "IsolationUnavailable",
        f"pods of {pool.sku} cannot give isolation {isolation!r}; it is never quietly lowered",
        sku=pool.sku,
        demanded=isolation,
    )


# -- inputs ---------------------------------------------------------------------------------------------------------


def _await_inputs(s: State, job: JobRecord) -> None:
    """PENDING until every job whose result is an argument has succeeded."""
    job.waits_for = dict.fromkeys(job.ask.depends)
    for dependency in job.waits_for:
        s.dependents.setdefault(dependency, {})[job.id] = None
    rows.store(s, job, PENDING)
    s.timers.arm_by(job, job.due())


def dependency_ended(s: State, event: DependencyEnded) -> None:
    """A result is there, or will never be: then the job fails with the same error."""
    job = s.jobs.get(event.job)
    if job is None or event.dependency not in job.waits_for:
        return
    if event.failure is not None:
        forget_inputs(s, job)
        queueing.end_waiting(s, job, _input_failed(event.failure, event.dependency))
        return
    del job.waits_for[event.dependency]
    _drop_dependent(s, event.dependency, job.id)
    if not job.waits_for and job.state is PENDING and job.end is None and job.cancel is None:
        s.move(job, QUEUED)
        s.emit(QueueJob(job.id, job.version))
        job.version += 1
        starts.place(s, job)


def resolve_dependents(s: State, dependency: JobId, cause: Failure | None) -> None:
    """A job of ours is terminal: tell those that wait for its result."""
    for waiting in list(s.dependents.pop(dependency, ())):
        dependency_ended(s, DependencyEnded(waiting, dependency, cause))


def forget_inputs(s: State, job: JobRecord) -> None:
    """The job does not wait for results any more."""
    for dependency in job.waits_for:
        _drop_dependent(s, dependency, job.id)
    job.waits_for = {}


def _drop_dependent(s: State, dependency: JobId, job: JobId) -> None:
    waiting = s.dependents.get(dependency)
    if waiting is not None:
        waiting.pop(job, None)
        if not waiting:
            del s.dependents[dependency]


def _input_failed(cause: Failure, dependency: JobId) -> Failure:
    return Failure(
        code=cause.code,
        message=f"input {dependency} ended with {cause.code}: {cause.message}",
        fault=cause.fault,
        retryable=cause.retryable,
        details=(*cause.details, ("dependency", dependency)),
    )


# -- those that can never be served ---------------------------------------------------------------------------------


def doom_all(s: State, pool: PoolRecord, reason: Failure) -> None:
    """Nobody who waits here can be served any more; they are told in slices."""
    for lane in list(pool.queue.lanes.values()):
        _doom(s, lane, reason)


def doom_oversized(s: State, pool: PoolRecord) -> None:
    """After a change of the pool's knobs: lanes that it can never serve now are told so."""
    for lane in list(pool.queue.lanes.values()):
        reason = queueing.never_servable(pool, lane.pods)
        if reason is not None:
            _doom(s, lane, reason)


def _doom(s: State, lane: Lane, reason: Failure) -> None:
    s.dooming.extend((job, reason) for job in lane.jobs())
    s.stirred = True


def doom_too_isolated(s: State, pool: PoolRecord) -> None:
    """The pool's pods turned out weaker than what some waiting jobs demand."""
    for lane in list(pool.queue.lanes.values()) if pool.queue.jobs else ():
        if lane.strength:
            for job in lane.jobs():
                reason = _too_isolated(pool, job.strength, job.ask.isolation)
                if reason is not None:
                    s.dooming.append((job, reason))
                    s.stirred = True


def doom_some(s: State, limit: int) -> None:
    """Tell the next of them."""
    while s.dooming and limit > 0:
        job, reason = s.dooming.popleft()
        limit -= 1
        if job.lane is not None:
            queueing.end_waiting(s, job, reason)
