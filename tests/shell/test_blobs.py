"""Blob stores: a directory, an object store behind obstore, memory."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore

from firepool_broker.conformance.blobs import MIB, BlobStoreConformance, digest_of, pieces
from firepool_broker.conformance.memory_parts import MemoryBlobs
from firepool_broker.shell.blobs import names
from firepool_broker.shell.blobs.local import LocalBlobs
from firepool_broker.shell.blobs.remote import RemoteBlobs
from firepool_broker.shell.ports import BlobStore
from firepool_wire.errors import PackageError, PayloadTooLarge, StoreUnavailable


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalBlobs]:
    blobs = LocalBlobs(tmp_path / "blobs")
    yield blobs
    await blobs.aclose()


class TestLocalBlobs(BlobStoreConformance):
    @pytest.fixture
    async def blobs(self, local: LocalBlobs) -> BlobStore:
        return local


class TestRemoteBlobs(BlobStoreConformance):
    @pytest.fixture
    async def blobs(self, local: LocalBlobs) -> BlobStore:
        return RemoteBlobs(MemoryStore(), local)


class TestMemoryBlobs(BlobStoreConformance):
    @pytest.fixture
    async def blobs(self) -> AsyncIterator[BlobStore]:
        blobs = MemoryBlobs()
        yield blobs
        await blobs.aclose()


def files(root: Path) -> list[Path]:
    """Every file below, uploads under way included."""
    return [p for p in root.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("fault", "error"), [("digest", PackageError), ("limit", PayloadTooLarge), ("sender", ConnectionResetError)]
)
async def test_a_refused_upload_leaves_no_file(
    local: LocalBlobs, tmp_path: Path, fault: str, error: type[Exception]
) -> None:
    async def sent() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * MIB
        if fault == "sender":
            raise ConnectionResetError

    limit = 3 * MIB if fault == "limit" else 100 * MIB
    with pytest.raises(error):
        await local.put("alice", sent(), digest_of(b"other"), limit)
    assert files(tmp_path) == []


async def test_a_cancelled_upload_leaves_no_file(local: LocalBlobs, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield b"x" * (3 * MIB)
        begun.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(local.put("alice", stalls(), None, 100 * MIB))
    async with asyncio.timeout(10):
        await begun.wait()
        assert len(files(tmp_path)) == 1
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
    assert files(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
async def test_a_full_disk_is_a_typed_error_and_leaves_nothing(small_disk: Path) -> None:
    blobs = LocalBlobs(small_disk / "blobs")
    try:
        first = await blobs.put_bytes("alice", b"a" * MIB)
        for attempt in (
            blobs.put("alice", pieces(b"b" * (6 * MIB)), None, 100 * MIB),
            blobs.put_bytes("alice", b"c" * (6 * MIB)),
        ):
            with pytest.raises(StoreUnavailable):
                await attempt
        assert [p.stat().st_size for p in files(small_disk)] == [MIB]
        assert await blobs.get("alice", first) == b"a" * MIB
        await blobs.put_bytes("alice", b"d" * MIB)
    finally:
        await blobs.aclose()


async def test_a_sweep_removes_only_what_is_old_and_referenced_by_nothing(local: LocalBlobs, tmp_path: Path) -> None:
    old, kept, asked, young = [await local.put_bytes("alice", name) for name in (b"old", b"kept", b"asked", b"young")]
    for digest in (old, kept, asked):
        os.utime(await local.local_path("alice", digest), (1, 1))
    assert await local.has("alice", asked), "a yes is a promise that it stays for a while"
    key = names.key("alice", kept)
    assert key is not None
    swept = await local.sweep({key}, 3600)
    assert (swept.files, swept.bytes) == (1, 3)
    assert [await local.has("alice", d) for d in (old, kept, asked, young)] == [False, True, True, True]


async def test_uploads_of_a_killed_broker_are_swept_away(tmp_path: Path, local: LocalBlobs) -> None:
    left = tmp_path / "blobs" / "aside" / "1-1"
    under_way = tmp_path / "blobs" / "aside" / "1-2"
    for path in (left, under_way):
        path.write_bytes(b"half")
    os.utime(left, (1, 1))
    await local.sweep((), 0.0)
    assert files(tmp_path) == [under_way]


async def test_files_are_readable_by_their_owner_only(local: LocalBlobs, tmp_path: Path) -> None:
    await local.put_bytes("alice", b"secret")
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600


# -- an object store ------------------------------------------------------------------------------------------------------


async def test_an_object_store_outlives_the_cache(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s3", mkdir=True)
    first = RemoteBlobs(store, LocalBlobs(tmp_path / "cache1"))
    data = b"w" * (3 * MIB)
    digest = await first.put("alice", pieces(data), None, 10 * MIB)
    await first.aclose()
    second = RemoteBlobs(store, LocalBlobs(tmp_path / "cache2"))
    try:
        assert await second.has("alice", digest)
        assert not await second.has("bob", digest)
        assert await second.size("alice", digest) == len(data)
        assert await second.get("alice", digest) == data
    finally:
        await second.aclose()


async def test_bytes_that_an_object_store_changed_are_not_served(tmp_path: Path, local: LocalBlobs) -> None:
    store = LocalStore(tmp_path / "s3", mkdir=True)
    writer = RemoteBlobs(store, LocalBlobs(tmp_path / "cache1"))
    digest = await writer.put_bytes("alice", b"good")
    await writer.aclose()
    (stored,) = files(tmp_path / "s3")
    stored.write_bytes(b"evil")
    with pytest.raises(PackageError):
        await RemoteBlobs(store, local).get("alice", digest)


async def test_an_object_store_that_does_not_answer_is_a_typed_error(tmp_path: Path, local: LocalBlobs) -> None:
    store = LocalStore(tmp_path / "s3", mkdir=True)
    blobs = RemoteBlobs(store, local)
    (tmp_path / "s3").rmdir()
    (tmp_path / "s3").write_bytes(b"not a directory")
    with pytest.raises(StoreUnavailable):
        await blobs.put_bytes("alice", b"data")


async def test_an_object_store_is_swept_only_by_a_broker_that_knows_what_was_promised(tmp_path: Path) -> None:
    store = MemoryStore()
    blobs = RemoteBlobs(store, LocalBlobs(tmp_path / "cache"))
    try:
        old, kept = await blobs.put_bytes("alice", b"old"), await blobs.put_bytes("alice", b"kept")
        key = names.key("alice", kept)
        assert key is not None
        assert (await blobs.sweep({key}, 3600)).files == 0
        before = time.time()
        while time.time() <= before:  # a clock tick, so that everything is older than zero seconds
            await asyncio.sleep(0)
        assert (await blobs.sweep({key}, 0.0)).files == 1
        assert [await blobs.has("alice", d) for d in (old, kept)] == [False, True]
    finally:
        await blobs.aclose()
