"""The claim (spec §3): find pods for a job in claim order, check its caller's limits, and take all of them or none.

One call is one step of the engine, so no two claimers meet (the paper's lock). A refusal is a value: why the job must wait.
Owner, tag and hold deadline of a claimed pod change only when its start is committed, so undoing a claim needs no copy.

Claim order for caller C, queue Q, tag T: held pod of C with the same Q and T; held pod of C across a boundary, to run once;
a never-used idle pod. A gang takes all its pods in that order in one step.
"""

from collections.abc import Iterator

from firepool_broker.core import reuse
from firepool_broker.core.ids import Card
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.leases import Lease
from firepool_broker.core.pods import ASSIGNED as ASSIGNED_STATE
from firepool_broker.core.pods import IDLE, PodRecord
from firepool_broker.core.quota import Usage
from firepool_broker.core.racks import ASSIGNED, RUNNING, STARTING, PoolRecord, Rack, Shelf
from firepool_broker.core.racks import HELD as HELD_PODS
from firepool_broker.core.racks import IDLE as IDLE_PODS
from firepool_broker.core.tracker import Tracker
from firepool_wire.words import Path, WhyNotWarmer

#: In hint mode, how many of the owner's other pods are looked at for one of the same queue: affinity is a preference.
_AFFINITY_LOOKS = 64

_WARM, _RECYCLED, _NEW = Path.WARM, Path.RECYCLED, Path.NEW


def claim(tracker: Tracker, job: JobRecord, now: float) -> Lease | WhyNotWarmer:
    """Claim the job's whole pod set.

    Args:
        job: a job without a lease; its pool, usage and refusal time are on the record.
        now: seconds on the engine's clock; an expired hold is never claimed (S13).

    Returns:
        The lease, with every pod assigned and the caller's use counted; or why the job must wait, with nothing changed.
    """
    pool = job.pool
    count = job.pods
    usage = job.usage
    if usage.limited and not usage.allows(count, count * pool.processors):
        return WhyNotWarmer.CALLER_QUOTA
    if job.plain:
        shelf = pool.rack.shelves.get(usage.caller)
        pod = _held_one(pool, shelf, job, tracker, now) if shelf is not None and shelf.all else None
        if pod is None:
            pod = _idle_one(pool.rack, job, tracker)
        if pod is None:
            return _why(pool, job, tracker)
        usage.pods += 1
        usage.processors += pool.processors
        return _take_one(tracker, job, pod, now)
    pods = _dedicated(pool, job, tracker) if job.single_use else _gang(pool, job, tracker, now)
    if pods is None:
        return _why(pool, job, tracker)
    usage.pods += count
    usage.processors += count * pool.processors
    return _take_several(tracker, Lease(job, job.attempt, pods, now))


def give_back(tracker: Tracker, lease: Lease) -> None:
    """Undo a claim exactly (S5): every pod that still has this lease is as it was; the caller's use shrinks."""
    job = lease.job
    for pod in lease.pods:
        if pod.lease is lease and pod.state is ASSIGNED_STATE:
            tracker.give_back(pod, keep_single_use=lease.dedicated[pod.rank])
    release_use(job.usage, job.pool, lease.open)


def release_use(usage: Usage, pool: PoolRecord, pods: int) -> None:
    """So many pods of the caller are not claimed any more."""
    usage.pods -= pods
    usage.processors -= pods * pool.processors


# -- finding pods ---------------------------------------------------------------------------------------------------


def _held_one(pool: PoolRecord, shelf: Shelf, job: JobRecord, tracker: Tracker, now: float) -> PodRecord | None:
    """Claim order 1 and 2 for one pod."""
    same = shelf.by_key.get(job.key)
    if same is not None:
        if job.wanted:
            for pod in reversed(shelf.by_layer.get((job.key, job.wanted), ())):
                if _usable(pod, job, tracker, now):
                    return pod
        for pod in reversed(same):
            if _usable(pod, job, tracker, now):
                return pod
    for pod in _across(pool, shelf, job):
        if _usable(pod, job, tracker, now):
            return pod
    return None


def _across(pool: PoolRecord, shelf: Shelf, job: JobRecord) -> Iterator[PodRecord]:
    """The owner's pods with another key that policy admits, in the order in which they are preferred."""
    mode = mode_of(pool, job)
    if mode == "hint":
        # The tag only prefers: a pod of the same queue goes on without retiring, so look for one first.
        for _, pod in zip(range(_AFFINITY_LOOKS), reversed(shelf.all), strict=False):
            if pod.key is not None and pod.key[0] == job.key[0]:
                yield pod
    if pool.pool.run_once_across:
        yield from reversed(shelf.all)


def _idle_one(rack: Rack, job: JobRecord, tracker: Tracker) -> PodRecord | None:
    """Claim order 3: the never-used pod that is ready for longest (so that the fewest keep-alives run out)."""
    idle = rack.idle
    aside: list[PodRecord] = []
    found: PodRecord | None = None
    while idle:
        pod = idle.popleft()
        if pod.state is not IDLE or pod.single_use:
            continue
        if pod.strength < job.strength or (pod.cards and not _cards_free(pod, tracker)):
            aside.append(pod)
            continue
        found = pod
        break
    if aside:
        idle.extendleft(reversed(aside))
    return found


def _usable(pod: PodRecord, job: JobRecord, tracker: Tracker, now: float) -> bool:
    return (
        pod.hold_deadline > now
        and pod.strength >= job.strength
        and not pod.doomed
        and (not pod.cards or _cards_free(pod, tracker))
    )


def _cards_free(pod: PodRecord, tracker: Tracker) -> bool:
    serving = tracker.serving
    return not any(card in serving for card in pod.cards)


def _gang(pool: PoolRecord, job: JobRecord, tracker: Tracker, now: float) -> list[PodRecord] | None:
    """All N pods on distinct cards in claim order, or none (S8)."""
    rack = pool.rack
    shelf = rack.shelves.get(job.usage.caller)
    held = len(shelf.all) if shelf is not None else 0
    if held + rack.counts[IDLE_PODS] < job.pods:
        return None
    picked: dict[PodRecord, None] = {}
    cards: dict[Card, None] = {}
    if shelf is not None and held:
        candidates = [*reversed(shelf.by_key.get(job.key, ())), *_across(pool, shelf, job)]
        for pod in candidates:
            if len(picked) == job.pods:
                break
            if pod not in picked and _usable(pod, job, tracker, now):
                _pick(pod, picked, cards)
    aside: list[PodRecord] = []
    taken: list[PodRecord] = []
    idle = rack.idle
    while len(picked) < job.pods and idle:
        pod = idle.popleft()
        if pod.state is not IDLE or pod.single_use:
            continue
        fits = pod.strength >= job.strength and (not pod.cards or _cards_free(pod, tracker))
        (taken if fits and _pick(pod, picked, cards) else aside).append(pod)
    if len(picked) < job.pods:
        aside = [*taken, *aside]
    idle.extendleft(reversed(aside))
    return list(picked) if len(picked) == job.pods else None


def _pick(pod: PodRecord, picked: dict[PodRecord, None], cards: dict[Card, None]) -> bool:
    """Add the pod unless it shares a card with one that is picked already."""
    if pod.cards:
        if any(card in cards for card in pod.cards):
            return False
        cards.update(dict.fromkeys(pod.cards))
    picked[pod] = None
    return True


def _dedicated(pool: PoolRecord, job: JobRecord, tracker: Tracker) -> list[PodRecord] | None:
    """Pods made for single-use jobs first, then never-used idle ones, which are deleted afterwards too."""
    fits = [
        pod
        for pod in pool.dedicated
        if not pod.rack.stale and pod.strength >= job.strength and _cards_free(pod, tracker)
    ][: job.pods]
    if len(fits) + pool.rack.counts[IDLE_PODS] < job.pods:
        return None
    borrowed: list[PodRecord] = []
    while len(fits) + len(borrowed) < job.pods:
        pod = _idle_one(pool.rack, job, tracker)
        if pod is None:
            pool.rack.idle.extendleft(reversed(borrowed))
            return None
        borrowed.append(pod)
    return [*fits, *borrowed]


# -- taking them ----------------------------------------------------------------------------------------------------


def _take_one(tracker: Tracker, job: JobRecord, pod: PodRecord, now: float) -> Lease:
    """Assign one shared pod and decide path and retire-or-hold, which the lease keeps (spec §3)."""
    lease = Lease(job, job.attempt, [pod], now)
    if pod.owner is None:
        if pod.ready_at >= job.refused_at:
            lease.path = _NEW
        tracker.take_idle(pod, lease, 0)
    elif pod.key == job.key:
        tracker.take_held(pod, lease, 0)
    else:
        return _take_several(tracker, lease)
    if job.pool.hold_s <= 0:
        lease.retire_after = (True,)
    return lease


def _take_several(tracker: Tracker, lease: Lease) -> Lease:
    """The general case: several pods, a boundary, or a single-use job."""
    job = lease.job
    pool = job.pool
    path = _WARM
    retires: list[bool] = []
    dedicated: list[bool] = []
    for rank, pod in enumerate(lease.pods):
        crossed = reuse.Crossing.NONE
        dedicated.append(pod.single_use)
        if pod.owner is None:
            if pod.ready_at >= job.refused_at:
                path = _NEW
            tracker.take_idle(pod, lease, rank)
            if job.single_use and not pod.single_use:
                tracker.dedicate(pod)
        else:
            assert pod.key is not None
            crossed = reuse.crossing(pod.key, job.key, mode_of(pool, job))
            if crossed and path is _WARM:
                path = _RECYCLED
            tracker.take_held(pod, lease, rank)
        retires.append(reuse.retires(crossed, pool.hold_s, job.single_use))
    lease.retire_after = tuple(retires)
    lease.dedicated = tuple(dedicated)
    lease.path = Path.SINGLE_USE if job.single_use else path
    if path is _RECYCLED:
        lease.why = WhyNotWarmer.TAG_BOUNDARY
    return lease


def mode_of(pool: PoolRecord, job: JobRecord) -> reuse.Mode:
    """`tag_boundary` of the caller, or else of the pool."""
    return job.usage.limits.tag_boundary or pool.pool.tag_boundary


# -- refusing -------------------------------------------------------------------------------------------------------


def _why(pool: PoolRecord, job: JobRecord, tracker: Tracker) -> WhyNotWarmer:
    """Why no warmer path was open: the most specific reason first."""
    rack = pool.rack
    shelf = rack.shelves.get(job.usage.caller)
    counts = rack.counts
    own = len(shelf.all) if shelf is not None else 0
    if not job.single_use:
        free = own + counts[IDLE_PODS]
        if job.pods > 1 and free:
            return WhyNotWarmer.GANG_INCOMPLETE
        if free and tracker.serving:
            return WhyNotWarmer.CARD_BUSY
        if own:
            return WhyNotWarmer.TAG_BOUNDARY
        if _has_stale(pool, job):
            return WhyNotWarmer.STALE_TEMPLATE
    if counts[STARTING] or (job.single_use and pool.single_starting):
        return WhyNotWarmer.PODS_STARTING
    if pool.physical >= pool.ceiling:
        others = counts[HELD_PODS] - (shelf.held if shelf is not None else 0)
        busy = counts[ASSIGNED] + counts[RUNNING]
        if others and not (busy and busy >= pool.ceiling):
            return WhyNotWarmer.HELD_FOR_OTHER_CALLER
        return WhyNotWarmer.POOL_AT_CEILING
    return WhyNotWarmer.NO_IDLE_POD_OF_OWNER


def _has_stale(pool: PoolRecord, job: JobRecord) -> bool:
    """Whether a pod of an old template would have served this job."""
    for rack in pool.racks.values():
        if rack is not pool.rack:
            shelf = rack.shelves.get(job.usage.caller)
            if rack.counts[IDLE_PODS] or (shelf is not None and shelf.all):
                return True
    return False
