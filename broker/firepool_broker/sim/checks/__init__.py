"""What no room of the broker can see alone: the safety properties of `audit §5`, judged from the trace only.

Nothing here looks into the engine. A `Picture` is drawn from the records; every property is a function of the picture and
the next record, and says in words what is wrong. The same checks judge a run as it happens and a recorded trace.
"""

from collections.abc import Iterable

from firepool_broker.sim.checks import jobs, pods, pools
from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.checks.rules import Property
from firepool_broker.sim.trace import Record

#: Every property, in the order in which they are judged.
PROPERTIES: tuple[Property, ...] = (*pods.RULES.properties, *jobs.RULES.properties, *pools.RULES.properties)


class Broken(AssertionError):
    """A property does not hold; `number` is its S number."""

    def __init__(self, number: str, sentence: str, what: str, record: Record | None) -> None:
        at = f"\n  at: {record.line()}" if record is not None else ""
        super().__init__(f"{number}: {sentence}: {what}{at}")
        self.number = number


class Checks:
    """Judges records one by one."""

    def __init__(self) -> None:
        self.picture = Picture()
        self._by_kind: dict[tuple[str, str], list[Property]] = {}
        for rule in PROPERTIES:
            for kind in rule.kinds:
                self._by_kind.setdefault((rule.side, kind), []).append(rule)

    def see(self, record: Record) -> None:
        """Judge the next record, then draw it into the picture.

        Raises:
            Broken: a property does not hold.
        """
        for rule in self._by_kind.get((record.side, record.kind), ()):
            what = rule.judge(self.picture, record)
            if what is not None:
                raise Broken(rule.number, rule.sentence, what, record)
        self.picture.take(record)

    def finish(self, at: float) -> None:
        """Judge what only the end of a run shows.

        Raises:
            Broken: a property does not hold.
        """
        for number, sentence, what in self.picture.left_open(at):
            raise Broken(number, sentence, what, None)


def judge(records: Iterable[Record]) -> None:
    """Judge a whole recorded trace.

    Raises:
        Broken: a property does not hold.
    """
    checks = Checks()
    at = 0.0
    for record in records:
        checks.see(record)
        at = record.at
    checks.finish(at)
