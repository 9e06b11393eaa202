"""The reading half of the safe codec. It meets bytes that untrusted code wrote: every length is checked before it is
believed, depth is bounded, nothing is imported and no code of a value's class runs.

Private to `codec`.
"""

import dataclasses
import datetime as dt
import enum
import sys
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from firepool_wire import codec_tags as tag
from firepool_wire.codec_arrays import read_numpy, read_torch
from firepool_wire.codec_tags import Malformed, NotSafe, Record, fillable

Classes = Callable[[str], "type | None"]


def imported_class(name: str) -> type | None:
    """The class `module:qualname`, only if its module is already imported here; the default resolver of `decode`."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # `vars`, not `getattr`: a module's `__getattr__` may import.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def decode(data: bytes, loads: Callable[[bytes], object] | None, classes: Classes | None) -> object:
    """The value of one frame.

    Args:
        data: what `encode` returned. Arrays keep a view of it.
        loads: an unpickler, or None where pickles are refused.
        classes: turns `module:qualname` into a class or None; None = `imported_class`.

    Raises:
        NotSafe: the frame is a pickle and `loads` is None.
        Malformed: the bytes are no frame.
    """
    if bytes(data[:2]) != tag.MAGIC:
        raise Malformed("not a frame of this codec")
    if bytes(data[2:3]) == tag.PICKLE:
        if loads is None:
            raise NotSafe("a pickle, which is not accepted here")
        return loads(bytes(data[3:]))
    reader = _Reader(memoryview(data), classes or imported_class)
    value = reader.value(0)
    if reader.at != len(data):
        raise Malformed(f"{len(data) - reader.at} bytes behind the value")
    return value


class _Reader:
    def __init__(self, data: memoryview, classes: Classes) -> None:
        self.data = data
        self.at = len(tag.MAGIC)
        self.classes = classes

    # -- pieces --

    def take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise Malformed(f"cut: {size} bytes announced, {len(self.data) - start} there")
        return self.data[start : self.at]

    def blob(self) -> memoryview:
        (size,) = tag.LENGTH.unpack(self.take(8))
        return self.take(size)

    def text(self) -> str:
        try:
            return str(self.blob(), "utf-8", "surrogatepass")
        except UnicodeDecodeError as wrong:
            raise Malformed(f"text: {wrong}") from None

    def name(self) -> str:
        if self.take(1) != tag.STR:
            raise Malformed("a name is missing")
        return self.text()

    def count(self) -> int:
        (count,) = tag.COUNT.unpack(self.take(4))
        # Every item takes a byte at least, so a forged count cannot make us reserve memory.
        if count > len(self.data) - self.at:
            raise Malformed(f"{count} items announced in {len(self.data) - self.at} bytes")
        return int(count)

    def value(self, depth: int) -> Any:
        if depth > tag.MAX_DEPTH:
            raise Malformed(f"nested more than {tag.MAX_DEPTH} deep")
        mark = bytes(self.take(1))
        reader = _READERS.get(mark)
        if reader is None:
            raise Malformed(f"unknown tag {mark!r}")
        return reader(self, depth)

    # -- containers --

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self.count())]

    def set(self, kind: Any, depth: int) -> Any:
        items = self.items(depth)
        return _build(lambda: kind(items), items)

    def mapping(self, depth: int) -> dict[Any, Any]:
        pairs = [(self.value(depth + 1), self.value(depth + 1)) for _ in range(self.count())]
        built: dict[Any, Any] = _build(lambda: dict(pairs), [key for key, _ in pairs])
        return built

    # -- times and numbers --

    def zoned(self, kind: Any) -> Any:
        text = self.text()
        try:
            value = kind.fromisoformat(text[1:])
        except ValueError as wrong:
            raise Malformed(str(wrong)) from None
        return value.replace(fold=1) if text[0] == "1" else value

    def date(self) -> dt.date:
        try:
            return dt.date.fromisoformat(self.text())
        except ValueError as wrong:
            raise Malformed(str(wrong)) from None

    def timedelta(self) -> dt.timedelta:
        days, seconds, micros = (tag.I64.unpack(self.take(8))[0] for _ in range(3))
        try:
            return dt.timedelta(days, seconds, micros)
        except OverflowError as wrong:
            raise Malformed(str(wrong)) from None

    def decimal(self) -> Decimal:
        text = self.text()
        if len(text) > tag.MAX_DECIMAL:
            raise Malformed(f"a Decimal of {len(text)} characters")
        try:
            return Decimal(text)
        except InvalidOperation:
            raise Malformed(f"not a Decimal: {text[:40]!r}") from None

    # -- things with a class --

    def named(self) -> tuple[str, type | None]:
        name = f"{self.name()}:{self.name()}"
        return name, self.classes(name)

    def fields(self, depth: int) -> dict[str, Any]:
        return {self.name(): self.value(depth + 1) for _ in range(self.count())}

    def dataclass(self, depth: int) -> object:
        name, kind = self.named()
        held = self.fields(depth)
        if kind is None or not _fits(kind, held):
            return Record(name, **held)
        value: object = object.__new__(kind)
        for field, item in held.items():
            object.__setattr__(value, field, item)
        return value

    def namedtuple(self, depth: int) -> object:
        name, kind = self.named()
        held = self.fields(depth)
        fields = getattr(kind, "_fields", None)
        if kind is None or not issubclass(kind, tuple) or hasattr(kind, "__del__") or fields != tuple(held):
            return Record(name, **held)
        return tuple.__new__(kind, held.values())

    def enum(self, depth: int) -> object:
        _, kind = self.named()
        member = self.name()
        value = self.value(depth + 1)
        if kind is None or not issubclass(kind, enum.Enum):
            return value
        return kind.__members__.get(member, value)

    def array(self, mark: bytes) -> object:
        flags, name_size, dimensions = self.take(3)
        try:
            dtype = str(self.take(name_size), "utf-8")
        except UnicodeDecodeError as wrong:
            raise Malformed(f"dtype: {wrong}") from None
        shape = tuple(tag.LENGTH.unpack(self.take(8))[0] for _ in range(dimensions))
        (size,) = tag.LENGTH.unpack(self.take(8))
        self.take(-self.at % tag.ALIGN)
        data = self.take(size).toreadonly()
        return read_numpy(dtype, shape, flags, data) if mark == tag.NUMPY else read_torch(dtype, shape, data)


def _fits(kind: type, held: dict[str, Any]) -> bool:
    """Whether the class is a dataclass with just these fields that can be filled without running any of its code."""
    return fillable(kind) and {f.name for f in dataclasses.fields(kind)} == held.keys()


def _build(make: Callable[[], Any], keys: list[Any]) -> Any:
    """Make a set or dict of keys that a stranger chose. Raises: Malformed: unhashable keys, or a crowd of one hash."""
    try:
        if len(keys) > tag.MAX_EQUAL_HASHES:
            most = max(Counter(map(hash, keys)).values())
            if most > tag.MAX_EQUAL_HASHES:
                raise Malformed(f"{most} keys share one hash")
        return make()
    except Malformed:
        raise
    except Exception as wrong:  # noqa: BLE001 - a key may be an object of our class with forged fields: any error
        raise Malformed(f"keys that cannot be hashed: {wrong!r}") from None


def _bigint(reader: _Reader, depth: int) -> int:
    return int.from_bytes(reader.blob(), "big", signed=True)


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    tag.NONE: lambda r, d: None,
    tag.TRUE: lambda r, d: True,
    tag.FALSE: lambda r, d: False,
    tag.INT: lambda r, d: tag.I64.unpack(r.take(8))[0],
    tag.BIGINT: _bigint,
    tag.FLOAT: lambda r, d: tag.F64.unpack(r.take(8))[0],
    tag.COMPLEX_TAG: lambda r, d: complex(*tag.COMPLEX.unpack(r.take(16))),
    tag.STR: lambda r, d: r.text(),
    tag.BYTES: lambda r, d: bytes(r.blob()),
    tag.BYTEARRAY: lambda r, d: bytearray(r.blob()),
    tag.LIST: lambda r, d: r.items(d),
    tag.TUPLE: lambda r, d: tuple(r.items(d)),
    tag.SET: lambda r, d: r.set(set, d),
    tag.FROZENSET: lambda r, d: r.set(frozenset, d),
    tag.DICT: lambda r, d: r.mapping(d),
    tag.DATETIME: lambda r, d: r.zoned(dt.datetime),
    tag.DATE: lambda r, d: r.date(),
    tag.TIME: lambda r, d: r.zoned(dt.time),
    tag.TIMEDELTA: lambda r, d: r.timedelta(),
    tag.DECIMAL: lambda r, d: r.decimal(),
    tag.DATACLASS: lambda r, d: r.dataclass(d),
    tag.NAMEDTUPLE: lambda r, d: r.namedtuple(d),
    tag.ENUM: lambda r, d: r.enum(d),
    tag.NUMPY: lambda r, d: r.array(tag.NUMPY),
    tag.TORCH: lambda r, d: r.array(tag.TORCH),
}
