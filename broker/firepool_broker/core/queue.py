"""Who waits for pods of one SKU, and who is next: priority, then first submission (spec §3).

Jobs that are placeable under the same conditions share a *lane*: same caller, pods, isolation and kind. So an event never looks
at every queued job, only at the heads of lanes: one idle pod goes to the first lane in order whose size fits, a held pod to
its owner's first lane, and the lanes of a caller at its quota are parked until its use shrinks. Jobs that cannot be placed
are thereby skipped, and a job behind them goes on (S9).
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from firepool_broker.core.ids import Caller

if TYPE_CHECKING:
    from firepool_broker.core.jobs import JobRecord
    from firepool_broker.core.pods import ReuseKey
    from firepool_broker.core.quota import Usage

#: (−priority, first submission, arrival): smaller is earlier.
Order = tuple[int, float, int]
#: (caller, pods, isolation, single-use, reuse key where only an equal key may reuse)
LaneKey = tuple[Caller, int, int, bool, "ReuseKey | None"]

#: Void entries that a heap may keep before it is swept.
_DEAD_ENTRIES = 1024


class Lane:
    """Jobs of one caller that are placeable under the same conditions, first in order first."""

    __slots__ = (
        "_heap",
        "boundary",
        "caller",
        "key",
        "live",
        "parked",
        "pods",
        "queue",
        "single_use",
        "strength",
        "usage",
    )

    def __init__(self, queue: "PoolQueue", key: LaneKey, usage: "Usage") -> None:
        self.queue = queue
        self.key = key
        self.caller, self.pods, self.strength, self.single_use, self.boundary = key
        self.usage = usage
        self._heap: list[tuple[Order, JobRecord]] = []
        self.live = 0
        #: Refused for its caller's quota: out of the order until the caller's use shrinks.
        self.parked = False

    def __lt__(self, other: "Lane") -> bool:
        """Heap entries of an equal place are the same lane twice: either may come first."""
        return False

    def push(self, job: "JobRecord") -> None:
        """Add a job in its place."""
        heappush(self._heap, (order_of(job), job))
        job.lane = self
        self.live += 1

    def remove(self, job: "JobRecord") -> None:
        """Take a job out (claimed or cancelled); its entry is void from now on."""
        job.lane = None
        self.live -= 1
        heap = self._heap
        if heap and heap[0][1] is job:
            heappop(heap)
        elif len(heap) - self.live > max(_DEAD_ENTRIES, self.live):
            self._heap = [entry for entry in heap if entry[1].lane is self]
            heapify(self._heap)

    def head(self) -> "JobRecord | None":
        """The first job, or None."""
        heap = self._heap
        while heap:
            job = heap[0][1]
            if job.lane is self:
                return job
            heappop(heap)
        return None

    def head_order(self) -> Order | None:
        """Place of the first job, or None."""
        return self._heap[0][0] if self.head() is not None else None

    def jobs(self) -> "Iterator[JobRecord]":
        """Every waiting job, in no order."""
        return iter({job: None for _, job in self._heap if job.lane is self})


def order_of(job: "JobRecord") -> Order:
    """The job's place: it never changes, so a re-queued job keeps its first submission order."""
    return (-job.ask.priority, job.ask.submitted_at, job.arrival)


def _head_order(lane: Lane) -> Order:
    order = lane.head_order()
    assert order is not None
    return order


class PoolQueue:
    """All waiting jobs of one pool."""

    __slots__ = ("_arrivals", "_orders", "by_caller", "jobs", "lanes", "pods_by_caller", "single_use_pods", "warm_pods")

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        #: caller → reuse key that a held pod must have (None: any) → lanes.
        self.by_caller: dict[Caller, dict[ReuseKey | None, dict[Lane, None]]] = {}
        #: Warm jobs' pods per caller, their sum, and the pods of single-use jobs.
        self.pods_by_caller: dict[Caller, int] = {}
        self.warm_pods = 0
        self.single_use_pods = 0
        self.jobs = 0
        self._arrivals = 0
        #: (single-use, pods) → lanes in order of their heads; an entry is void unless it is its lane's present head.
        self._orders: dict[tuple[bool, int], list[tuple[Order, Lane]]] = {}

    def push(self, job: "JobRecord", boundary: "ReuseKey | None") -> None:
        """Queue a job; `boundary` is its reuse key where the pool lets only equal keys reuse a pod."""
        if not job.arrival:
            self._arrivals += 1
            job.arrival = self._arrivals
        key = (job.ask.caller, job.pods, job.strength, job.single_use, boundary)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self, key, job.usage)
            self.by_caller.setdefault(job.ask.caller, {}).setdefault(boundary, {})[lane] = None
        lane.push(job)
        self._count(job, 1)
        if not lane.parked and lane.head() is job:
            self._enter(lane)

    def remove(self, job: "JobRecord") -> None:
        """Take a job out of its lane; an empty lane is forgotten."""
        lane = job.lane
        assert lane is not None
        was_head = lane.head() is job
        lane.remove(job)
        self._count(job, -1)
        if lane.live == 0:
            self._forget(lane)
        elif was_head and not lane.parked:
            self._enter(lane)

    def usage_of(self, caller: Caller) -> "Usage":
        """The usage of a caller that has a lane here."""
        return next(iter(next(iter(self.by_caller[caller].values())))).usage

    def of_owner(self, caller: Caller, keys: "Iterable[ReuseKey | None]") -> list[Lane]:
        """The caller's warm lanes that a held pod of one of these keys may serve, first in order first."""
        boundaries = self.by_caller.get(caller)
        if boundaries is None:
            return []
        found = [lane for key in keys for lane in boundaries.get(key, ()) if not lane.parked and not lane.single_use]
        if len(found) > 1:
            found.sort(key=_head_order)
        return found

    def park(self, lane: Lane) -> None:
        """Leave the lane out of the order until its caller's use shrinks."""
        lane.parked = True
        lane.usage.parked[lane] = None

    def unpark(self, lane: Lane) -> None:
        """Take the lane back into the order."""
        lane.parked = False
        if lane.live:
            self._enter(lane)

    def first(self, supply: int, single_use: bool = False) -> "JobRecord | None":
        """The first job in order that needs at most `supply` pods and whose caller is not known to be at its quota."""
        best: tuple[Order, Lane] | None = None
        for (kind, pods), order in self._orders.items():
            if kind is single_use and pods <= supply:
                top = self._top(order)
                if top is not None and (best is None or top[0] < best[0]):
                    best = top
        return best[1].head() if best is not None else None

    def earliest(self, *, single_use: bool) -> Order | None:
        """Place of the first job of that kind, of any size."""
        tops = [self._top(order) for (kind, _), order in self._orders.items() if kind is single_use]
        return min((top[0] for top in tops if top is not None), default=None)

    def set_aside(self, lane: Lane) -> None:
        """Skip the lane for the rest of a pass: `restore` brings it back."""
        order = self._orders[lane.single_use, lane.pods]
        if order and order[0][1] is lane:
            heappop(order)

    def restore(self, lane: Lane) -> None:
        """Bring a lane back that was set aside."""
        if lane.live and not lane.parked:
            self._enter(lane)

    def larger_than(self, supply: int) -> Iterator[Lane]:
        """Lanes of gangs that the idle pods alone cannot serve: their owner's held pods may complete them."""
        return (
            lane
            for (kind, pods), order in self._orders.items()
            if pods > supply and not kind
            for lane in {entry[1]: None for entry in order}
            if lane.live and not lane.parked
        )

    def _enter(self, lane: Lane) -> None:
        place = lane.head_order()
        if place is None:
            return
        kind = (lane.single_use, lane.pods)
        order = self._orders.setdefault(kind, [])
        if len(order) > _DEAD_ENTRIES + 2 * len(self.lanes):
            order[:] = [
                (head, other)
                for other in self.lanes.values()
                if (other.single_use, other.pods) == kind
                and other is not lane
                and not other.parked
                and (head := other.head_order()) is not None
            ]
            heapify(order)
        heappush(order, (place, lane))

    def _top(self, order: list[tuple[Order, Lane]]) -> tuple[Order, Lane] | None:
        while order:
            place, lane = order[0]
            if not lane.parked and lane.live and lane.head_order() == place:
                return order[0]
            heappop(order)
        return None

    def _forget(self, lane: Lane) -> None:
        del self.lanes[lane.key]
        boundaries = self.by_caller[lane.caller]
        lanes = boundaries[lane.boundary]
        del lanes[lane]
        if not lanes:
            del boundaries[lane.boundary]
            if not boundaries:
                del self.by_caller[lane.caller]
        lane.usage.parked.pop(lane, None)

    def _count(self, job: "JobRecord", sign: int) -> None:
        self.jobs += sign
        job.usage.waiting += sign
        if job.single_use:
            self.single_use_pods += sign * job.pods
            return
        self.warm_pods += sign * job.pods
        caller = job.ask.caller
        pods = self.pods_by_caller.get(caller, 0) + sign * job.pods
        if pods:
            self.pods_by_caller[caller] = pods
        else:
            self.pods_by_caller.pop(caller, None)
