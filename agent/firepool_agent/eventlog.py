"""The event log of one attempt: a file of frames (`firepool_wire.frames`) that one writer appends to and any number of
readers follow from any offset. It stays until the broker acknowledged the attempt's end, across an agent's restart too.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from firepool_wire import frames
from firepool_wire.agentapi import ExitRecord
from firepool_wire.errors import BadRequest
from firepool_wire.frames import Kind

#: Bytes that a reader takes at a time.
READ_BYTES = 256 * 1024


class EventLog:
    """Frames on disk, with wake-ups for who follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        #: Whether END was written: nothing follows.
        self.ended = self.size >= frames.HEAD_BYTES and self._last_frame_is_end()
        self._followers: set[asyncio.Future[None]] = set()

    def _last_frame_is_end(self) -> bool:
        tail = os.pread(self._fd, frames.HEAD_BYTES, self.size - frames.HEAD_BYTES)
        return tail == frames.pack(Kind.END, b"")

    def append(self, *parts: bytes) -> None:
        """Add frames. Raises: OSError: the disk is full; nothing of these frames counts then."""
        data = b"".join(parts)
        at = 0
        try:
            while at < len(data):
                at += os.write(self._fd, memoryview(data)[at:])
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)
        self._wake()

    def note(self, message: str) -> None:
        """Add a sentence for the job's story."""
        self.append(frames.pack(Kind.NOTE, json.dumps({"message": message}).encode()))

    def end(self, *parts: bytes) -> None:
        """Add the last frames and END."""
        self.append(*parts, frames.pack(Kind.END, b""))
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for follower in self._followers:
            if not follower.done():
                follower.set_result(None)

    def follow(self, offset: int) -> AsyncGenerator[bytes, None]:
        """Frames from `offset` on, until END. Raises: BadRequest: no such offset."""
        if not 0 <= offset <= self.size:
            raise BadRequest(f"offset {offset} is not within the log of {self.size} bytes", field="from")
        return self._read(offset)

    async def _read(self, offset: int) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        fd = os.dup(self._fd)  # the log may be dropped (acknowledged) while someone still reads it
        try:
            while True:
                while offset < self.size:
                    data = os.pread(fd, READ_BYTES, offset)
                    offset += len(data)
                    yield data
                if self.ended:
                    return
                grown: asyncio.Future[None] = loop.create_future()
                self._followers.add(grown)
                try:
                    await grown
                finally:
                    self._followers.discard(grown)
        finally:
            os.close(fd)

    def drop(self) -> None:
        """Close and delete the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._fd)


def exit_frame(record: ExitRecord) -> bytes:
    """The EXIT frame of a record."""
    return frames.pack(Kind.EXIT, json.dumps(record.to_json()).encode())
