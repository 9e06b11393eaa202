"""How many pods there should be: counts in, orders out. The equations are `scaler`'s; here are the token bucket, the single-use
pods, hold breaking, keep-alive and the drain of stale pods. One pass looks at one pool and at no list of pods or jobs.
"""

from firepool_broker.core import fleet, holds, scaler
from firepool_broker.core.pods import IDLE, PodRecord
from firepool_broker.core.racks import ASSIGNED, RUNNING, STARTING, PoolRecord, Rack
from firepool_broker.core.racks import HELD as HELD_PODS
from firepool_broker.core.racks import IDLE as IDLE_PODS
from firepool_broker.core.state import State

#: Pods retired by one pass at most: the rest follows in the next call, so that no `handle` is long.
SLICE = 128


def tend(s: State, pool: PoolRecord) -> bool:
    """Bring the pool towards what its counts call for. True when it must be looked at again at once."""
    if not s.started:
        return False
    if pool.removed:
        return _close(s, pool)
    _refill(s, pool)
    counts = counts_of(pool)
    warm = scaler.add(counts)
    single = _single_use_deficit(pool)
    made = _create(s, pool, warm, single) if warm or single else 0
    more = False
    if not made:
        _break_holds(s, pool, counts, single)
        more = _scale_down(s, pool, scaler.remove(counts))
    _drop_orphans(s, pool)
    return _drain(s, pool, pool.pool.drain_budget - pool.draining) or more


def counts_of(pool: PoolRecord) -> scaler.Counts:
    """The pool's categories as the scaler sees them."""
    knobs = pool.pool
    rack = pool.rack
    starting, idle, assigned, running, held = rack.counts
    return scaler.Counts(
        floor=min(pool.floor, pool.ceiling) if knobs.enabled else 0,
        ceiling=pool.ceiling if knobs.enabled else 0,
        max_idle=knobs.max_idle_count if knobs.enabled else 0,
        step=pool.tokens,
        queued=pool.queue.warm_pods,
        starting=starting,
        idle=idle,
        assigned=assigned,
        running=running,
        held=held,
        matched=pool.matched,
        stale=pool.stale,
        single_use=pool.single_use,
        terminating=pool.terminating,
        expired_idle=rack.expired,
    )


def idle_hands(pool: PoolRecord) -> bool:
    """Whether a pass would surely do nothing: the quick look that the hot path takes instead of one."""
    counts = pool.rack.counts
    return not (
        pool.queue.jobs
        or pool.rack.expired
        or pool.removed
        or pool.dedicated
        or pool.single_starting
        or len(pool.racks) > 1
        or counts[STARTING] + counts[IDLE_PODS] + counts[ASSIGNED] + counts[RUNNING] + counts[HELD_PODS] < pool.floor
    )


def _refill(s: State, pool: PoolRecord) -> None:
    """`step` creations per reconcile interval, however many events ask (audit 2.18b)."""
    if s.now >= pool.tokens_from + pool.pool.reconcile_interval_s:
        pool.tokens = pool.pool.step
        pool.tokens_from = s.now


def _single_use_deficit(pool: PoolRecord) -> int:
    """Dedicated pods that waiting single-use jobs still need; their pods are outside warm demand."""
    if not pool.pool.enabled:
        return 0
    return max(0, pool.queue.single_use_pods - pool.single_starting - len(pool.dedicated))


def _create(s: State, pool: PoolRecord, warm: int, single: int) -> int:
    """Order pods, the kind whose first job waits longer first; all share ceiling and token bucket."""
    if s.now < pool.create_not_before:
        s.timers.arm_by(pool, pool.create_not_before)
        return 0
    room = max(0, pool.ceiling - pool.physical)
    if single and room and not pool.tokens:
        s.timers.arm_by(pool, pool.tokens_from + pool.pool.reconcile_interval_s)
    budget = min(room, pool.tokens)
    first_single = min(single, budget) if _single_use_first(pool, warm) else min(single, max(0, budget - warm))
    total = first_single + min(warm, budget - first_single)
    for number in range(total):
        fleet.create(s, pool, single_use=number < first_single)
    pool.tokens -= total
    if total < min(room, warm + single):
        s.timers.arm_by(pool, pool.tokens_from + pool.pool.reconcile_interval_s)
    return total


def _single_use_first(pool: PoolRecord, warm: int) -> bool:
    if not warm:
        return True
    single, shared = pool.queue.earliest(single_use=True), pool.queue.earliest(single_use=False)
    return single is not None and (shared is None or single < shared)


def _break_holds(s: State, pool: PoolRecord, counts: scaler.Counts, single: int) -> None:
    """Queued jobs are blocked at the ceiling: break as many old holds as they need (paper A.3)."""
    if not pool.queue.jobs or not pool.pool.enabled:
        return
    deficit = scaler.demand_deficit(counts) + single
    if not pool.tokens and scaler.physical(counts) < counts.ceiling:
        s.timers.arm_by(pool, pool.tokens_from + pool.pool.reconcile_interval_s)
    blocked = scaler.blocked(counts, deficit)
    if blocked and pool.rack.counts[HELD_PODS]:
        holds.break_some(s, pool, blocked)


def _scale_down(s: State, pool: PoolRecord, remove: int) -> bool:
    """Retire never-used pods whose keep-alive ran out, longest ready first."""
    idle = pool.rack.idle
    kept: list[PodRecord] = []
    left = min(remove, SLICE)
    while left and idle:
        pod = idle.popleft()
        if pod.state is not IDLE or pod.single_use:
            continue
        if not pod.expired:
            kept.append(pod)
            continue
        fleet.retire(s, pod, "keep-alive over")
        left -= 1
    idle.extendleft(reversed(kept))
    return remove > SLICE


def _drop_orphans(s: State, pool: PoolRecord) -> None:
    """Single-use pods whose job does not wait any more: they are never idle (spec §3)."""
    if len(pool.racks) > 1:
        for pod in [pod for pod in pool.dedicated if pod.rack.stale]:
            fleet.retire(s, pod, "its template is stale")
    surplus = len(pool.dedicated) + pool.single_starting - pool.queue.single_use_pods
    if surplus > 0 and pool.dedicated:
        for pod in list(pool.dedicated)[:surplus]:
            fleet.retire(s, pod, "no job waits for this single-use pod")


def _drain(s: State, pool: PoolRecord, budget: int) -> bool:
    """Retire stale pods within `budget`: idle first, then held; busy ones come when they are released."""
    for rack in list(pool.racks.values()) if len(pool.racks) > 1 else ():
        if rack is not pool.rack:
            budget -= _retire_from(s, rack, budget, "its template is stale")
    return False


def _close(s: State, pool: PoolRecord) -> bool:
    """The pool was removed: its pods go as soon as no job is on them, and then the pool is forgotten."""
    left = SLICE
    for rack in list(pool.racks.values()):
        left -= _retire_from(s, rack, left, "its pool was removed")
    for pod in list(pool.dedicated):
        fleet.retire(s, pod, "its pool was removed")
    if not pool.physical and not pool.queue.jobs:
        s.timers.disarm(pool)
        s.tracker.pools.pop(pool.sku, None)
    return left <= 0


def _retire_from(s: State, rack: Rack, limit: int, why: str) -> int:
    done = 0
    while done < limit and rack.idle:
        pod = rack.idle.popleft()
        if pod.state is IDLE and not pod.single_use:
            fleet.retire(s, pod, why)
            done += 1
    for shelf in list(rack.shelves.values()) if done < limit and rack.counts[HELD_PODS] else ():
        for pod in list(shelf.all)[: limit - done]:
            fleet.retire(s, pod, why)
            done += 1
    return done
