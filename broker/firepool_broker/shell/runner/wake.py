"""Waiting is an effect: one timer for the engine's earliest `WakeAt`, and the shell's own upkeep every few seconds.

The fallback tick of dispatch is one of the engine's wake-ups; the engine counts when it helped.
"""

import asyncio
from collections.abc import Callable
from math import ceil

from firepool_broker.shell.runner.clock import Clock

#: Between looks at the wall clock. Raise: a machine that slept catches up later.
UPKEEP_S = 3.0


class Wake:
    """Calls `woke` when the engine asked for it, never early, and `upkeep` every 3 s."""

    def __init__(self, clock: Clock, woke: Callable[[], None], upkeep: Callable[[], None]) -> None:
        self._clock = clock
        self._woke = woke
        self._upkeep = upkeep
        #: The engine's earliest outstanding wake-up and its timer.
        self._due: float | None = None
        self._timer: asyncio.Handle | None = None
        self._next_upkeep: asyncio.TimerHandle | None = None
        self._stopped = False

    def at(self, due: float) -> None:
        """Wake the engine at `due` (its clock), unless an earlier wake-up is outstanding."""
        if (self._due is not None and self._due <= due) or self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._schedule(due - self._clock.now())

    def _schedule(self, delay: float) -> None:
        loop = asyncio.get_running_loop()
        # Timers of the loop count whole milliseconds and may round down.
        self._timer = (
            loop.call_later(ceil(delay * 1000) / 1000, self._fire) if delay > 0 else loop.call_soon(self._fire)
        )

    def _fire(self) -> None:
        due = self._due
        assert due is not None, "a timer runs only while a wake-up is outstanding"
        early = due - self._clock.now()
        if early > 0:
            # The engine takes an early wake-up for somebody else's and would wait for its own for ever.
            self._schedule(early)
            return
        self._due = self._timer = None
        self._woke()

    def start_upkeep(self) -> None:
        """Begin the shell's own upkeep."""
        self._next_upkeep = asyncio.get_running_loop().call_later(UPKEEP_S, self._keep_up)

    def _keep_up(self) -> None:
        self.start_upkeep()
        self._upkeep()

    def stop(self) -> None:
        """No further calls."""
        self._stopped = True
        for timer in (self._timer, self._next_upkeep):
            if timer is not None:
                timer.cancel()
        self._timer = self._next_upkeep = None
