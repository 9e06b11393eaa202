"""`ports.BlobStore` in an object store (S3, GCS, Azure) through obstore, with a local directory in front.

Bytes come in through the directory, where their digest is verified, and go on to the object store; reads fetch into the
directory, verified again, and are served from it. The object store is the truth, the directory a cache that may be emptied.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Container
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore

from firepool_broker.shell.blobs import names
from firepool_broker.shell.blobs.local import LocalBlobs, Swept
from firepool_wire.errors import StoreUnavailable

T = TypeVar("T")


class RemoteBlobs:
    """Blobs in `store`, below `prefix`; `cache` is its own directory's and closed with it."""

    def __init__(self, store: ObjectStore, cache: LocalBlobs, prefix: str = "blobs") -> None:
        self._store = store
        self._cache = cache
        self._prefix = prefix.strip("/")
        self._started = time.time()
        #: Key → when the store last said "it is there" to someone who may rely on it.
        self._promised: dict[str, float] = {}

    async def has(self, caller: str, digest: str) -> bool:
        """Whether the caller stored it. A yes renews its age. Raises: StoreUnavailable."""
        key = names.key(caller, digest)
        return key is not None and await self._length(key) is not None

    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        """Store a stream; returns its digest. Raises: PayloadTooLarge, PackageError, StoreUnavailable."""
        digest = await self._cache.put(caller, chunks, expect, limit_bytes)
        await self._send(caller, digest)
        return digest

    async def put_bytes(self, caller: str, data: bytes) -> str:
        """Store bytes; returns their digest. Raises: StoreUnavailable."""
        digest = await self._cache.put_bytes(caller, data)
        await self._send(caller, digest)
        return digest

    async def get(self, caller: str, digest: str) -> bytes:
        """All bytes of a blob. Raises: NotFound, StoreUnavailable."""
        await self.local_path(caller, digest)
        return await self._cache.get(caller, digest)

    async def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]:
        """The bytes from `start` on, in pieces. Raises: NotFound, StoreUnavailable."""
        await self.local_path(caller, digest)
        async for piece in self._cache.stream(caller, digest, start):
            yield piece

    async def size(self, caller: str, digest: str) -> int:
        """Bytes of a blob. Raises: NotFound, StoreUnavailable."""
        key = names.key(caller, digest)
        length = None if key is None else await self._length(key)
        if length is None:
            raise names.no_such(digest)
        return length

    async def local_path(self, caller: str, digest: str) -> Path:
        """The blob's file in the cache, fetched if need be. Raises: NotFound, PackageError (the store's bytes are not
        what they were), StoreUnavailable."""
        key = names.key(caller, digest)
        if key is None:
            raise names.no_such(digest)
        if not await self._cache.has(caller, digest):
            length = await self._length(key)
            if length is None:
                raise names.no_such(digest)
            await self._cache.put(caller, self._fetch(key), digest, length)
        return await self._cache.local_path(caller, digest)

    async def sweep(self, keep: Container[str], older_than_s: float) -> Swept:
        """Remove blobs that nobody stored or asked for lately and whose `names.key` is not in `keep`; trims the cache too.

        Does nothing in the broker's first `older_than_s`: what an earlier broker promised is not known.
        """
        before = time.time() - older_than_s
        await self._cache.sweep((), older_than_s)
        self._promised = {k: at for k, at in self._promised.items() if at >= before}
        files = size = 0
        if self._started >= before:
            return Swept()
        try:
            async for batch in obstore.list(self._store, prefix=self._prefix):
                for found in batch:
                    key = found["path"].removeprefix(f"{self._prefix}/")
                    if key in keep or key in self._promised or found["last_modified"].timestamp() >= before:
                        continue
                    await obstore.delete_async(self._store, found["path"])
                    files, size = files + 1, size + found["size"]
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error
        return Swept(files, size)

    async def aclose(self) -> None:
        """Close the cache."""
        await self._cache.aclose()

    async def _send(self, caller: str, digest: str) -> None:
        key = names.key(caller, digest)
        assert key is not None
        if await self._length(key) is None:
            path = await self._cache.local_path(caller, digest)
            await _typed(obstore.put_async(self._store, self._at(key), path))
            self._promised[key] = time.time()

    async def _fetch(self, key: str) -> AsyncIterator[bytes]:
        found = await _typed(obstore.get_async(self._store, self._at(key)))
        try:
            async for piece in found.stream():
                yield bytes(piece)
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error

    async def _length(self, key: str) -> int | None:
        try:
            found = await obstore.head_async(self._store, self._at(key))
        except (NotFoundError, FileNotFoundError):  # the second from a local directory behind obstore
            return None
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error
        self._promised[key] = time.time()
        return found["size"]

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}"


async def _typed(call: Awaitable[T]) -> T:
    try:
        return await call
    except (BaseError, OSError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"The object store does not answer: {type(error).__name__}: {str(error)[:300]}")
