"""What a property is, and how a room of them is written down."""

from collections.abc import Callable
from dataclasses import dataclass

from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.trace import Record, Side

#: Says what is wrong with the next record given the picture so far, or None.
Judge = Callable[[Picture, Record], str | None]


@dataclass(frozen=True, slots=True)
class Property:
    """One safety property and the records at which it can break."""

    #: Its number in `audit §5`.
    number: str
    #: Its name here: the function's.
    name: str
    sentence: str
    side: Side
    kinds: tuple[str, ...]
    judge: Judge


class Rules:
    """Collects the properties of one module."""

    def __init__(self) -> None:
        self.properties: list[Property] = []

    def holds(self, number: str, side: Side, *kinds: str) -> Callable[[Judge], Judge]:
        """Register a property; the function's docstring is its sentence."""

        def register(judge: Judge) -> Judge:
            name = getattr(judge, "__name__", number)
            sentence = (judge.__doc__ or "").strip().splitlines()[0].rstrip(".")
            self.properties.append(Property(number, name, sentence, side, kinds, judge))
            return judge

        return register
