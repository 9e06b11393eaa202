"""`ports.BlobStore` in a directory of this machine: `<root>/<caller's scope>/<64 hex>`.

Small reads run on the event loop (they come from the page cache: 20 µs, a thread hop costs more); everything that can wait
for the disk runs in a few worker threads.
"""

import asyncio
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from firepool_broker.shell.blobs import names
from firepool_broker.shell.blobs.spool import Spool, cannot_write, make_directory
from firepool_wire.errors import PackageError, PayloadTooLarge, StoreUnavailable

T = TypeVar("T")

#: Bytes handed to a worker thread at a time. Raise: fewer hops. Lower: less memory per upload.
PIECE = 1 << 20

#: Blobs up to this size are read on the event loop.
NEAR_BYTES = 256 * 1024

#: Uploads that were never finished (the broker was killed) are removed after this.
ASIDE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    files: int = 0
    bytes: int = 0


class LocalBlobs:
    """Blobs in `root`. Digests are of the stored bytes and verified while they come in."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._aside = root / "aside"
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="firepool-blobs")
        # `has` renews a blob's age and a sweep removes the old: neither may happen between the other's two steps.
        self._ages = threading.Lock()
        try:
            make_directory(self._aside)
        except OSError as error:
            raise cannot_write(error) from error

    async def has(self, caller: str, digest: str) -> bool:
        """Whether the caller stored it. A yes also renews its age: a job that is submitted next may rely on it."""
        path = self._path(caller, digest)
        return path is not None and self._renew(path) is not None

    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        """Store a stream; returns its digest.

        Raises:
            PayloadTooLarge: more than `limit_bytes`.
            PackageError: the digest is not `expect`.
            StoreUnavailable: the disk is full or fails.
            In every case nothing stays.
        """
        if expect is not None:
            names.must_be_digest(expect)
        spool = Spool(self._aside)
        try:
            await self._fill(spool, chunks, limit_bytes)
            digest = names.PREFIX + spool.hexdigest
            if expect not in (None, digest):
                raise PackageError(f"The bytes have digest {digest}, not {expect}.", expected=expect, found=digest)
            await self._hop(lambda: spool.name(self._must(caller, digest)))
        except BaseException:
            # Shielded: a put that is cancelled leaves nothing either.
            await asyncio.shield(self._hop(spool.drop))
            raise
        return digest

    async def put_bytes(self, caller: str, data: bytes) -> str:
        """Store bytes; returns their digest. Raises: StoreUnavailable."""
        digest = names.digest_of(data)
        path = self._must(caller, digest)
        if self._renew(path) != len(data):
            await self._hop(lambda: _store(Spool(self._aside), data, path))
        return digest

    async def get(self, caller: str, digest: str) -> bytes:
        """All bytes of a blob. Raises: NotFound, StoreUnavailable."""
        path = await self.local_path(caller, digest)
        size = path.stat().st_size
        return _read(path, 0, size) if size <= NEAR_BYTES else await self._hop(lambda: _read(path, 0, size))

    async def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]:
        """The bytes from `start` on, in pieces. Raises: NotFound, StoreUnavailable."""
        path = await self.local_path(caller, digest)
        size = path.stat().st_size
        for at in range(start, size, PIECE):
            # Opened for every piece: a reader that is cancelled must not close a file that a thread still reads.
            yield _read(path, at, PIECE) if size <= NEAR_BYTES else await self._hop(lambda a=at: _read(path, a, PIECE))  # type: ignore[misc]

    async def size(self, caller: str, digest: str) -> int:
        """Bytes of a blob. Raises: NotFound."""
        return (await self.local_path(caller, digest)).stat().st_size

    async def local_path(self, caller: str, digest: str) -> Path:
        """The blob's file; it keeps its name as long as something refers to it (see `sweep`). Raises: NotFound."""
        path = self._path(caller, digest)
        if path is None or self._renew(path) is None:
            raise names.no_such(digest)
        return path

    async def sweep(self, keep: Container[str], older_than_s: float) -> Swept:
        """Remove blobs that nobody stored or asked for lately and whose `names.key` is not in `keep`."""
        return await self._hop(lambda: self._sweep(keep, time.time() - older_than_s))

    async def aclose(self) -> None:
        """Wait for what the threads do."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)

    async def _fill(self, spool: Spool, chunks: AsyncIterator[bytes], limit_bytes: int) -> None:
        pending = bytearray()
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if size > limit_bytes:
                raise PayloadTooLarge(f"The blob is over the limit of {limit_bytes} bytes.", limit_bytes=limit_bytes)
            pending += chunk
            if len(pending) >= PIECE:
                full, pending = pending, bytearray()
                await self._hop(lambda data=full: spool.write(data))  # type: ignore[misc]
        await self._hop(lambda: spool.write(pending))

    def _sweep(self, keep: Container[str], before: float) -> Swept:
        files = size = 0
        for path in self._root.glob("*/*"):
            if path.parent == self._aside or path.relative_to(self._root).as_posix() in keep:
                continue
            with self._ages, suppress(FileNotFoundError):
                found = path.stat()
                if found.st_mtime < before and stat.S_ISREG(found.st_mode):
                    path.unlink()
                    files, size = files + 1, size + found.st_size
        for path in self._aside.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - ASIDE_S:
                    path.unlink()
        return Swept(files, size)

    def _renew(self, path: Path) -> int | None:
        """Size of a blob whose age starts again now; None: there is none."""
        with self._ages:
            try:
                os.utime(path)
                return path.stat().st_size
            except FileNotFoundError:
                return None

    def _path(self, caller: str, digest: str) -> Path | None:
        key = names.key(caller, digest)
        return None if key is None else self._root / key

    def _must(self, caller: str, digest: str) -> Path:
        path = self._path(caller, digest)
        assert path is not None, f"{digest} was made here and is a digest"
        return path

    async def _hop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _store(spool: Spool, data: bytes, final: Path) -> None:
    try:
        spool.write(data)
        spool.name(final)
    finally:
        spool.drop()


def _read(path: Path, at: int, limit: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            return file.read(limit) or b""
    except OSError as error:
        raise _cannot_read(error) from error


def _cannot_read(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"The blob store cannot read: {error.strerror or error}.", errno=error.errno)
