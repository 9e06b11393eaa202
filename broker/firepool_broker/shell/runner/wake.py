"""Waiting is an effect: one timer for the engine's earliest `WakeAt`, and the 3 s fallback tick.

The tick exists so that a lost wake-up costs seconds instead of forever; it is counted when it was the one that helped,
because then an event was missing (spec §3).
"""

import asyncio
from collections.abc import Callable

from firepool_broker.shell.runner.clock import Clock

TICK_S = 3.0


class Wake:
    """Calls `woke` when the engine asked for it, and `tick` every 3 s."""

    def __init__(self, clock: Clock, woke: Callable[[], None], tick: Callable[[], None]) -> None:
        self._clock = clock
        self._woke = woke
        self._tick = tick
        #: The engine's earliest outstanding wake-up and its timer.
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    def at(self, due: float) -> None:
        """Wake the engine at `due` (its clock), unless an earlier wake-up is outstanding."""
        if self._due is not None and self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - self._clock.now()), self._fire)

    def _fire(self) -> None:
        self._due = self._timer = None
        self._woke()

    def overdue(self, now: float) -> bool:
        """Whether the outstanding wake-up should have come already (then a tick takes no credit)."""
        return self._due is not None and self._due <= now

    def start_ticking(self) -> None:
        """Begin the fallback tick."""
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._ticked)

    def _ticked(self) -> None:
        self.start_ticking()
        self._tick()

    def stop(self) -> None:
        """No further calls."""
        for timer in (self._timer, self._ticker):
            if timer is not None:
                timer.cancel()
        self._timer = self._ticker = None
