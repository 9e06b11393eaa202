"""Breaking holds early (paper A.3, audit F5): only while a queued job is blocked at the ceiling, only holds older than the
tenure (strictly), oldest first, sparing owners with queued jobs, at most as many as the blocked jobs need. A broken hold
retires its pod; it is never handed over. Holds that simply expire are retired by their timer (`podlife`).
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from firepool_broker.core import fleet
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State

#: The next moment behind a tenure that is only just reached: "strictly more".
_JUST_AFTER_S = 1 / 16
#: Between two looks that found nothing to break: a look visits every owner of the pool.
_LOOK_AGAIN_S = 0.25


def break_some(s: State, pool: PoolRecord, wanted: int) -> None:
    """Break up to `wanted` holds; where none is old enough, arm the pool's timer for when one is."""
    if s.now < pool.break_not_before:
        s.timers.arm_by(pool, pool.break_not_before)
        return
    need = min(wanted, needed(pool))
    if not need:
        return
    tenure = pool.pool.hold_tenure_min_s
    again = s.now + _LOOK_AGAIN_S
    broken: list[PodRecord] = []
    for pod in _oldest_first(pool):
        if len(broken) == need:
            break
        if s.now - pod.released_at <= tenure:
            again = pod.released_at + tenure + _JUST_AFTER_S
            break
        broken.append(pod)
    for pod in broken:
        fleet.retire(s, pod, "hold broken: a queued job is blocked at the ceiling")
    if len(broken) < need:
        pool.break_not_before = again
        s.timers.arm_by(pool, again)


def needed(pool: PoolRecord) -> int:
    """Pods that waiting jobs could really claim: what waits for its caller's quota is not blocked by the ceiling."""
    total = pool.queue.single_use_pods
    for caller, pods in pool.queue.pods_by_caller.items():
        usage = pool.queue.usage_of(caller)
        room = usage.room(pool.processors)
        shelf = pool.rack.shelves.get(caller)
        own = shelf.held if shelf is not None else 0
        total += max(0, min(pods, room) - own)
    return total


def _oldest_first(pool: PoolRecord) -> Iterator[PodRecord]:
    """Held pods of owners without queued jobs, longest released first: a merge of the owners' shelves."""
    rows: list[tuple[float, int, PodRecord, Iterator[PodRecord]]] = []
    for number, (owner, shelf) in enumerate(pool.rack.shelves.items()):
        if shelf.all and owner not in pool.queue.pods_by_caller:
            pods = iter(list(shelf.all))
            first = next(pods)
            rows.append((first.released_at, number, first, pods))
    heapify(rows)
    while rows:
        _, number, pod, pods = rows[0]
        yield pod
        following = next(pods, None)
        if following is None:
            heappop(rows)
        else:
            heapreplace(rows, (following.released_at, number, following, pods))
