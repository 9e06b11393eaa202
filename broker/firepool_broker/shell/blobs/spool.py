"""Bytes on their way into a directory: written aside, hashed and counted while they come, then given their name in one step.

What is named is whole and synced, also after a power cut: a job that was accepted durably may refer to it. So the file is
synced before the rename and its directory after it (0.35 ms together on this kind of disk; results that a job waits for
are mostly small enough to travel in the job's row instead). All methods block: call them from a worker thread.
"""

import hashlib
import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

from firepool_wire.errors import StoreUnavailable

_numbers = count()


class Spool:
    """One blob coming in. `write` any number of times, then `name` or `drop`."""

    def __init__(self, aside: Path) -> None:
        self._path = aside / f"{os.getpid()}-{next(_numbers)}"
        self._hash = hashlib.sha256()
        self._file = -1
        self._dropped = False
        # A put that is cancelled drops its spool while a write of it may still be under way in another thread.
        self._lock = threading.Lock()

    @property
    def hexdigest(self) -> str:
        """Of everything written."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray) -> None:
        """Add bytes. Raises: StoreUnavailable (disk full)."""
        with self._lock:
            if self._dropped:
                return
            try:
                if self._file < 0:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._hash.update(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError as error:
                raise cannot_write(error) from error

    def name(self, final: Path) -> None:
        """Sync the bytes and give them their name. Raises: StoreUnavailable."""
        with self._lock:
            if self._dropped:
                return
            try:
                os.fdatasync(self._file)
                os.close(self._file)
                self._file = -1
                make_directory(final.parent)
                self._path.rename(final)
                sync_directory(final.parent)
            except OSError as error:
                raise cannot_write(error) from error

    def drop(self) -> None:
        """Forget the bytes, if they have no name yet; a later `write` does nothing."""
        with self._lock:
            self._dropped = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            with suppress(FileNotFoundError):
                self._path.unlink()


def make_directory(path: Path) -> None:
    """Create a directory so that it survives a power cut."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cannot_write(error: OSError) -> StoreUnavailable:
    """The typed error for a disk that does not take bytes."""
    return StoreUnavailable(
        f"The blob store cannot write: {error.strerror or error}. Nothing was stored.", errno=error.errno
    )
