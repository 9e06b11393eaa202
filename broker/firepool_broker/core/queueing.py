"""In and out of the queue, with the counts that hang on it. Who is next is `queue`'s, who is placed `dispatch`'s business."""

from math import inf

from firepool_broker.core import rows
from firepool_broker.core.asks import Failure
from firepool_broker.core.errors import failure
from firepool_broker.core.jobs import NOT_STORED, QUEUED, JobRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.reuse import boundary_key
from firepool_broker.core.state import State


def wait(s: State, job: JobRecord) -> None:
    """Queue the job in its place; it is written QUEUED if nobody has stored it yet."""
    job.at_queued = s.now
    if job.queue_until == inf:
        # The time-out counts from when the job (re-)entered the queue.
        limit = job.ask.queue_timeout_s
        limit = job.pool.pool.queue_timeout_s if limit is None else limit
        if limit is not None:
            job.queue_until = s.now + limit
    if job.row is NOT_STORED:
        rows.store(s, job, QUEUED)
    if job.not_before <= s.now:
        _push(s, job)
    s.timers.arm_by(job, job.due())


def leave(s: State, job: JobRecord) -> None:
    """Take the job out of the queue, if it waits there."""
    job.queue_until = inf
    if job.lane is None:
        return
    pool = job.pool
    caller = job.ask.caller
    before = pool.queue.pods_by_caller.get(caller, 0)
    pool.queue.remove(job)
    if not job.single_use:
        s.tracker.rematch(pool, caller, before, before - job.pods)
    s.waiting -= 1


def end_waiting(s: State, job: JobRecord, cause: Failure) -> None:
    """End a job that has no attempt: what is stored is ended in the store, what is not is refused."""
    leave(s, job)
    job.cancel = cause
    if job.row is NOT_STORED:
        rows.refuse(s, job, cause)
        forget(s, job, cause)
        return
    rows.commit_end(s, job, rows.Verdict(rows.end_state(cause), cause), None)
    s.timers.arm_by(job, job.due())


def forget(s: State, job: JobRecord, cause: Failure | None) -> None:
    """The job is over: nothing of it stays but its story; those that wait for its result hear of it."""
    leave(s, job)
    s.timers.disarm(job)
    if s.jobs.pop(job.id, None) is not None:
        s.story.bury(job)
    if job.id in s.dependents:
        s.finished.append((job.id, cause))
        s.stirred = True


def never_servable(pool: PoolRecord, pods: int) -> Failure | None:
    """Why the pool as configured can never serve a job of so many pods (spec §2), or None."""
    if not pool.open:
        return failure("CapacityUnavailable", f"pool {pool.sku} is disabled", limit="pool_disabled", sku=pool.sku)
    if pods > pool.ceiling:
        return failure(
            "CapacityUnavailable",
            f"{pods} pods of {pool.sku} were asked for, but its ceiling is {pool.ceiling}",
            limit="max_count",
            sku=pool.sku,
            ceiling=pool.ceiling,
        )
    return None


def rekey(s: State, job: JobRecord) -> None:
    """Its lane's conditions changed (an operator's knob): queue it anew in the same place."""
    until = job.queue_until
    leave(s, job)
    job.queue_until = until
    _push(s, job)


def _push(s: State, job: JobRecord) -> None:
    pool = job.pool
    caller = job.ask.caller
    before = pool.queue.pods_by_caller.get(caller, 0)
    mode = job.usage.limits.tag_boundary or pool.pool.tag_boundary
    pool.queue.push(job, boundary_key(job.key, mode, pool.pool.run_once_across))
    if not job.single_use:
        s.tracker.rematch(pool, caller, before, before + job.pods)
    lane, usage = job.lane, job.usage
    if lane is not None and not lane.parked and not usage.allows(job.pods, job.pods * pool.processors):
        pool.queue.park(lane)
    s.waiting += 1
    s.tend(pool)
