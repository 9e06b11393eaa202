"""The indexed table of all pods, by name, SKU, owner, job and card, and the only writer of a pod's state.

Every move keeps the counts of the scaler's categories and the claim indexes of `racks` right, so that nobody ever has to
scan. It decides nothing: `claims`, `starts`, `endings`, `holds`, `controller` and `recovery` say what shall move.
"""

from firepool_broker.core.errors import InvalidTransition
from firepool_broker.core.ids import Caller, Card, PodName, Sku, TemplateDigest
from firepool_broker.core.leases import Lease
from firepool_broker.core.pods import (
    ASSIGNED,
    GONE,
    HELD,
    IDLE,
    NEXT,
    RESETTING,
    RETIRING,
    RUNNING,
    STARTING,
    PodRecord,
    ReuseKey,
)
from firepool_broker.core.pools import Pool
from firepool_broker.core.racks import CATEGORY, PoolRecord, Rack, Shelf
from firepool_broker.core.story import Story
from firepool_broker.core.timers import Timers
from firepool_wire.words import PodState

_STARTING = CATEGORY[STARTING]
_IDLE = CATEGORY[IDLE]
_ASSIGNED = CATEGORY[ASSIGNED]
_RUNNING = CATEGORY[RUNNING]
_HELD = CATEGORY[HELD]


class Tracker:
    """All pods and pools. Moves raise `InvalidTransition` when the pod's state does not have the edge."""

    __slots__ = ("pods", "pools", "serving", "story", "timers")

    def __init__(self, story: Story, timers: Timers) -> None:
        self.story = story
        self.timers = timers
        self.pods: dict[PodName, PodRecord] = {}
        self.pools: dict[Sku, PoolRecord] = {}
        #: Card → the one pod on it that has a job, from claim to verified death (S23).
        self.serving: dict[Card, PodRecord] = {}

    # -- pools ------------------------------------------------------------------------------------------------------

    def open_pool(self, pool: Pool) -> PoolRecord:
        """Add a pool."""
        record = self.pools[pool.sku] = PoolRecord(pool)
        return record

    def switch(self, record: PoolRecord, template: TemplateDigest) -> None:
        """Make `template` the current one: every pod of another is stale from now on."""
        rack = record.racks.get(template)
        if rack is None:
            rack = record.racks[template] = Rack(record, template)
        record.rack = rack
        record.matched = sum(
            min(rack.shelves[caller].held, pods)
            for caller, pods in record.queue.pods_by_caller.items()
            if caller in rack.shelves
        )

    def rack_of(self, sku: Sku, template: TemplateDigest) -> Rack:
        """The rack for a pod of that SKU (which must be known) and template."""
        pool = self.pools[sku]
        rack = pool.racks.get(template)
        if rack is None:
            rack = pool.racks[template] = Rack(pool, template)
        return rack

    def rematch(self, pool: PoolRecord, owner: Caller, queued_before: int, queued_after: int) -> None:
        """Follow a change of an owner's queued pods in `PoolRecord.matched`."""
        shelf = pool.rack.shelves.get(owner)
        if shelf is not None and shelf.held:
            pool.matched += min(shelf.held, queued_after) - min(shelf.held, queued_before)

    # -- a pod's life -----------------------------------------------------------------------------------------------

    def add(self, pod: PodRecord) -> None:
        """A pod that starts."""
        if pod.name in self.pods:
            raise InvalidTransition(f"pod {pod.name} exists already", self.story.of(pod.name, pod))
        self.pods[pod.name] = pod
        pool = pod.rack.pool
        pool.physical += 1
        if pod.single_use:
            pool.single_use += 1
            pool.single_starting += 1
        else:
            pod.rack.counts[_STARTING] += 1
        self.story.note(pod, "starting")

    def ready(self, pod: PodRecord, now: float) -> None:
        """Its agent answered: never used, claimable (by its own job only when single-use)."""
        self._edge(pod, IDLE)
        pod.ready_at = now
        rack = pod.rack
        if pod.single_use:
            rack.pool.single_starting -= 1
            rack.pool.dedicated[pod] = None
        else:
            rack.counts[_STARTING] -= 1
            rack.counts[_IDLE] += 1
            rack.idle.append(pod)

    def expire_idle(self, pod: PodRecord) -> None:
        """Its keep-alive ran out: it may be scaled down, and is claimable until then."""
        if not pod.expired and not pod.single_use:
            pod.expired = True
            pod.rack.expired += 1

    def take_idle(self, pod: PodRecord, lease: Lease, rank: int) -> None:
        """Claim a never-used pod. Its entry in `Rack.idle` must have been taken out, or is void from now on."""
        if pod.state is not IDLE:
            self._edge(pod, ASSIGNED)
        pod.state = ASSIGNED
        self.story.note(pod, ASSIGNED)
        if pod.single_use:
            pod.rack.pool.dedicated.pop(pod, None)
        else:
            rack = pod.rack
            counts = rack.counts
            counts[_IDLE] -= 1
            counts[_ASSIGNED] += 1
            if pod.expired:
                pod.expired = False
                rack.expired -= 1
        pod.lease = lease
        pod.rank = rank
        for card in pod.cards:
            self.serving[card] = pod

    def take_held(self, pod: PodRecord, lease: Lease, rank: int) -> None:
        """Claim a held pod for its owner. The hot path of every loop: what other moves call is written out here."""
        if pod.state is not HELD:
            self._edge(pod, ASSIGNED)
        pod.state = ASSIGNED
        self.story.note(pod, ASSIGNED)
        rack, owner = pod.rack, pod.owner
        assert owner is not None
        shelf = rack.shelves[owner]
        shelf.take(pod)
        counts = rack.counts
        counts[_HELD] -= 1
        counts[_ASSIGNED] += 1
        if rack.pool.queue.warm_pods:
            self._unmatch(rack, shelf)
        shelf.held -= 1
        pod.lease = lease
        pod.rank = rank
        for card in pod.cards:
            self.serving[card] = pod

    def dedicate(self, pod: PodRecord) -> None:
        """A claimed never-used pod serves a single-use job and is deleted after it: it leaves the warm categories."""
        pod.single_use = True
        pod.rack.counts[_ASSIGNED] -= 1
        pod.rack.pool.single_use += 1

    def give_back(self, pod: PodRecord, *, keep_single_use: bool) -> None:
        """Undo a claim exactly: owner, tag, hold deadline and used flag were never touched (S5)."""
        self._unbind(pod)
        rack = pod.rack
        if pod.single_use and not keep_single_use:
            pod.single_use = False
            rack.pool.single_use -= 1
            rack.counts[_ASSIGNED] += 1
        if pod.owner is None:
            self._edge(pod, IDLE)
            if pod.single_use:
                rack.pool.dedicated[pod] = None
                return
            rack.counts[_ASSIGNED] -= 1
            rack.counts[_IDLE] += 1
            rack.idle.appendleft(pod)
        else:
            self._edge(pod, HELD)
            rack.counts[_ASSIGNED] -= 1
            self._hold(pod, pod.owner)

    def run(self, pod: PodRecord, owner: Caller, key: ReuseKey) -> None:
        """The start is committed: from now on the pod is its caller's for life (S10)."""
        if pod.owner is not None and pod.owner != owner:
            raise InvalidTransition(f"pod {pod.name} of {pod.owner} was given to {owner}", self.story.of(pod.name, pod))
        self._edge(pod, RUNNING)
        pod.owner = owner
        pod.key = key
        if not pod.single_use:
            counts = pod.rack.counts
            counts[_ASSIGNED] -= 1
            counts[_RUNNING] += 1

    def reset(self, pod: PodRecord) -> None:
        """Its part of the attempt is over, and its agent cleans it for its owner."""
        self._edge(pod, RESETTING)
        if not pod.single_use:
            rack = pod.rack
            counts = rack.counts
            counts[_RUNNING] -= 1
            counts[_HELD] += 1
            assert pod.owner is not None
            self._held_more(rack, rack.shelf(pod.owner))

    def hold(self, pod: PodRecord, now: float, deadline: float, *, settling: bool) -> None:
        """The reset is proven: held for its owner until `deadline`; claimable unless bytes are still being freed."""
        self._unbind(pod)
        self._edge(pod, HELD)
        pod.released_at = now
        pod.hold_deadline = deadline
        pod.settling = settling
        assert pod.owner is not None
        if not settling:
            pod.rack.shelf(pod.owner).put(pod)

    def settle(self, pod: PodRecord) -> None:
        """Its bytes are free again: claimable by its owner."""
        if pod.settling and pod.state is HELD:
            pod.settling = False
            assert pod.owner is not None
            pod.rack.shelf(pod.owner).put(pod)

    def adopt_held(self, pod: PodRecord, owner: Caller, key: ReuseKey, released_at: float, deadline: float) -> None:
        """Recovery: a pod that was held before the restart, with its owner and its deadline (S15)."""
        self._adopt(pod, HELD)
        pod.owner = owner
        pod.key = key
        pod.released_at = released_at
        pod.hold_deadline = deadline
        self._hold(pod, owner)

    def adopt_used(self, pod: PodRecord, owner: Caller, key: ReuseKey, lease: Lease | None, rank: int) -> None:
        """Recovery: a pod with an attempt (running), or one whose reset was never confirmed (resetting)."""
        pod.owner = owner
        pod.key = key
        self._adopt(pod, RUNNING if lease is not None else RESETTING)
        if lease is not None:
            self._bind(pod, lease, rank)
            if not pod.single_use:
                pod.rack.counts[_RUNNING] += 1
        elif not pod.single_use:
            pod.rack.counts[_HELD] += 1
            self._held_more(pod.rack, pod.rack.shelf(owner))

    def retire(self, pod: PodRecord, now: float) -> None:
        """It is being deleted, whatever it was; an open part of an attempt stays with its lease until it is gone."""
        state = pod.state
        self._leave(pod, state)
        self._edge(pod, RETIRING)
        pool = pod.rack.pool
        pool.terminating += 1
        pod.deleted_at = now
        if pod.rack.stale and not pod.single_use:
            pod.drained = True
            pool.draining += 1
        self.timers.disarm(pod)

    def gone(self, pod: PodRecord) -> None:
        """Verified gone: forget it, its card is free."""
        state = pod.state
        pool = pod.rack.pool
        if state is RETIRING:
            pool.terminating -= 1
            if pod.drained:
                pool.draining -= 1
        else:
            self._leave(pod, state)
        self._edge(pod, GONE)
        pool.physical -= 1
        self._unbind(pod)
        self.timers.disarm(pod)
        del self.pods[pod.name]
        self.story.bury(pod)
        rack = pod.rack
        if rack.stale and not rack.total:
            pool.racks.pop(rack.template, None)

    def free_card(self, pod: PodRecord) -> None:
        """The pod's part of its attempt is verified dead: its cards' gate opens (S26)."""
        for card in pod.cards:
            if self.serving.get(card) is pod:
                del self.serving[card]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _edge(self, pod: PodRecord, to: PodState) -> None:
        state = pod.state
        if to not in NEXT[state]:
            raise InvalidTransition(f"pod {pod.name}: no edge {state} -> {to}", self.story.of(pod.name, pod))
        pod.state = to
        self.story.note(pod, to)

    def _adopt(self, pod: PodRecord, state: PodState) -> None:
        """Recovery: a pod enters the table in the state it was found in."""
        if pod.name in self.pods:
            raise InvalidTransition(f"pod {pod.name} exists already", self.story.of(pod.name, pod))
        self.pods[pod.name] = pod
        pool = pod.rack.pool
        pool.physical += 1
        if pod.single_use:
            pool.single_use += 1
        pod.state = state
        pod.ready_at = pod.created_at
        self.story.note(pod, f"found {state}")

    def _bind(self, pod: PodRecord, lease: Lease, rank: int) -> None:
        pod.lease = lease
        pod.rank = rank
        for card in pod.cards:
            self.serving[card] = pod

    def _unbind(self, pod: PodRecord) -> None:
        pod.lease = None
        if pod.cards:
            self.free_card(pod)

    def _hold(self, pod: PodRecord, owner: Caller) -> None:
        rack = pod.rack
        shelf = rack.shelf(owner)
        rack.counts[_HELD] += 1
        shelf.put(pod)
        self._held_more(rack, shelf)

    def _held_more(self, rack: Rack, shelf: Shelf) -> None:
        shelf.held += 1
        pool = rack.pool
        if pool.queue.warm_pods and rack is pool.rack and pool.queue.pods_by_caller.get(shelf.owner, 0) >= shelf.held:
            pool.matched += 1

    def _unmatch(self, rack: Rack, shelf: Shelf) -> None:
        """One of the owner's held pods is about to be none."""
        pool = rack.pool
        if rack is pool.rack and pool.queue.pods_by_caller.get(shelf.owner, 0) >= shelf.held:
            pool.matched -= 1

    def _leave(self, pod: PodRecord, state: PodState) -> None:
        """Take the pod out of its category and of every claim index."""
        rack = pod.rack
        if pod.single_use:
            rack.pool.single_use -= 1
            if state is STARTING:
                rack.pool.single_starting -= 1
            rack.pool.dedicated.pop(pod, None)
            return
        rack.counts[CATEGORY[state]] -= 1
        if state is IDLE and pod.expired:
            pod.expired = False
            rack.expired -= 1
        if state in (HELD, RESETTING):
            assert pod.owner is not None
            shelf = rack.shelves[pod.owner]
            if state is HELD and not pod.settling:
                shelf.take(pod)
            self._unmatch(rack, shelf)
            shelf.held -= 1
