"""The way back to one life of the broker: answers after a while, wake-ups, and silence once it is dead."""

from collections.abc import Callable
from dataclasses import dataclass

from firepool_broker.core.events import (
    AttemptEnded,
    Event,
    FirstInstruction,
    Launched,
    PodGone,
    PodReady,
    PodUnreachable,
    Woke,
)
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import Dice

#: Events that a stream read again or a restarted watch may repeat.
_REPEATABLE = (AttemptEnded, FirstInstruction, Launched, PodReady, PodGone, PodUnreachable)


@dataclass(slots=True)
class Answers:
    """Gives events to the engine of one broker, never at once and never after its death."""

    clock: Clock
    dice: Dice
    give: Callable[[Event], None]
    alive: bool = True
    _wake_at: float | None = None

    def wake(self, at: float) -> None:
        """Ask for `Woke`; only the earliest outstanding wake-up matters."""
        if self._wake_at is not None and self._wake_at <= at:
            return
        self._wake_at = at
        self.clock.at(at, lambda: self._woken(at))

    def _woken(self, at: float) -> None:
        if self.alive and self._wake_at == at:
            self._wake_at = None
            self.give(Woke())

    def later(self, delay_s: float, event: Event) -> None:
        """Give an event after a while, if the broker still lives then; facts of streams and watches maybe twice."""
        self.clock.after(delay_s, lambda: self._give_alive(event))
        if isinstance(event, _REPEATABLE) and self.dice.strikes(self.dice.plan.twice):
            again_s = delay_s + self.dice.between(0.0, 1.0)
            self.clock.after(again_s, lambda: self._give_alive(event))

    def _give_alive(self, event: Event) -> None:
        if self.alive:
            self.give(event)
