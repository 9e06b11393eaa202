"""Blobs, logs and tokens in memory, for tests of other rooms; they pass the suites of this package."""

import asyncio
import hashlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from firepool_broker.shell.ports import Identity
from firepool_wire.errors import BadRequest, Conflict, NotFound, PackageError, PayloadTooLarge


class MemoryBlobs:
    """`ports.BlobStore`; `local_path` writes a temporary file."""

    def __init__(self) -> None:
        self._blobs: dict[tuple[str, str], bytes] = {}
        self._files = tempfile.TemporaryDirectory(prefix="firepool-blobs-", ignore_cleanup_errors=True)

    async def has(self, caller: str, digest: str) -> bool:
        """Whether the caller stored it."""
        return (caller, digest) in self._blobs

    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        """Store a stream; returns its digest. Raises: PayloadTooLarge, PackageError."""
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            if len(data) > limit_bytes:
                raise PayloadTooLarge(f"The blob is over the limit of {limit_bytes} bytes.", limit_bytes=limit_bytes)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if expect not in (None, digest):
            raise PackageError(f"The bytes have digest {digest}, not {expect}.")
        self._blobs[caller, digest] = bytes(data)
        return digest

    async def put_bytes(self, caller: str, data: bytes) -> str:
        """Store bytes; returns their digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self._blobs[caller, digest] = bytes(data)
        return digest

    async def get(self, caller: str, digest: str) -> bytes:
        """All bytes of a blob. Raises: NotFound."""
        try:
            return self._blobs[caller, digest]
        except KeyError:
            raise NotFound(f"There is no blob {digest[:80]} for this caller.") from None

    async def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]:
        """The bytes from `start` on. Raises: NotFound."""
        data = (await self.get(caller, digest))[start:]
        if data:
            yield data

    async def size(self, caller: str, digest: str) -> int:
        """Bytes of a blob. Raises: NotFound."""
        return len(await self.get(caller, digest))

    async def local_path(self, caller: str, digest: str) -> Path:
        """A file with the blob's bytes. Raises: NotFound."""
        data = await self.get(caller, digest)
        path = Path(self._files.name) / digest.removeprefix("sha256:")
        path.write_bytes(data)
        return path

    async def aclose(self) -> None:
        """Remove the temporary files."""
        self._files.cleanup()


@dataclass(slots=True)
class _Log:
    data: bytearray = field(default_factory=bytearray)
    event_offset: int = 0
    finished: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryLogs:
    """`ports.LogStore`."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, int], _Log] = {}

    def append(self, attempt: str, rank: int, stream: int, data: bytes, event_offset: int) -> None:
        """Add a frame's bytes, once."""
        log = self._logs.setdefault((attempt, rank), _Log())
        if event_offset > log.event_offset:
            log.data += data
            log.event_offset = event_offset
            self._change(log)

    def event_offset(self, attempt: str, rank: int) -> int:
        """Offset in the agent's event log behind the last appended frame."""
        return self._log(attempt, rank).event_offset

    def read(self, attempt: str, rank: int, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset` on."""
        return bytes(self._log(attempt, rank).data[offset : offset + limit])

    def size(self, attempt: str, rank: int) -> int:
        """Bytes so far."""
        return len(self._log(attempt, rank).data)

    def finish(self, attempt: str, rank: int) -> None:
        """Nothing follows."""
        log = self._logs.setdefault((attempt, rank), _Log())
        log.finished, log.event_offset = True, (1 << 63) - 1
        self._change(log)

    def finished(self, attempt: str, rank: int) -> bool:
        """Whether nothing follows."""
        return self._log(attempt, rank).finished

    async def more(self, attempt: str, rank: int, offset: int) -> None:
        """Return once bytes lie behind `offset` or the log is finished."""
        log = self._logs.setdefault((attempt, rank), _Log())
        while len(log.data) <= offset and not log.finished:
            await log.changed.wait()

    def _log(self, attempt: str, rank: int) -> _Log:
        return self._logs.get((attempt, rank)) or _Log()

    def _change(self, log: _Log) -> None:
        # Waiters hold the old event: setting it wakes them all, the new one is for who comes later.
        log.changed.set()
        log.changed = asyncio.Event()


class MemoryTokens:
    """`ports.TokenStore`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        #: token text → (name, identity)
        self._tokens: dict[str, tuple[str, Identity]] = {}

    async def identify(self, token: str) -> Identity | None:
        """Who the token speaks for; None: unknown, expired or revoked."""
        _, identity = self._tokens.get(token, ("", None))
        if identity is None or (identity.expires_at is not None and identity.expires_at <= self._clock()):
            return None
        return replace(identity)

    async def create(self, identity: Identity, name: str) -> str:
        """A new token's text. Raises: BadRequest, Conflict."""
        if identity.role not in ("viewer", "submitter", "team-admin", "operator"):
            raise BadRequest(f"No such role: {identity.role!r}.", field="role")
        for what, value in (("caller", identity.caller), ("person", identity.person), ("name", name)):
            if not value or not value.isprintable():
                raise BadRequest(f"A {what} is one or more printable characters, not {value!r}.", field=what)
        for token, (known, owner) in list(self._tokens.items()):
            if (known, owner.caller) == (name, identity.caller):
                if await self.identify(token) is not None:
                    raise Conflict(f"The caller {identity.caller} already has a token named {name}; revoke it first.")
                del self._tokens[token]
        token = "fp_" + secrets.token_urlsafe(32)
        self._tokens[token] = (name, identity)
        return token

    async def revoke(self, name: str, caller: str) -> bool:
        """Make the caller's token of that name void; False: there is none."""
        found = [t for t, (n, i) in self._tokens.items() if n == name and i.caller == caller]
        for token in found:
            del self._tokens[token]
        return bool(found)
