"""Who gets what became free: every event that frees capacity feeds the jobs that wait for it, in order (spec §3).

Idle pods go to the first job of the pool that fits, held pods to their owner's first job; whoever cannot be placed is
skipped. The 3 s tick feeds everybody, and counts itself when it helped: then an event forgot to.
"""

from firepool_broker.core import starts
from firepool_broker.core.ids import Caller
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.pods import ReuseKey
from firepool_broker.core.queue import Lane, order_of
from firepool_broker.core.racks import IDLE, PoolRecord, Shelf
from firepool_broker.core.state import State


def feed_all(s: State, budget: int) -> int:
    """Place what can be placed, at most `budget` jobs; what is left stays hungry. Returns how many were placed."""
    placed = 0
    while s.hungry_owners and placed < budget:
        pool, owner = next(iter(s.hungry_owners))
        del s.hungry_owners[pool, owner]
        placed += _feed_owner(s, pool, owner, budget - placed)
        if placed >= budget:
            s.hungry_owners[pool, owner] = None
    while s.hungry_pools and placed < budget:
        pool = next(iter(s.hungry_pools))
        del s.hungry_pools[pool]
        placed += _feed_pool(s, pool, budget - placed)
        if placed >= budget:
            s.hungry_pools[pool] = None
    return placed


def tick(s: State) -> None:
    """The fallback: look at everybody who waits, as if anything could have become free."""
    for pool in s.tracker.pools.values():
        s.feed(pool)
        if pool.queue.jobs:
            for owner in pool.queue.by_caller:
                s.feed_owner(pool, owner)


def _feed_owner(s: State, pool: PoolRecord, owner: Caller, budget: int) -> int:
    """Place the owner's first jobs on the owner's held pods."""
    placed = 0
    skipped: dict[Lane, None] = {}
    while placed < budget:
        shelf = pool.rack.shelves.get(owner)
        if shelf is None or not shelf.all:
            break
        lanes = pool.queue.of_owner(owner, _keys(pool, shelf))
        lane = next((lane for lane in lanes if lane not in skipped), None)
        job = lane.head() if lane is not None else None
        if lane is None or job is None:
            break
        if starts.try_start(s, job):
            placed += 1
        else:
            skipped[lane] = None
            _park_if_at_quota(lane, job)
    return placed


def _keys(pool: PoolRecord, shelf: Shelf) -> list[ReuseKey | None]:
    """Lane boundaries that the held pods' keys can serve: any lane without one, and those of equal keys."""
    keys: dict[ReuseKey | None, None] = {None: None}
    if not pool.pool.run_once_across:
        for queue, tag in shelf.keys_here():
            keys[queue, tag] = None
            keys[queue, None] = None
    return list(keys)


def _feed_pool(s: State, pool: PoolRecord, budget: int) -> int:
    """Place jobs of the pool in order on never-used pods (and gangs that their owner's held pods complete)."""
    placed = 0
    skipped: list[Lane] = []
    while placed < budget:
        job = _next(pool, skipped)
        if job is None:
            break
        lane = job.lane
        assert lane is not None
        if starts.try_start(s, job):
            placed += 1
        else:
            if lane not in skipped:
                skipped.append(lane)
            pool.queue.set_aside(lane)
            _park_if_at_quota(lane, job)
    for lane in skipped:
        pool.queue.restore(lane)
    return placed


def _next(pool: PoolRecord, skipped: list[Lane]) -> JobRecord | None:
    """The first job in order that the supply could serve."""
    queue = pool.queue
    idle = pool.rack.counts[IDLE]
    supply = idle + len(pool.dedicated)
    if not queue.jobs:
        return None
    warm = queue.first(idle) if idle else None
    single = queue.first(supply, single_use=True) if supply and queue.single_use_pods else None
    best = warm if single is None or (warm is not None and order_of(warm) < order_of(single)) else single
    for lane in queue.larger_than(idle):
        shelf = pool.rack.shelves.get(lane.caller)
        if shelf is None or idle + len(shelf.all) < lane.pods or lane in skipped:
            continue
        head = lane.head()
        if head is not None and (best is None or order_of(head) < order_of(best)):
            best = head
    return best


def _park_if_at_quota(lane: Lane, job: JobRecord) -> None:
    """A caller at its quota is skipped until its use shrinks."""
    usage = job.usage
    if not usage.allows(job.pods, job.pods * job.pool.processors):
        lane.queue.park(lane)
