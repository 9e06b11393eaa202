"""The two verbs on a pod's existence, when not to make another, and how isolation levels compare. What pods report is `podlife`'s, how many there
should be is `controller`'s business.
"""

from firepool_broker.core.effects import CreatePod, DeletePod
from firepool_broker.core.ids import PodName
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State
from firepool_wire.words import STRENGTH, Isolation

#: A deletion that nobody confirmed is asked for again after this (idempotent at the provider).
DELETE_AGAIN_S = 30.0

#: Back-off of a pool whose pods fail: doubles from the first to the last.
_BACKOFF_FIRST_S, _BACKOFF_LAST_S = 1.0, 60.0

_LEVELS = {level.value: rank for level, rank in STRENGTH.items()}
assert len(_LEVELS) == len(Isolation)


def strength(isolation: str) -> int:
    """Rank of an isolation level; an unknown or empty one is the weakest."""
    return _LEVELS.get(isolation, 0)


def demanded(pool: PoolRecord, isolation: str) -> int:
    """What a job's pods must at least have: the stronger of its own and the pool's level."""
    return max(strength(pool.pool.isolation), strength(isolation))


def create(s: State, pool: PoolRecord, *, single_use: bool = False) -> None:
    """Order one pod. It counts as supply at once; the name never repeats, not even over restarts."""
    s.made += 1
    name = PodName(f"{pool.sku}-{int(s.born_at * 1000):x}-{s.made}")
    pod = PodRecord(name, pool.rack, s.now, single_use)
    s.tracker.add(pod)
    s.timers.arm(pod, s.now + pool.pool.pod_start_timeout_s)
    s.emit(CreatePod(name, pool.sku, pool.rack.template, single_use))


def back_off(s: State, pool: PoolRecord, failures: int) -> None:
    """So many new pods in a row were no good: the next one is not ordered at once, or a broken image would spin."""
    wait = min(_BACKOFF_LAST_S, _BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16))
    pool.create_not_before = s.now + wait
    s.tend(pool)


def retire(s: State, pod: PodRecord, why: str) -> None:
    """Delete the pod off the critical path. What still runs on it stays its lease's until it is verified gone."""
    s.tracker.retire(pod, s.now)
    s.story.note(pod, why)
    s.timers.arm(pod, s.now + DELETE_AGAIN_S)
    s.emit(DeletePod(pod.name, why))
