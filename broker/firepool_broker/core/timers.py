"""When something must happen although nobody reports it: holds and keep-alives that run out, time-outs, back-offs.

A wheel of slots of 1/16 s. Arming, moving and disarming are O(1) and leave nothing behind: a heap with lazy deletion would
keep the 300 s start time-out of every job that ended after 5 ms. A deadline fires at its slot's end, so at most 62 ms late
and exactly on time where it is a multiple of 1/16 s; whatever must be exact (no claim of an expired hold) compares the
deadline itself. Each record has at most one timer: what it means follows from the record's state.
"""

from heapq import heappop, heappush
from math import ceil, inf

from firepool_broker.core.records import Record

#: Slots per second: a power of two, so that whole seconds are exact in floats.
SLOTS_PER_S = 16


class Timers:
    """The wheel: slot index → records, and the slots in order."""

    __slots__ = ("_order", "_slots", "earliest")

    def __init__(self) -> None:
        self._slots: dict[int, dict[Record, None]] = {}
        self._order: list[int] = []
        #: Nothing is due before this time (seconds); a bound that may be too early, never too late.
        self.earliest = inf

    def arm(self, record: Record, due: float) -> None:
        """Fire the record at `due` (seconds on the engine's clock), instead of whenever it was due before."""
        if due == inf:
            self.disarm(record)
            return
        index = max(1, ceil(due * SLOTS_PER_S))
        old = record.slot
        if old == index:
            return
        if old:
            del self._slots[old][record]
        slot = self._slots.get(index)
        if slot is None:
            self._slots[index] = {record: None}
            heappush(self._order, index)
            if index < self.earliest * SLOTS_PER_S:
                self.earliest = index / SLOTS_PER_S
        else:
            slot[record] = None
        record.slot = index

    def arm_by(self, record: Record, due: float) -> None:
        """Fire the record at `due` or, if it is armed for an earlier time, then: it will look at its deadline and arm anew.

        A pod in a loop of jobs so moves its timer once per hold time, not once per job.
        """
        if not record.slot or record.slot > due * SLOTS_PER_S:
            self.arm(record, due)

    def disarm(self, record: Record) -> None:
        """Forget the record's timer, if it has one."""
        if record.slot:
            del self._slots[record.slot][record]
            record.slot = 0

    def due(self, now: float, limit: int) -> list[Record]:
        """Take up to `limit` records whose time has come; the rest stay due."""
        taken: list[Record] = []
        last = now * SLOTS_PER_S
        order = self._order
        while order and order[0] <= last and len(taken) < limit:
            slot = self._slots[order[0]]
            # Oldest first: whoever looks for expired pods from the front of a queue then finds them there.
            for record in [record for _, record in zip(range(limit - len(taken)), slot, strict=False)]:
                del slot[record]
                record.slot = 0
                taken.append(record)
            if not slot:
                del self._slots[heappop(order)]
        self.next()
        return taken

    def next(self) -> float:
        """When `due` must be called next; infinite when nothing is armed."""
        order = self._order
        while order and not self._slots[order[0]]:
            del self._slots[heappop(order)]
        self.earliest = order[0] / SLOTS_PER_S if order else inf
        return self.earliest
