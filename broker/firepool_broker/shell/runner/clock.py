"""The engine's clock: wall-clock seconds that never run backwards, and the translation of monotonic stamps."""

import time

#: The wall clock may run ahead of us by this much (NTP, a laptop that slept) before we jump forward to it. Raise:
#: stamps drift from the wall; lower: timers of a sleeping machine fire at once when it wakes.
JUMP_S = 0.5


class Clock:
    """Epoch seconds, advanced by the monotonic clock; follows the wall clock forward, never back."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch; never less than an earlier answer."""
        return self._offset + time.monotonic()

    def follow_wall(self) -> float:
        """Jump forward where the wall clock ran ahead (call now and then); returns the seconds jumped."""
        ahead = time.time() - self.now()
        if ahead <= JUMP_S:
            return 0.0
        self._offset += ahead
        return ahead

    def of_monotonic(self, stamp: float) -> float:
        """The time on this clock of a CLOCK_MONOTONIC stamp of this host."""
        return self._offset + stamp

    @staticmethod
    def deadline(seconds: float) -> float:
        """A deadline `seconds` from now on CLOCK_BOOTTIME, as agents on this host compare it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
