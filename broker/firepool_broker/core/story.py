"""The story of a job or a pod: what happened to it, when, and which event caused it.

One global ring for everything (a log per pod would cost more than the pod). Every entry links back to the previous entry of
the same record, and the record knows its newest, so that a story is read along its own links. The ring is four flat columns
written in place: an entry allocates nothing, keeps nothing alive and shows the garbage collector nothing, so it costs a hot path
no cold memory (measured: half of a whole cycle less than a ring of entries that hold their event and record).
"""

from array import array
from collections import deque
from collections.abc import Iterator

from firepool_broker.core.records import Record

#: Entries kept, a power of two; at 15,000 jobs a second about half a second, on a quiet broker days.
DEFAULT_CAPACITY = 65_536
#: Records that are over and whose story can still be asked for by name.
_GRAVES = 8_192


class Story:
    """A capped ring of entries with one backward chain per record."""

    __slots__ = ("_causes", "_graves", "_mask", "_next", "_previous", "_times", "_whats", "cause", "now")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"the capacity of a story is a power of two, not {capacity}")
        #: Name of the event being handled, and its time: what every entry of this `handle` call is caused by.
        self.cause = ""
        self.now = 0.0
        self._mask = capacity - 1
        self._times = array("d", bytes(8 * capacity))
        self._previous = array("q", bytes(8 * capacity))
        self._whats: list[str] = [""] * capacity
        self._causes = [""] * capacity
        self._next = 0
        #: (name, newest entry) of records that are over, newest last.
        self._graves: deque[tuple[str, int]] = deque(maxlen=_GRAVES)

    def note(self, record: Record, what: str) -> None:
        """Remember that `what` happened to the record, because of the event being handled."""
        number = self._next
        place = number & self._mask
        self._times[place] = self.now
        self._previous[place] = record.noted
        self._whats[place] = what
        self._causes[place] = self.cause
        record.noted = number
        self._next = number + 1

    def bury(self, record: Record) -> None:
        """The record is over: its story can be asked for by name for a while."""
        self._graves.append((record.name, record.noted))

    def of(self, subject: str, record: Record | None = None, limit: int = 200) -> list[str]:
        """The subject's last entries in words, oldest first."""
        newest = record.noted if record is not None else self._buried(subject)
        lines = [
            f"{self._times[n]:.3f} {subject}: {self._whats[n]} <- {self._causes[n]}" for n in self._chain(newest, limit)
        ]
        lines.reverse()
        return lines

    def __len__(self) -> int:
        return min(self._next, self._mask + 1)

    def _buried(self, subject: str) -> int:
        return next((newest for name, newest in reversed(self._graves) if name == subject), -1)

    def _chain(self, number: int, limit: int) -> Iterator[int]:
        """Places of the chain's entries, newest first, as far as the ring still has them."""
        oldest = self._next - self._mask - 1
        while limit > 0 and number >= 0 and number >= oldest:
            place = number & self._mask
            yield place
            number = self._previous[place]
            limit -= 1
