"""Output of an attempt: two pipes in, LOG frames out, bounded as head, marker and tail.

A job holds nothing but the pipes' write ends, so it cannot rewrite what it has said. Reading never waits for a reader of the log:
beyond the cap the agent keeps only the last bytes, in memory, and writes them when the attempt has ended.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable

from firepool_wire import frames
from firepool_wire.frames import Kind

#: Bytes taken from a pipe at a time (a pipe holds 64 KiB).
READ_BYTES = 64 * 1024
#: Largest tail kept in the agent's memory.
MAX_TAIL_BYTES = 4 * 1024 * 1024

STDOUT, STDERR = 1, 2


class LogCap:
    """Decides what of the output is kept: everything up to the head's size, then only a tail."""

    def __init__(self, max_bytes: int, write: Callable[[bytes], None]) -> None:
        tail = min(max_bytes // 4, MAX_TAIL_BYTES)
        self._head_left = max_bytes - tail
        self._tail_cap = tail
        self._tail: deque[tuple[int, bytes]] = deque()
        self._tail_bytes = 0
        self._write = write
        #: Bytes kept in the log, and bytes thrown away.
        self.kept = 0
        self.dropped = 0

    def add(self, stream: int, data: bytes) -> None:
        """Take output of one stream."""
        if self._head_left >= len(data) and not self._tail:
            self._head_left -= len(data)
            self._frame(stream, data)
            return
        if self._head_left:
            self._frame(stream, data[: self._head_left])
            data = data[self._head_left :]
            self._head_left = 0
            self._marker(f"the log is over its limit: from here only the last {self._tail_cap} bytes are kept")
        self._tail.append((stream, data))
        self._tail_bytes += len(data)
        while self._tail_bytes > self._tail_cap:
            self._shorten(self._tail_bytes - self._tail_cap)

    def _shorten(self, surplus: int) -> None:
        stream, data = self._tail.popleft()
        if len(data) > surplus:
            self._tail.appendleft((stream, data[surplus:]))
        cut = min(len(data), surplus)
        self._tail_bytes -= cut
        self.dropped += cut

    def finish(self) -> None:
        """Write the tail, behind a marker that says how much is missing before it."""
        if self.dropped:
            self._marker(f"{self.dropped} bytes are missing here")
        for stream, data in self._tail:
            self._frame(stream, data)
        self._tail.clear()

    def _frame(self, stream: int, data: bytes) -> None:
        if data:
            self.kept += len(data)
            self._write(frames.pack(Kind.LOG, bytes((stream,)) + data))

    def _marker(self, text: str) -> None:
        self._write(frames.pack(Kind.LOG, bytes((STDERR,)) + f"\n[firepool: {text}]\n".encode()))


class Pipe:
    """One output pipe, read as the event loop finds it readable."""

    def __init__(self, fd: int, stream: int, cap: LogCap) -> None:
        self._fd = fd
        self._stream = stream
        self._cap = cap
        self._loop = asyncio.get_running_loop()
        #: Done at end of file: nobody holds the write end any more.
        self.closed: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    def _readable(self) -> None:
        self._take()

    def _take(self) -> bool:
        """Read once. Returns whether there may be more."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._cap.add(self._stream, data)
            return True
        self.close()
        return False

    def drain(self) -> None:
        """Take what is in the pipe now and close it, whoever may still hold the other end."""
        while not self.closed.done() and self._take():
            pass
        self.close()

    def close(self) -> None:
        """Stop reading."""
        if not self.closed.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.closed.set_result(None)
