"""Breaking holds early (paper A.3, audit F5): only while a queued job is blocked at the ceiling, only holds older than the
tenure (strictly), oldest first, sparing owners with queued jobs, at most as many as the blocked jobs need. A broken hold
retires its pod; it is never handed over. Holds that simply expire are retired by their timer (`podlife`).
"""

from firepool_broker.core import fleet
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State

#: The next moment behind a tenure that is only just reached: "strictly more".
_JUST_AFTER_S = 1 / 16


def break_some(s: State, pool: PoolRecord, wanted: int) -> float | None:
    """Break up to `wanted` holds.

    Returns:
        When to look again because the oldest hold that could be broken is too young, or None.
    """
    need = min(wanted, needed(pool))
    later: float | None = None
    broken: list[PodRecord] = []
    for pod in pool.rack.held:
        if len(broken) == need:
            break
        if s.now - pod.released_at <= pool.pool.hold_tenure_min_s:
            later = pod.released_at + pool.pool.hold_tenure_min_s + _JUST_AFTER_S
            break
        if pod.owner not in pool.queue.pods_by_caller:
            broken.append(pod)
    for pod in broken:
        fleet.retire(s, pod, "hold broken: a queued job is blocked at the ceiling")
    return later


def needed(pool: PoolRecord) -> int:
    """Pods that waiting jobs could really claim: what waits for its caller's quota is not blocked by the ceiling."""
    total = pool.queue.single_use_pods
    for caller, pods in pool.queue.pods_by_caller.items():
        lanes = pool.queue.by_caller.get(caller)
        if lanes is None:
            continue
        usage = next(iter(next(iter(lanes.values())))).usage
        room = usage.room(pool.processors) if usage.limited else None
        shelf = pool.rack.shelves.get(caller)
        own = shelf.held if shelf is not None else 0
        total += max(0, (pods if room is None else min(pods, room)) - own)
    return total
