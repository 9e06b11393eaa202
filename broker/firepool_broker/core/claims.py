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
from firepool_broker.core.racks import IDLE as IDLE_PODS
from firepool_broker.core.racks import PoolRecord, Rack, Shelf
from firepool_broker.core.reasons import why_not
from firepool_broker.core.tracker import Tracker
from firepool_wire.words import Path, WhyNotWarmer

#: In hint mode, how many of the owner's other pods are looked at for one of the same queue: affinity is a preference.
_AFFINITY_LOOKS = 64

_WARM, _RECYCLED, _NEW = Path.WARM, Path.RECYCLED, Path.NEW
_RETIRE_ONE = (True,)


def claim(tracker: Tracker, job: JobRecord, now: float) -> Lease | WhyNotWarmer:
    """Claim the job's whole pod set.

    Args:
        job: a job without a lease; its pool, usage and refusal time are on the record.
        now: seconds on the engine's clock; an expired hold is never claimed (S13).

    Returns:
        The lease, with every pod assigned and the caller's use counted; or why the job must wait, with nothing changed.
    """
    pool = job.pool
    usage = job.usage
    count = job.pods
    processors = count * pool.processors
    if usage.pods + count > usage.max_pods or usage.processors + processors > usage.max_processors:
        return WhyNotWarmer.CALLER_QUOTA
    lease = _claim_one(tracker, job, now) if job.plain else _claim_several(tracker, job, now)
    if lease is None:
        return why_not(pool, job, tracker)
    usage.pods += count
    usage.processors += processors
    return lease


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


# -- one pod --------------------------------------------------------------------------------------------------------


def _claim_one(tracker: Tracker, job: JobRecord, now: float) -> Lease | None:
    """One shared pod: what nearly every claim is, so the first candidate is judged without further calls."""
    rack = job.pool.rack
    shelf = rack.shelves.get(job.usage.caller)
    if shelf is not None and shelf.all:
        same = shelf.same(job.key)
        if same is not None and not job.wanted:
            pod = next(reversed(same))
            if pod.hold_deadline > now and pod.strength >= job.strength and not pod.cards and not pod.doomed:
                return _take_same(tracker, job, pod, now)
        found = _held_one(shelf, job, tracker, now)
        if found is not None:
            if found.key == job.key:
                return _take_same(tracker, job, found, now)
            return _take_several(tracker, Lease(job, job.attempt, [found], now))
    idle = _idle_one(rack, job, tracker)
    if idle is None:
        return None
    lease = Lease(job, job.attempt, [idle], now)
    if idle.ready_at >= job.refused_at:
        lease.path = _NEW
    if job.pool.hold_s <= 0:
        lease.retire_after = _RETIRE_ONE
    tracker.take_idle(idle, lease, 0)
    return lease


def _take_same(tracker: Tracker, job: JobRecord, pod: PodRecord, now: float) -> Lease:
    """Claim order 1: nothing is crossed, so the pod is warm and will be held again."""
    lease = Lease(job, job.attempt, [pod], now)
    if job.pool.hold_s <= 0:
        lease.retire_after = _RETIRE_ONE
    tracker.take_held(pod, lease, 0)
    return lease


def _held_one(shelf: Shelf, job: JobRecord, tracker: Tracker, now: float) -> PodRecord | None:
    """Claim order 1 and 2 for one pod."""
    same = shelf.same(job.key)
    if same is not None:
        if job.wanted:
            for pod in reversed(shelf.with_layer(job.key, job.wanted)):
                if _usable(pod, job, tracker, now):
                    return pod
        for pod in reversed(same):
            if _usable(pod, job, tracker, now):
                return pod
    for pod in _across(shelf, job):
        if _usable(pod, job, tracker, now):
            return pod
    return None


def _across(shelf: Shelf, job: JobRecord) -> Iterator[PodRecord]:
    """The owner's pods with another key that policy admits, in the order in which they are preferred."""
    pool = job.pool
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
    if pod.hold_deadline <= now or pod.strength < job.strength or pod.doomed:
        return False
    return not pod.cards or _cards_free(pod, tracker)


def _cards_free(pod: PodRecord, tracker: Tracker) -> bool:
    serving = tracker.serving
    return not any(card in serving for card in pod.cards)


# -- several pods ---------------------------------------------------------------------------------------------------


def _claim_several(tracker: Tracker, job: JobRecord, now: float) -> Lease | None:
    pods = _dedicated(job.pool, job, tracker) if job.single_use else _gang(tracker, job, now)
    return None if pods is None else _take_several(tracker, Lease(job, job.attempt, pods, now))


def _gang(tracker: Tracker, job: JobRecord, now: float) -> list[PodRecord] | None:
    """All N pods on distinct cards in claim order, or none (S8)."""
    rack = job.pool.rack
    wanted = job.pods
    shelf = rack.shelves.get(job.usage.caller)
    held = len(shelf.all) if shelf is not None else 0
    if held + rack.counts[IDLE_PODS] < wanted:
        return None
    gang = _Gang(wanted)
    if shelf is not None and held:
        for pod in reversed(shelf.same(job.key) or ()):
            if gang.missing == 0:
                break
            if _usable(pod, job, tracker, now):
                gang.add(pod)
        for pod in _across(shelf, job) if gang.missing else ():
            if gang.missing == 0:
                break
            if pod not in gang.pods and _usable(pod, job, tracker, now):
                gang.add(pod)
    if gang.missing:
        _add_idle(tracker, job, gang)
    return list(gang.pods) if gang.missing == 0 else None


class _Gang:
    """The pods picked so far, in rank order, all on distinct cards."""

    __slots__ = ("cards", "missing", "pods")

    def __init__(self, wanted: int) -> None:
        self.missing = wanted
        self.pods: dict[PodRecord, None] = {}
        self.cards: dict[Card, None] = {}

    def add(self, pod: PodRecord) -> bool:
        """Add the pod, unless it shares a card with one that is picked already."""
        if pod.cards:
            if not self.cards.keys().isdisjoint(pod.cards):
                return False
            self.cards.update(dict.fromkeys(pod.cards))
        self.pods[pod] = None
        self.missing -= 1
        return True


def _add_idle(tracker: Tracker, job: JobRecord, gang: _Gang) -> None:
    """Add never-used pods, the longest ready first; if they do not suffice, all go back to where they were."""
    idle = job.pool.rack.idle
    aside: list[PodRecord] = []
    taken: list[PodRecord] = []
    while gang.missing and idle:
        pod = idle.popleft()
        if pod.state is not IDLE or pod.single_use:
            continue
        fits = pod.strength >= job.strength and (not pod.cards or _cards_free(pod, tracker))
        (taken if fits and gang.add(pod) else aside).append(pod)
    if gang.missing:
        # Longest ready first, as before.
        aside = sorted((*taken, *aside), key=_ready_at)
    idle.extendleft(reversed(aside))


def _ready_at(pod: PodRecord) -> float:
    return pod.ready_at


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


def _take_several(tracker: Tracker, lease: Lease) -> Lease:
    """Assign the pods and decide path and retire-or-hold, which the lease keeps (spec §3)."""
    job = lease.job
    pool = job.pool
    mode = mode_of(pool, job)
    always = pool.hold_s <= 0 or job.single_use
    path = _WARM
    retires: list[bool] = []
    dedicated: list[bool] = []
    for rank, pod in enumerate(lease.pods):
        crossed = False
        dedicated.append(pod.single_use)
        key = pod.key
        if key is None:
            if pod.ready_at >= job.refused_at:
                path = _NEW
            tracker.take_idle(pod, lease, rank)
            if job.single_use and not pod.single_use:
                tracker.dedicate(pod)
        else:
            if key != job.key:
                crossed = reuse.crossing(key, job.key, mode) is not reuse.Crossing.NONE
                if crossed and path is _WARM:
                    path = _RECYCLED
            tracker.take_held(pod, lease, rank)
        retires.append(crossed or always)
    lease.retire_after = tuple(retires)
    lease.dedicated = tuple(dedicated)
    lease.path = Path.SINGLE_USE if job.single_use else path
    if path is _RECYCLED:
        lease.why = WhyNotWarmer.TAG_BOUNDARY
    return lease


def mode_of(pool: PoolRecord, job: JobRecord) -> reuse.Mode:
    """`tag_boundary` of the caller, or else of the pool."""
    return job.usage.limits.tag_boundary or pool.pool.tag_boundary
