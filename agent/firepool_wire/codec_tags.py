"""What both halves of the safe codec agree on: tags, limits, the two errors and `Record`.

Private to `codec_write`, `codec_read` and `codec_arrays`; everybody else imports from `codec`.
"""

import dataclasses
import struct
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

#: First two bytes of every frame: a letter that no pickle starts with, and the version of the format.
MAGIC = b"f\x01"

#: Containers nested deeper than this are refused by both sides: the reader recurses, and may be called from a deep stack.
MAX_DEPTH = 100

#: More keys than this with one and the same hash are an attack: inserting them would take quadratic time.
MAX_EQUAL_HASHES = 32

#: Longest text of a Decimal.
MAX_DECIMAL = 10_000

#: Buffers of arrays start at a multiple of this many bytes, so that an array may live in the frame without a copy.
ALIGN = 16

I64 = struct.Struct(">q")
F64 = struct.Struct(">d")
COMPLEX = struct.Struct(">dd")
LENGTH = struct.Struct(">Q")
COUNT = struct.Struct(">I")

NONE, TRUE, FALSE = b"N", b"T", b"F"
INT, BIGINT, FLOAT, COMPLEX_TAG = b"i", b"I", b"d", b"c"
STR, BYTES, BYTEARRAY = b"s", b"b", b"B"
LIST, TUPLE, SET, FROZENSET, DICT = b"l", b"t", b"x", b"X", b"m"
DATETIME, DATE, TIME, TIMEDELTA, DECIMAL = b"D", b"y", b"h", b"e", b"n"
#: A dataclass, a named tuple, an enum member: module, qualified name, then what they hold.
DATACLASS, NAMEDTUPLE, ENUM = b"r", b"u", b"v"
NUMPY, TORCH = b"a", b"A"
#: Only as a whole frame, never inside one: either everything is plain, or everything is one pickle.
PICKLE = b"P"


class NotSafe(TypeError):
    """A value is not plain and no pickler was given, or a pickle arrived where none is accepted.

    `where` is the path inside the value (`["scores"][3]`), `what` the type found there.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what = what
        self.where = where

    def __str__(self) -> str:
        return f"{self.what} at value{self.where}" if self.where else self.what


class Malformed(ValueError):
    """The bytes are not a frame of this codec: cut, forged, or made by a newer version."""


class Record(SimpleNamespace):
    """Stands for a dataclass, named tuple or array whose class this process has not imported; fields are attributes.

    `record_of` is `module:qualname` of the class. Two records are equal when class name and fields are.
    """

    def __init__(self, record_of: str, /, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "_record_of", record_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.__dict__ == other.__dict__

    __hash__ = None

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items() if k != "_record_of")
        return f"<record of {record_of(self)}: {fields}>"


def record_of(record: Record) -> str:
    """`module:qualname` of the class that a record stands for."""
    name: str = record.__dict__["_record_of"]
    return name


def fillable(kind: type) -> bool:
    """Whether instances of a dataclass can be made by setting their fields, without running code of the class.

    Slots are descriptors too, but the interpreter's own; any other (a property) would run its setter, and `__del__`
    would run on whatever a stranger had put into the fields.
    """
    custom = any(getattr(kind, n) is not getattr(object, n) for n in ("__new__", "__reduce__", "__reduce_ex__"))
    if custom or hasattr(kind, "__del__") or not dataclasses.is_dataclass(kind):
        return False
    found = (vars(base).get(f.name) for base in kind.__mro__ for f in dataclasses.fields(kind))
    return all(isinstance(a, MemberDescriptorType) or not hasattr(type(a), "__set__") for a in found)
