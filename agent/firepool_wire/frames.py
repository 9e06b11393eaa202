"""The event log of an attempt: an append-only file of frames on the agent's disk, streamed from any byte offset.

A frame is `type` (1 byte), payload length (4 bytes, big endian), payload. Offsets are byte offsets of the file and
always lie on a frame boundary, so a broker that lost its connection asks for `from=<offset it stored>` and loses or
doubles nothing.
"""

import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

_HEAD = struct.Struct(">BI")
HEAD_BYTES = _HEAD.size

#: Largest payload of one frame; larger results are split over several RESULT frames.
MAX_PAYLOAD = 1 << 20


class Kind(IntEnum):
    """What a frame carries."""

    #: JSON {"at_s": CLOCK_MONOTONIC}: the attempt's first instruction.
    STARTED = 1
    #: 1 byte stream (1 stdout, 2 stderr), then raw bytes.
    LOG = 2
    #: Part of an item's result: header and bytes of `pack_item`.
    RESULT = 3
    #: JSON ExitRecord.
    EXIT = 4
    #: Empty: nothing follows. Every event log ends with it.
    END = 5
    #: JSON {"message", ...}: what the agent wants the job's story to say (installing, unpacking, dropped variables).
    NOTE = 6


class Frame(NamedTuple):
    """One decoded frame; `end` is the offset just behind it."""

    kind: Kind
    payload: bytes
    end: int

    def json(self) -> dict[str, Any]:
        """The payload as a JSON object."""
        body: dict[str, Any] = json.loads(self.payload)
        return body


def pack(kind: Kind, payload: bytes) -> bytes:
    """One frame as bytes."""
    return _HEAD.pack(kind, len(payload)) + payload


class Parser:
    """Frames out of a byte stream that arrives in arbitrary pieces."""

    def __init__(self, offset: int = 0) -> None:
        #: Offset of the first byte not yet returned as part of a frame.
        self.offset = offset
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes; yields every frame that is complete now.

        Raises:
            ValueError: the stream is not a frame stream (unknown type or absurd length).
        """
        self._buffer += data
        while len(self._buffer) >= HEAD_BYTES:
            kind, length = _HEAD.unpack_from(self._buffer)
            if length > MAX_PAYLOAD + 64:
                raise ValueError(f"frame of {length} bytes at offset {self.offset} is over the limit of {MAX_PAYLOAD}")
            if len(self._buffer) < HEAD_BYTES + length:
                return
            payload = bytes(self._buffer[HEAD_BYTES : HEAD_BYTES + length])
            del self._buffer[: HEAD_BYTES + length]
            self.offset += HEAD_BYTES + length
            yield Frame(Kind(kind), payload, self.offset)


class ItemStatus(IntEnum):
    """How one call (item) of a function job ended."""

    VALUE = 0
    #: payload: JSON of `FirepoolError.to_json` (UserError with traceback, Signaled, OOM, …), then the pickled exception
    #: behind a NUL byte where it could be pickled and the pool is trusted.
    ERROR = 1
    #: A generator or map has no further items; payload empty.
    STOP = 2


_ITEM = struct.Struct(">IBB")


def pack_item(index: int, status: ItemStatus, payload: bytes) -> Iterator[bytes]:
    """One item's result as RESULT frame payloads: index, status, last-part flag, bytes (codec frame for VALUE)."""
    step = MAX_PAYLOAD - _ITEM.size
    parts = [payload[i : i + step] for i in range(0, len(payload), step)] or [b""]
    for n, part in enumerate(parts):
        yield _ITEM.pack(index, status, n == len(parts) - 1) + part


class Items:
    """Items out of RESULT frame payloads (the parts of one item follow each other)."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def feed(self, payload: bytes) -> tuple[int, ItemStatus, bytes] | None:
        """Add one RESULT payload; the finished item, or None while parts are missing."""
        index, status, last = _ITEM.unpack_from(payload)
        parts = self._parts.setdefault(index, [])
        parts.append(payload[_ITEM.size :])
        if not last:
            return None
        del self._parts[index]
        return index, ItemStatus(status), b"".join(parts)
