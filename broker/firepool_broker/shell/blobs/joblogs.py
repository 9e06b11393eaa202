"""`ports.LogStore` in a directory: one file per attempt and rank, stdout and stderr as they came.

    <attempt>.<rank>.part   bytes so far
    <attempt>.<rank>.pos    how many of them count, and the agent's event offset behind them: one record, written in place
    <attempt>.<rank>.log    a finished log (the `.part`, renamed)

Bytes gather in memory and go to the disk in pieces, bytes first, position second. A broker that is killed at any point finds
a position and the bytes that belong to it (what lies behind is cut off) and asks the agent for the rest: nothing is lost,
nothing doubled. The agent keeps its event log until the end is stored, so what was still in memory comes again.

Nothing is synced: a kill of the broker cannot lose what the kernel has. A power cut can cost the last seconds of a *local*
log, whose pods are gone with it; a sync per job would cost every job 0.2 ms, or 20 ms on a slow disk, for that.

All calls belong to the event loop's thread; files are open only during a call.
"""

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from firepool_wire.errors import StoreUnavailable

#: Bytes of a log that gather in memory. Raise: fewer writes. Lower: less is asked for again after a kill.
GATHER_BYTES = 32 * 1024

#: The event offset of a finished log: every frame is in it.
EVERYTHING = (1 << 63) - 1

_POSITION = struct.Struct(">QQ")

Key = tuple[str, int]


@dataclass(slots=True)
class _Growing:
    """A log that is not finished."""

    base: Path
    #: Bytes on disk that count, and those behind them still in memory.
    stored: int = 0
    gathered: bytearray = field(default_factory=bytearray)
    event_offset: int = 0

    @property
    def size(self) -> int:
        return self.stored + len(self.gathered)


class LogFiles:
    """Logs in `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._growing: dict[Key, _Growing] = {}
        self._waiting: dict[Key, set[asyncio.Future[None]]] = {}

    def append(self, attempt: str, rank: int, stream: int, data: bytes, event_offset: int) -> None:
        """Add a frame's bytes, once: a frame at or before `event_offset()` is in the log already. Streams are not told
        apart. Raises: StoreUnavailable: the disk is full; the frame is not in the log."""
        log = self._find(attempt, rank)
        if log is None:
            if self.finished(attempt, rank):
                return
            log = self._growing[attempt, rank] = _Growing(self._base(attempt, rank))
        if event_offset <= log.event_offset:
            return
        before, log.event_offset = log.event_offset, event_offset
        log.gathered += data
        try:
            if len(log.gathered) >= GATHER_BYTES:
                _flush(log)
        except OSError as error:
            del log.gathered[len(log.gathered) - len(data) :]
            log.event_offset = before
            raise _full(error) from error
        self._wake(attempt, rank)

    def event_offset(self, attempt: str, rank: int) -> int:
        """Offset in the agent's event log behind the last appended frame: 0 for no log, `EVERYTHING` for a finished one."""
        log = self._find(attempt, rank)
        if log is not None:
            return log.event_offset
        return EVERYTHING if self.finished(attempt, rank) else 0

    def read(self, attempt: str, rank: int, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset` on; none at or behind the end. Raises: StoreUnavailable."""
        log = self._find(attempt, rank)
        try:
            if log is None:
                return _pread(_with(self._base(attempt, rank), ".log"), offset, limit)
            data = b""
            if offset < log.stored:
                data = _pread(_with(log.base, ".part"), offset, min(limit, log.stored - offset))
            at = offset + len(data) - log.stored
            return data + log.gathered[at : at + limit - len(data)] if at >= 0 else data
        except OSError as error:
            raise StoreUnavailable(f"The log store cannot read: {error.strerror}.", errno=error.errno) from error

    def size(self, attempt: str, rank: int) -> int:
        """Bytes so far."""
        log = self._find(attempt, rank)
        if log is not None:
            return log.size
        try:
            return _with(self._base(attempt, rank), ".log").stat().st_size
        except FileNotFoundError:
            return 0

    def finish(self, attempt: str, rank: int) -> None:
        """Nothing follows. Raises: StoreUnavailable: the disk is full; the log is as before and can be finished later."""
        log = self._find(attempt, rank)
        if log is None:
            if self.finished(attempt, rank):
                return
            log = _Growing(self._base(attempt, rank))
        try:
            _seal(log)
        except OSError as error:
            raise _full(error) from error
        self._growing.pop((attempt, rank), None)
        self._wake(attempt, rank)

    def finished(self, attempt: str, rank: int) -> bool:
        """Whether nothing follows."""
        return (attempt, rank) not in self._growing and _with(self._base(attempt, rank), ".log").exists()

    async def more(self, attempt: str, rank: int, offset: int) -> None:
        """Return once bytes lie behind `offset` or the log is finished."""
        while self.size(attempt, rank) <= offset and not self.finished(attempt, rank):
            future = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault((attempt, rank), set())
            waiting.add(future)
            try:
                await future
            finally:
                waiting.discard(future)
                if not waiting and self._waiting.get((attempt, rank)) is waiting:
                    del self._waiting[attempt, rank]

    def flush(self) -> None:
        """Write what is gathered (an orderly end of the broker). Raises: StoreUnavailable."""
        for log in self._growing.values():
            try:
                _flush(log)
            except OSError as error:
                raise _full(error) from error

    def sweep(self, keep: Container[str], older_than_s: float) -> int:
        """Remove logs older than that of jobs that are not in `keep`; returns how many files. Blocks: call it in a thread."""
        before = time.time() - older_than_s
        removed = 0
        for path in self._root.glob("??/*"):
            attempt = unquote(path.name.rsplit(".", 2)[0])
            if attempt.rpartition(":")[0] in keep:
                continue
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed

    def _find(self, attempt: str, rank: int) -> _Growing | None:
        """The log if it is growing, in this life of the broker or since an earlier one."""
        log = self._growing.get((attempt, rank))
        if log is None and (log := _recover(self._base(attempt, rank))) is not None:
            self._growing[attempt, rank] = log
        return log

    def _base(self, attempt: str, rank: int) -> Path:
        job = attempt.rpartition(":")[0]
        shard = hashlib.sha256(job.encode()).hexdigest()[:2]
        return self._root / shard / f"{quote(attempt, safe=':')}.{rank}"

    def _wake(self, attempt: str, rank: int) -> None:
        for future in self._waiting.pop((attempt, rank), ()):
            if not future.done():
                future.set_result(None)


def _flush(log: _Growing) -> None:
    """Bytes first, then the position that makes them count. Repeated after a failure it writes the same bytes again."""
    if not log.gathered:
        return
    # The first write cuts off what an earlier broker wrote without getting as far as the position.
    _pwrite(_with(log.base, ".part"), log.gathered, log.stored, 0 if log.stored else os.O_TRUNC)
    _pwrite(_with(log.base, ".pos"), _POSITION.pack(log.size, log.event_offset), 0)
    log.stored = log.size
    log.gathered.clear()


def _seal(log: _Growing) -> None:
    part = _with(log.base, ".part")
    position = _with(log.base, ".pos")
    if log.stored:
        _flush(log)
    else:
        # Short, nothing of it counts yet: the rename will make it count, no position needed.
        _pwrite(part, log.gathered, 0, os.O_TRUNC)
    part.rename(_with(log.base, ".log"))
    if log.stored:
        position.unlink(missing_ok=True)


def _recover(base: Path) -> _Growing | None:
    """A log that an earlier broker left growing, cut to what counts."""
    try:
        size, event_offset = _POSITION.unpack(_pread(_with(base, ".pos"), 0, _POSITION.size))
    except (FileNotFoundError, struct.error):
        return None
    part = _with(base, ".part")
    try:
        if part.stat().st_size < size:  # a power cut: all of it comes again from the agent, which lives or is no loss
            size = event_offset = 0
        os.truncate(part, size)
    except FileNotFoundError:
        return None
    return _Growing(base, stored=size, event_offset=event_offset)


def _with(base: Path, ending: str) -> Path:
    return base.with_name(base.name + ending)


def _pwrite(path: Path, data: bytes | bytearray, offset: int, also: int = 0) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | also
    try:
        handle = os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(handle, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(handle)


def _pread(path: Path, offset: int, limit: int) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(handle, limit, offset)
    finally:
        os.close(handle)


def _full(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"The log store cannot write: {error.strerror or error}.", errno=error.errno)
