"""Why a job waits (spec §2): its position, the limit that blocks it, and who holds what. Read only, on demand: it may scan."""

from dataclasses import dataclass

from firepool_broker.core.ids import JobId
from firepool_broker.core.jobs import PENDING, JobRecord
from firepool_broker.core.queue import order_of
from firepool_broker.core.racks import ASSIGNED, HELD, IDLE, RUNNING, STARTING, PoolRecord
from firepool_broker.core.state import State
from firepool_wire.words import JobState, WhyNotWarmer


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What one caller has of the pool."""

    caller: str
    running: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A job's situation in words and numbers."""

    job: JobId
    state: JobState | None
    #: 1 = next in its pool's order; None = it does not wait for pods.
    position: int | None
    #: Name of the limit that blocks it: caller_quota, pool_at_ceiling, pods_starting, inputs, back_off, …; "" = nothing.
    blocked_by: str
    sentence: str
    why_not_warmer: str
    holders: tuple[Holder, ...]
    waiting_s: float
    story: tuple[str, ...]


def explain(s: State, job: JobRecord, now: float) -> Explanation:
    """The job as it stands at `now`."""
    blocked_by, sentence = _blocked(s, job, now)
    waits = job.lane is not None
    return Explanation(
        job=job.id,
        state=job.state,
        position=_position(job) if waits else None,
        blocked_by=blocked_by,
        sentence=sentence,
        why_not_warmer=job.why.value if job.why is not None else "",
        holders=_holders(s, job.pool) if waits else (),
        waiting_s=max(0.0, now - job.at_queued) if waits else 0.0,
        story=tuple(s.story.of(job.id, job)),
    )


def _position(job: JobRecord) -> int:
    place = order_of(job)
    return 1 + sum(1 for lane in job.pool.queue.lanes.values() for other in lane.jobs() if order_of(other) < place)


def _blocked(s: State, job: JobRecord, now: float) -> tuple[str, str]:
    if job.end is not None:
        return "store", "its end is being written"
    if job.state is PENDING:
        return "inputs", f"waits for the results of {', '.join(job.waits_for)}"
    if job.lease is not None:
        silent = [pod.name for pod in job.lease.pods if pod.lease is job.lease and pod.unreachable_since >= 0]
        if silent:
            return "unreachable", f"the agents of {', '.join(silent)} do not answer; the job counts as running"
        return "", f"attempt {job.lease.attempt} is {job.lease.phase.name.lower()}"
    if job.not_before > now:
        return "back_off", f"waits {job.not_before - now:.1f} s before its next attempt"
    if not s.started:
        return "recovery", "the broker is taking stock of its pods"
    return _blocked_in_queue(job)


def _blocked_in_queue(job: JobRecord) -> tuple[str, str]:
    pool, usage = job.pool, job.usage
    sku = pool.sku
    if not usage.allows(job.pods, job.pods * pool.processors):
        limits = usage.limits
        return (
            WhyNotWarmer.CALLER_QUOTA.value,
            f"{usage.caller} has {usage.pods} pods of at most {limits.max_pods} "
            f"and {usage.processors} processors of at most {limits.max_processors}",
        )
    counts = pool.rack.counts
    starting = counts[STARTING] + pool.single_starting
    if starting:
        return WhyNotWarmer.PODS_STARTING.value, f"{starting} pods of {sku} are starting"
    if pool.physical >= pool.ceiling:
        return (
            WhyNotWarmer.POOL_AT_CEILING.value,
            f"all {pool.ceiling} pods of {sku} exist: {counts[RUNNING] + counts[ASSIGNED]} busy, {counts[HELD]} held, "
            f"{pool.terminating} ending",
        )
    if job.pods > 1 and counts[IDLE]:
        return WhyNotWarmer.GANG_INCOMPLETE.value, f"{counts[IDLE]} of {job.pods} pods are free"
    if pool.create_failures:
        return "pods_failing", f"the last {pool.create_failures} pods of {sku} could not be made"
    if pool.unfit:
        return "pods_failing", f"the last {pool.unfit} new pods of {sku} started but could not prepare a job"
    return WhyNotWarmer.NO_IDLE_POD_OF_OWNER.value, f"no pod of {sku} is free for it; creations are paced by `step`"


def _holders(s: State, pool: PoolRecord) -> tuple[Holder, ...]:
    table: dict[str, list[int]] = {}
    for lease in s.leases.values():
        if lease.job.pool is pool:
            table.setdefault(lease.job.ask.caller, [0, 0])[0] += lease.open
    for rack in pool.racks.values():
        for owner, shelf in rack.shelves.items():
            if shelf.held:
                table.setdefault(owner, [0, 0])[1] += shelf.held
    ranked = sorted(table.items(), key=lambda item: (-sum(item[1]), item[0]))
    return tuple(Holder(caller=caller, running=busy, held=held) for caller, (busy, held) in ranked[:20])
