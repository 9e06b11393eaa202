"""What a blob store must do, in sentences.

A test file subclasses `BlobStoreConformance` and provides the async fixture `blobs`: an empty store.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from firepool_broker.shell.ports import BlobStore
from firepool_wire.errors import NotFound, PackageError, PayloadTooLarge

MIB = 1 << 20


def digest_of(data: bytes) -> str:
    """The digest as the port writes it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


async def pieces(data: bytes, size: int = 60_000) -> AsyncIterator[bytes]:
    """The bytes as they come from a network."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(blobs: BlobStore, caller: str, digest: str, start: int = 0) -> bytes:
    """All that `stream` yields."""
    return b"".join([piece async for piece in blobs.stream(caller, digest, start)])


class BlobStoreConformance:
    """Sentences about `ports.BlobStore`."""

    @pytest.mark.parametrize("size", [0, 1, 300_000, 3 * MIB + 7])
    async def test_what_goes_in_comes_out(self, blobs: BlobStore, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        digest = await blobs.put("alice", pieces(data), None, size)
        assert digest == digest_of(data)
        assert await blobs.get("alice", digest) == data
        assert await read(blobs, "alice", digest) == data
        assert await read(blobs, "alice", digest, max(0, size - 5)) == data[max(0, size - 5) :]
        assert await blobs.size("alice", digest) == size
        assert (await blobs.local_path("alice", digest)).read_bytes() == data

    @pytest.mark.parametrize("size", [0, 100, 2 * MIB])
    async def test_bytes_at_hand_are_stored_under_the_same_name(self, blobs: BlobStore, size: int) -> None:
        data = b"z" * size
        digest = await blobs.put_bytes("alice", data)
        assert digest == digest_of(data) == await blobs.put("alice", pieces(data), digest, size)
        assert await blobs.put_bytes("alice", data) == digest
        assert await blobs.get("alice", digest) == data

    async def test_a_caller_learns_nothing_of_anothers_blobs(self, blobs: BlobStore) -> None:
        digest = await blobs.put_bytes("alice", b"secret")
        assert not await blobs.has("bob", digest)
        for call in (blobs.get, blobs.size, blobs.local_path):
            with pytest.raises(NotFound):
                await call("bob", digest)
        with pytest.raises(NotFound):
            await read(blobs, "bob", digest)
        assert await blobs.has("alice", digest)

    @pytest.mark.parametrize("caller", ["..", "../bob", "a/b", "", "x" * 500, "team\x00", "Ω"])
    async def test_a_callers_name_is_never_a_path(self, blobs: BlobStore, caller: str) -> None:
        digest = await blobs.put_bytes(caller, b"data")
        assert await blobs.get(caller, digest) == b"data"
        assert not await blobs.has("bob", digest)

    @pytest.mark.parametrize(
        "digest",
        [
            "",
            "sha256:",
            "sha256:" + "A" * 64,
            "md5:" + "a" * 64,
            "sha256:../../x",
            "sha256:" + "a" * 63 + "\n",
            "a" * 64,
        ],
    )
    async def test_what_is_no_digest_names_nothing(self, blobs: BlobStore, digest: str) -> None:
        assert not await blobs.has("alice", digest)
        with pytest.raises(NotFound):
            await blobs.get("alice", digest)
        with pytest.raises(PackageError):
            await blobs.put("alice", pieces(b"data"), digest, 100)

    async def test_bytes_that_do_not_match_their_digest_are_refused_and_not_kept(self, blobs: BlobStore) -> None:
        with pytest.raises(PackageError):
            await blobs.put("alice", pieces(b"evil"), digest_of(b"good"), 100)
        assert not await blobs.has("alice", digest_of(b"good"))
        assert not await blobs.has("alice", digest_of(b"evil"))

    @pytest.mark.parametrize("size", [101, 3 * MIB])
    async def test_a_stream_over_the_limit_is_cut_off_and_not_kept(self, blobs: BlobStore, size: int) -> None:
        taken = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal taken
            while True:
                taken += 50
                yield b"x" * 50

        with pytest.raises(PayloadTooLarge) as refused:
            await blobs.put("alice", endless(), None, size)
        assert refused.value.details["limit_bytes"] == size
        assert taken <= size + 50, "not a byte more than needed was read"
        assert not await blobs.has("alice", digest_of(b"x" * taken))

    async def test_a_sender_that_breaks_off_leaves_nothing(self, blobs: BlobStore) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"x" * (2 * MIB)
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await blobs.put("alice", broken(), None, 10 * MIB)
        assert not await blobs.has("alice", digest_of(b"x" * (2 * MIB)))

    async def test_the_same_blob_stored_many_times_at_once_is_one_blob(self, blobs: BlobStore) -> None:
        data = b"y" * (MIB + 1)
        found = await asyncio.gather(*(blobs.put("alice", pieces(data), None, 2 * MIB) for _ in range(8)))
        assert set(found) == {digest_of(data)}
        assert await blobs.get("alice", found[0]) == data
