"""Values across the wire (design §5): results come back from untrusted code in a safe format, arguments go the other way
as pickles. This is the front door; the halves live in `codec_write`, `codec_read`, `codec_arrays` and `args`.

Plain, and safe to read from anyone: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset,
dict, datetime, date, time, timedelta, Decimal, named tuples, enum members, dataclasses by field, numpy arrays and
scalars and torch tensors as raw buffers. Anything else is pickled where both sides allow it.
"""

from firepool_wire.args import PackedCall, Ref, pack_args, split_args, unpack_args
from firepool_wire.codec_read import decode, imported_class
from firepool_wire.codec_tags import Malformed, NotSafe, Record, record_of
from firepool_wire.codec_write import encode

__all__ = [
    "Malformed",
    "NotSafe",
    "PackedCall",
    "Record",
    "Ref",
    "decode",
    "encode",
    "imported_class",
    "pack_args",
    "record_of",
    "split_args",
    "unpack_args",
]
