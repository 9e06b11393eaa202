"""Where the tracker keeps the pods of one SKU: one rack per template digest, with the counts of every scaler category and
the indexes that a claim needs.

A template change only makes another rack the pool's current one: everything in the other racks is stale at once, without
a scan. Only `tracker` writes here; `claims`, `holds` and `controller` read.
"""

from collections import deque

from firepool_broker.core.ids import Caller, Sku, TemplateDigest
from firepool_broker.core.pods import PodRecord, ReuseKey
from firepool_broker.core.pools import Pool
from firepool_broker.core.queue import PoolQueue
from firepool_broker.core.records import Record
from firepool_wire.words import PodState

#: Indexes of `Rack.counts`, the disjoint scaler categories of a current-template pod (spec §6).
STARTING, IDLE, ASSIGNED, RUNNING, HELD = range(5)

#: Category of each pod state; terminating pods are counted per pool, whatever they were.
CATEGORY: dict[PodState, int] = {
    PodState.STARTING: STARTING,
    PodState.IDLE: IDLE,
    PodState.ASSIGNED: ASSIGNED,
    PodState.RUNNING: RUNNING,
    # A resetting pod is supply for its owner only, exactly like a held one (audit 2.33).
    PodState.RESETTING: HELD,
    PodState.HELD: HELD,
}


class Shelf:
    """The claimable held pods of one owner in one rack, most recently released last.

    A second index by queue and tag exists only while pods of more than one key lie here: most owners loop over one key, and
    every table less is a few places in memory less to visit for each claim.
    """

    __slots__ = ("_by_key", "_by_layer", "all", "held", "key", "owner")

    def __init__(self, owner: Caller) -> None:
        self.owner = owner
        #: Pods in the category `held` that are this owner's, resetting and settling ones included.
        self.held = 0
        self.all: dict[PodRecord, None] = {}
        #: The key of all pods here, as long as they have the same.
        self.key: ReuseKey | None = None
        self._by_key: dict[ReuseKey, dict[PodRecord, None]] | None = None
        #: Only pods that have requirement sets installed: (key, set) → pods.
        self._by_layer: dict[tuple[ReuseKey, str], dict[PodRecord, None]] = {}

    def put(self, pod: PodRecord) -> None:
        """Make the pod claimable by its owner."""
        key = pod.key
        assert key is not None
        if self._by_key is not None:
            self._by_key.setdefault(key, {})[pod] = None
        elif not self.all:
            self.key = key
        elif key != self.key:
            self._split(pod, key)
        self.all[pod] = None
        for layer in pod.layers:
            self._by_layer.setdefault((key, layer), {})[pod] = None

    def take(self, pod: PodRecord) -> None:
        """Take the pod off the shelf."""
        del self.all[pod]
        key = pod.key
        assert key is not None
        if self._by_key is not None:
            self._take_key(pod, key)
        for layer in pod.layers:
            index = self._by_layer[key, layer]
            del index[pod]
            if not index:
                del self._by_layer[key, layer]

    def same(self, key: ReuseKey) -> dict[PodRecord, None] | None:
        """The pods that were last used with this key, or None."""
        if self._by_key is not None:
            return self._by_key.get(key)
        return self.all if self.key == key else None

    def with_layer(self, key: ReuseKey, layer: str) -> dict[PodRecord, None]:
        """Those of them that have a requirement set installed."""
        return self._by_layer.get((key, layer), _EMPTY)

    def keys_here(self) -> list[ReuseKey]:
        """The keys of the pods here."""
        if self._by_key is not None:
            return list(self._by_key)
        return [self.key] if self.all and self.key is not None else []

    def _split(self, pod: PodRecord, key: ReuseKey) -> None:
        """A second key comes in."""
        assert self.key is not None
        self._by_key = {self.key: dict(self.all), key: {pod: None}}
        self.key = None

    def _take_key(self, pod: PodRecord, key: ReuseKey) -> None:
        assert self._by_key is not None
        same = self._by_key[key]
        del same[pod]
        if not same:
            del self._by_key[key]
            if not self._by_key:
                self._by_key = None


_EMPTY: dict[PodRecord, None] = {}


class Rack:
    """All pods of one SKU and one template digest."""

    __slots__ = ("counts", "expired", "idle", "pool", "shelves", "template")

    def __init__(self, pool: "PoolRecord", template: TemplateDigest) -> None:
        self.pool = pool
        self.template = template
        #: Warm pods per category; single-use and terminating pods are counted by the pool.
        self.counts = [0, 0, 0, 0, 0]
        #: Idle pods whose keep-alive ran out (part of counts[IDLE]).
        self.expired = 0
        #: Never-used pods, longest ready first; an entry is void unless its pod is idle.
        self.idle: deque[PodRecord] = deque()
        self.shelves: dict[Caller, Shelf] = {}

    def shelf(self, owner: Caller) -> Shelf:
        """The owner's shelf, made on first use."""
        shelf = self.shelves.get(owner)
        if shelf is None:
            shelf = self.shelves[owner] = Shelf(owner)
        return shelf

    @property
    def stale(self) -> bool:
        """Whether the pool has moved on to another template."""
        return self.pool.rack is not self

    @property
    def total(self) -> int:
        """Warm pods in this rack that are not terminating."""
        return sum(self.counts)


class PoolRecord(Record):
    """One SKU's pool: its knobs, racks, queue and counts. Its timer is the controller's next look at it."""

    __slots__ = (
        "break_not_before",
        "ceiling",
        "create_failures",
        "create_not_before",
        "dedicated",
        "draining",
        "floor",
        "hold_s",
        "matched",
        "open",
        "physical",
        "pool",
        "processors",
        "queue",
        "rack",
        "racks",
        "removed",
        "single_starting",
        "single_use",
        "strength_seen",
        "terminating",
        "tokens",
        "tokens_from",
        "unfit",
    )

    def __init__(self, pool: Pool) -> None:
        self.slot = 0
        self.noted = -1
        self.name = pool.sku
        self.pool = pool
        self.racks: dict[TemplateDigest, Rack] = {}
        self.rack = Rack(self, pool.template)
        self.racks[pool.template] = self.rack
        self.queue = PoolQueue()
        #: All pods that are not verified gone, terminating ones included.
        self.physical = 0
        self.terminating = 0
        #: Single-use pods that are not terminating, those of them that start, and those that wait for their job.
        self.single_use = 0
        self.single_starting = 0
        self.dedicated: dict[PodRecord, None] = {}
        #: Stale pods that were drained and are not gone yet.
        self.draining = 0
        #: Σ over owners of min(held, queued) in the current rack (audit F1).
        self.matched = 0
        #: When holds may next be looked at for breaking.
        self.break_not_before = 0.0
        self.removed = False
        #: Isolation of the newest ready pod; None before the first.
        self.strength_seen: int | None = None
        #: Creations left in the current reconcile interval, and when that began.
        self.tokens = pool.step
        self.tokens_from = 0.0
        #: Creations that failed in a row, and when the next may be tried.
        self.create_failures = 0
        #: Never-used pods in a row that could not even prepare a lease.
        self.unfit = 0
        self.create_not_before = 0.0
        self.configure(pool)

    def configure(self, pool: Pool) -> None:
        """Take over an operator's knobs (not the template: `tracker.switch` does that)."""
        self.pool = pool
        self.processors = pool.shape.processors
        self.ceiling = pool.max_pods
        self.floor = pool.min_count
        self.hold_s = pool.hold_s
        self.open = pool.enabled and not self.removed

    @property
    def sku(self) -> Sku:
        """The pool's name."""
        return self.pool.sku

    @property
    def stale(self) -> int:
        """Warm pods of an old template that are not terminating."""
        return self.physical - self.terminating - self.single_use - self.rack.total

    def __repr__(self) -> str:
        return f"<pool {self.pool.sku} {self.rack.counts} physical={self.physical}>"
