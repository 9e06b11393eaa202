"""The writing half of the safe codec: plain values into bytes, everything else to a pickler or refused.

Private to `codec`. Types are matched exactly: a subclass of `dict` or `float` is not plain, since it would come back as
another type than it went.
"""

import dataclasses
import datetime as dt
import enum
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from firepool_wire import codec_tags as tag
from firepool_wire.codec_arrays import write_numpy, write_torch
from firepool_wire.codec_tags import NotSafe, fillable

Writer = Callable[[bytearray, Any, int], None]


def encode(value: object, dumps: Callable[[object], bytes] | None) -> bytes:
    """A value as one frame.

    Args:
        value: plain values travel in the codec's own format; one that holds anything else is pickled as a whole, so
            that objects in it which are one and the same stay so.
        dumps: a pickler, or None where pickles are refused (untrusted pools).

    Raises:
        NotSafe: the value is not plain and `dumps` is None.
    """
    out = _Frame(tag.MAGIC)
    out.prefer_pickle = dumps is not None
    try:
        _write(out, value, 0)
    except NotSafe:
        if dumps is None:
            raise
        return tag.MAGIC + tag.PICKLE + dumps(value)
    return bytes(out)


class _Frame(bytearray):
    """The frame being written."""

    #: Classes without an importable name are left to the pickler, which can send them by value.
    prefer_pickle = False


def _write(out: bytearray, value: object, depth: int) -> None:
    if depth > tag.MAX_DEPTH:
        raise NotSafe(f"a value nested more than {tag.MAX_DEPTH} deep")
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = _writer_of(value)
    writer(out, value, depth)


def _writer_of(value: object) -> Writer:
    """The writer of a type that is known only by its shape."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _enum
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _namedtuple
    if kind.__module__ == "numpy":
        return _leaf(write_numpy)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return _leaf(write_torch)
    raise NotSafe(f"a {kind.__module__}.{kind.__qualname__}, which is not a plain type")


def _leaf(write: Callable[[bytearray, Any], None]) -> Writer:
    return lambda out, value, depth: write(out, value)


def _constant(mark: bytes) -> Writer:
    def write(out: bytearray, value: object, depth: int) -> None:
        out += mark

    return write


def _int(out: bytearray, value: int, depth: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += tag.INT + tag.I64.pack(value)
    else:
        _blob(out, tag.BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _float(out: bytearray, value: float, depth: int) -> None:
    out += tag.FLOAT + tag.F64.pack(value)


def _complex(out: bytearray, value: complex, depth: int) -> None:
    out += tag.COMPLEX_TAG + tag.COMPLEX.pack(value.real, value.imag)


def _blob(out: bytearray, mark: bytes, data: bytes | bytearray) -> None:
    out += mark + tag.LENGTH.pack(len(data))
    out += data


def _text(out: bytearray, mark: bytes, text: str) -> None:
    # Lone surrogates are legal in a str (file names, a model's broken output) and must not cost the result.
    _blob(out, mark, text.encode("utf-8", "surrogatepass"))


def _str(out: bytearray, value: str, depth: int) -> None:
    _text(out, tag.STR, value)


def _bytes(out: bytearray, value: bytes, depth: int) -> None:
    _blob(out, tag.BYTES, value)


def _bytearray(out: bytearray, value: bytearray, depth: int) -> None:
    _blob(out, tag.BYTEARRAY, value)


def _items(out: bytearray, mark: bytes, items: Iterable[object], count: int, depth: int) -> None:
    out += mark + tag.COUNT.pack(count)
    n = -1
    try:
        for item in items:
            n += 1
            _write(out, item, depth + 1)
    except NotSafe as refused:
        raise NotSafe(refused.what, f"[{n}]{refused.where}") from None


def _sequence(mark: bytes) -> Writer:
    def write(out: bytearray, value: Any, depth: int) -> None:
        _items(out, mark, value, len(value), depth)

    return write


def _dict(out: bytearray, value: dict[Any, Any], depth: int) -> None:
    out += tag.DICT + tag.COUNT.pack(len(value))
    key: object = None
    try:
        for key, item in value.items():
            _write(out, key, depth + 1)
            _write(out, item, depth + 1)
    except NotSafe as refused:
        raise NotSafe(refused.what, f"[{key!r:.80}]{refused.where}") from None


def _zoned(value: dt.datetime | dt.time) -> str:
    # Named zones would come back as bare offsets: not the same value, so they are not plain.
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise NotSafe(f"a time in the zone {value.tzinfo}, which has rules of its own")
    return f"{value.fold}{value.isoformat()}"


def _datetime(out: bytearray, value: dt.datetime, depth: int) -> None:
    _text(out, tag.DATETIME, _zoned(value))


def _date(out: bytearray, value: dt.date, depth: int) -> None:
    _text(out, tag.DATE, value.isoformat())


def _time(out: bytearray, value: dt.time, depth: int) -> None:
    _text(out, tag.TIME, _zoned(value))


def _timedelta(out: bytearray, value: dt.timedelta, depth: int) -> None:
    out += tag.TIMEDELTA + tag.I64.pack(value.days) + tag.I64.pack(value.seconds) + tag.I64.pack(value.microseconds)


def _decimal(out: bytearray, value: Decimal, depth: int) -> None:
    text = str(value)
    if len(text) > tag.MAX_DECIMAL:
        raise NotSafe(f"a Decimal of {len(text)} characters")
    _text(out, tag.DECIMAL, text)


def _named(out: bytearray, mark: bytes, kind: type) -> None:
    if "<locals>" in kind.__qualname__ and getattr(out, "prefer_pickle", False):
        raise NotSafe(f"a {kind.__qualname__}, a class that cannot be found by name")
    out += mark
    _text(out, tag.STR, kind.__module__)
    _text(out, tag.STR, kind.__qualname__)


def _fields(out: bytearray, value: object, names: Iterable[str], depth: int) -> None:
    held = list(names)
    out += tag.COUNT.pack(len(held))
    name = ""
    try:
        for name in held:
            _text(out, tag.STR, name)
            _write(out, getattr(value, name), depth + 1)
    except NotSafe as refused:
        raise NotSafe(refused.what, f".{name}{refused.where}") from None


def _dataclass(out: bytearray, value: Any, depth: int) -> None:
    names = [f.name for f in dataclasses.fields(value)]
    extra = sorted(set(getattr(value, "__dict__", ())) - set(names))
    if extra or not all(hasattr(value, name) for name in names):
        raise NotSafe(f"a {type(value).__qualname__} whose attributes are not just its fields ({', '.join(extra)})")
    if not fillable(type(value)):
        raise NotSafe(f"a {type(value).__qualname__}, a dataclass with ways of its own to be made or pickled")
    _named(out, tag.DATACLASS, type(value))
    _fields(out, value, names, depth)


def _namedtuple(out: bytearray, value: Any, depth: int) -> None:
    if getattr(value, "__dict__", None):
        raise NotSafe(f"a {type(value).__qualname__} whose attributes are not just its fields")
    _named(out, tag.NAMEDTUPLE, type(value))
    _fields(out, value, type(value)._fields, depth)


def _enum(out: bytearray, value: enum.Enum, depth: int) -> None:
    if not isinstance(value.name, str) or value.name not in type(value).__members__:
        raise NotSafe(f"a combination of {type(value).__qualname__} flags, which has no name")
    _named(out, tag.ENUM, type(value))
    _text(out, tag.STR, value.name)
    try:
        _write(out, value.value, depth + 1)
    except NotSafe as refused:
        raise NotSafe(refused.what, f".value{refused.where}") from None


_WRITERS: dict[type, Writer] = {
    type(None): _constant(tag.NONE),
    bool: lambda out, value, depth: out.extend(tag.TRUE if value else tag.FALSE),
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    list: _sequence(tag.LIST),
    tuple: _sequence(tag.TUPLE),
    set: _sequence(tag.SET),
    frozenset: _sequence(tag.FROZENSET),
    dict: _dict,
    dt.datetime: _datetime,
    dt.date: _date,
    dt.time: _time,
    dt.timedelta: _timedelta,
    Decimal: _decimal,
}
