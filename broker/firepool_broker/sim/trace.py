"""The trace of a run: one dense line per thing that happened, from which `checks` judges and a run can be replayed.

Columns, separated by one tab: virtual seconds, side, kind, then `key=value` pairs. Sides: `E` an event given to the
engine, `F` an effect it asked for, `W` a fact of the world that the engine may not even know (user code began on a pod, a row
became durable, the broker died). Same seed, same bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from typing import Literal
from urllib.parse import quote, unquote

Side = Literal["E", "F", "W"]
_SIDES: dict[str, Side] = {"E": "E", "F": "F", "W": "W"}
#: Characters that stay readable in a value; everything else is percent-encoded so that a line splits at tabs.
_PLAIN = "/:;,.()[]@+*<>{}'! "


@dataclass(slots=True, frozen=True)
class Record:
    """One line of a trace."""

    #: Virtual seconds.
    at: float
    side: Side
    kind: str
    #: What it is about: pod, attempt, job, caller, …, as text.
    about: dict[str, str]

    def line(self) -> str:
        """The record as text, without its line end."""
        pairs = [f"{key}={quote(value, safe=_PLAIN)}" for key, value in self.about.items()]
        return "\t".join([f"{self.at:.6f}", self.side, self.kind, *pairs])

    def get(self, key: str) -> str:
        """The value of a key, "" where the record does not have it."""
        return self.about.get(key, "")

    def names(self, key: str) -> tuple[str, ...]:
        """A comma-separated value as a tuple of names."""
        value = self.about.get(key, "")
        return tuple(value.split(",")) if value else ()


def parse(line: str) -> Record:
    """The record of one line.

    Raises:
        ValueError: the line is not one of a trace.
    """
    at, side, kind, *pairs = line.rstrip("\n").split("\t")
    if side not in _SIDES:
        raise ValueError(f"no side {side!r} in a trace: {line!r}")
    about = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        about[key] = unquote(value)
    return Record(float(at), _SIDES[side], kind, about)


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Records of a recorded trace, for replay."""
    return (parse(line) for line in lines if line.strip())


class Trace:
    """Collects records in order; the world writes, `checks` reads each as it comes."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)

    def lines(self) -> Iterator[str]:
        """Every record as text."""
        return (record.line() for record in self.records)

    def text(self) -> str:
        """The whole trace, one record a line."""
        return "\n".join(self.lines()) + "\n"

    def digest(self) -> str:
        """sha256 of the text: equal digests, equal runs."""
        hasher = sha256()
        for line in self.lines():
            hasher.update(line.encode() + b"\n")
        return hasher.hexdigest()

    def tail(self, count: int) -> str:
        """The last lines, for a failure message."""
        return "\n".join(record.line() for record in self.records[-count:])


_FIELDS: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return names


def about(value: object) -> dict[str, str]:
    """The fields of an event or effect as short text, nested facts by their ids; empty and unset ones left out."""
    named: dict[str, str] = {}
    for name in _field_names(type(value)):
        text = short(getattr(value, name))
        if text:
            named[name] = text
    return named


def short(value: object) -> str:
    """Text of a field that is dense, deterministic and splittable."""
    match value:
        case None | "" | False | ():
            return ""
        case bool():
            return "1"
        case float():
            return f"{value:.6f}"
        case tuple():
            return ",".join(short(item) or "-" for item in value)
        case str() | int():
            return str(value)
    for key in ("job", "pod", "sku", "code"):
        if hasattr(value, key):
            return str(getattr(value, key))
    if hasattr(value, "ask"):
        return str(value.ask.job)
    if hasattr(value, "exit_code"):
        failure = getattr(value, "failure", None)
        return f"exit:{value.exit_code}/{failure.code if failure is not None else 'ok'}"
    return type(value).__name__
