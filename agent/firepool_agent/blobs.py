"""The pod's blob cache: content-addressed files that the broker pushes (function payloads, arguments, packages).

A pod serves one caller at a time and is never handed to another, so the cache needs no scopes. The job cannot read it: it lies in
the agent's private directory, and inputs reach the attempt as descriptors or through `unpack`.
"""

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from firepool_wire.errors import NotFound, PackageError, StoreUnavailable

#: The least recently used blobs go beyond this many bytes. Raise: fewer pushes of large packages; costs disk of the pod.
MAX_BYTES = 4 * 1024**3


class Blobs:
    """Files named by the hex of their sha256."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        #: Bytes by name, least recently used first.
        self._sizes: dict[str, int] = {}
        for entry in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            if entry.suffix:
                entry.unlink()  # half written when an earlier agent ended
            else:
                self._sizes[entry.name] = entry.stat().st_size

    def has(self, digest: str) -> bool:
        """Whether the blob is here; asking counts as use."""
        name = _name(digest)
        if name not in self._sizes:
            return False
        self._sizes[name] = self._sizes.pop(name)
        return True

    def path(self, digest: str) -> Path:
        """The blob's file. Raises: NotFound."""
        if not self.has(digest):
            raise NotFound(f"blob {digest} is not in this pod", digest=digest)
        return self._folder / _name(digest)

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Store a stream. Raises: PackageError: it is not what its digest says; StoreUnavailable: no space. Nothing stays then."""
        name = _name(digest)
        if name in self._sizes:
            return
        part = self._folder / f"{name}.{os.getpid()}-{id(chunks):x}"
        found = hashlib.sha256()
        size = 0
        try:
            with part.open("wb", buffering=0) as file:
                async for chunk in chunks:
                    file.write(chunk)
                    found.update(chunk)
                    size += len(chunk)
            if found.hexdigest() != name:
                raise PackageError(f"the bytes do not match their digest {digest}", digest=digest)
            part.rename(self._folder / name)
        except OSError as why:
            raise StoreUnavailable(f"blob {digest} cannot be stored in the pod: {why}") from None
        finally:
            part.unlink(missing_ok=True)
        self._sizes[name] = size
        self._evict()

    def _evict(self) -> None:
        total = sum(self._sizes.values())
        for name in list(self._sizes)[:-1]:
            if total <= MAX_BYTES:
                return
            (self._folder / name).unlink(missing_ok=True)
            total -= self._sizes.pop(name)


def _name(digest: str) -> str:
    """The hex of `sha256:<hex>`. Raises: PackageError: not a digest."""
    kind, _, text = digest.partition(":")
    if kind != "sha256" or len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise PackageError(f"{digest[:100]!r} is not a digest (sha256:<hex>)")
    return text
