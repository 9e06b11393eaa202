"""Virtual time: a heap of things to do. A simulated day of ticks costs milliseconds (`research/aesthetics.md` §4.2)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

Action = Callable[[], None]

#: Actions at one instant after which time is taken to stand still (two rooms that wake each other for ever).
STANDSTILL = 50_000


@dataclass(slots=True)
class Clock:
    """The only time in a run. What is due at the same instant runs in the order in which it was asked for."""

    now: float = 0.0
    _heap: list[tuple[float, int, Action]] = field(default_factory=list)
    _asked: int = 0

    def at(self, when: float, action: Action) -> None:
        """Do `action` at `when`; a time in the past means now."""
        self._asked += 1
        heappush(self._heap, (max(when, self.now), self._asked, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do `action` `delay_s` from now."""
        self.at(self.now + delay_s, action)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Advance until nothing is due before `until`, or until `done` says so.

        Raises:
            AssertionError: time stands still.
        """
        same = 0
        while self._heap and not done():
            when, _, action = self._heap[0]
            if when > until:
                break
            heappop(self._heap)
            same = same + 1 if when == self.now else 0
            if same > STANDSTILL:
                raise AssertionError(f"time stands still at {when}: {STANDSTILL} things happened at that instant")
            self.now = when
            action()

    @property
    def idle(self) -> bool:
        """Nothing is due any more."""
        return not self._heap
