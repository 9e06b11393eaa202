"""Housekeeping: what is old goes, what is referenced stays."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from firepool_broker.conformance.stores import end, insert, running, start, together
from firepool_broker.shell.blobs import names
from firepool_broker.shell.blobs.joblogs import LogFiles
from firepool_broker.shell.blobs.local import LocalBlobs
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_broker.shell.store.retention import Ages, Forgotten, Retention
from firepool_wire.jobspec import Entrypoint, FunctionEntry, JobSpec
from firepool_wire.words import JobState


@dataclass
class House:
    """A store with everything around it, and housekeeping at a time that a test sets."""

    store: SqliteJobs
    blobs: LocalBlobs
    logs: LogFiles
    retention: Retention
    now: float = 1_000.0

    def clock(self) -> float:
        return self.now


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    database = Database(tmp_path / "store.db")
    await database.open()
    blobs, logs = LocalBlobs(tmp_path / "blobs"), LogFiles(tmp_path / "logs")
    ages = Ages(jobs_s=500.0, keys_s=100.0, blobs_s=3600.0, logs_s=3600.0)
    house: House
    retention = Retention(database, blobs, logs, names.key, ages, lambda: house.now)
    house = House(SqliteJobs(database), blobs, logs, retention)
    yield house
    await database.aclose()
    await blobs.aclose()


async def test_old_jobs_go_with_their_attempts_and_bindings(house: House) -> None:
    store = house.store
    await together(store, running("old"), running("young"), running("live"), insert("waiting"))
    await store.write(end("old", state=JobState.QUEUED, retry_count=1))
    await store.write(start("old", version=2, attempt="old:1"))
    await store.write(end("old", version=3, attempt="old:1", at=102.0))
    await store.write(end("young", at=900.0))
    assert await house.retention.run(live_pods=()) == Forgotten(jobs=1, bindings=2)
    assert await store.get("old") is None
    assert await store.attempts("old") == []
    assert [r.job for r in await store.get_many(["old", "young", "live", "waiting"])] == ["young", "live", "waiting"]
    assert await house.retention.run(live_pods=()) == Forgotten()


async def test_who_used_a_living_pod_last_is_never_forgotten(house: House) -> None:
    store = house.store
    for n in range(3):
        await store.write(running(f"j{n}"))
        await store.write(end(f"j{n}", at=102.0))
    assert (await house.retention.run(live_pods=("pod1",))).bindings == 2
    (binding,) = await store.bindings(["pod1"])
    assert binding.attempt == "j2:0"
    assert (await house.retention.run(live_pods=())).bindings == 1


async def test_a_key_is_forgotten_only_when_its_job_is_over_and_old(house: House) -> None:
    spec = {job: JobSpec(entrypoint=Entrypoint(argv=("x",)), idempotency_key=job) for job in ("over", "live", "young")}
    await together(house.store, running("over", spec=spec["over"]), running("live", spec=spec["live"]))
    await together(house.store, end("over", at=950.0), insert("young", spec=spec["young"], submitted_at=990.0))
    assert (await house.retention.run(live_pods=())).keys == 1
    found = [await house.store.by_key("alice", key) for key in ("over", "live", "young")]
    assert found == [None, ("live", "d1"), ("young", "d1")]
    assert await house.store.get("over") is not None


async def test_a_blob_stays_as_long_as_any_job_mentions_it(house: House) -> None:
    async def old_blob(data: bytes, caller: str = "alice") -> str:
        digest = await house.blobs.put_bytes(caller, data)
        os.utime(await house.blobs.local_path(caller, digest), (1, 1))
        return digest

    payload, package, result, output, nobodys = [await old_blob(b"%d" % n) for n in range(5)]
    foreign = await old_blob(b"0", "bob")
    spec = JobSpec(entrypoint=Entrypoint(function=FunctionEntry(payload=payload)), package=package)
    await house.store.write(running("j1", spec=spec))
    await house.store.write(
        end("j1", result_blob=result, facts={"outputs": [{"path": "a", "digest": output}]}, at=900.0)
    )
    forgotten = await house.retention.run(live_pods=())
    assert (forgotten.blobs, forgotten.blob_bytes) == (2, 2)
    assert not await house.blobs.has("alice", nobodys)
    assert not await house.blobs.has("bob", foreign), "another caller's mention is no reference"
    for digest in (payload, package, result, output):
        assert await house.blobs.has("alice", digest)
        os.utime(await house.blobs.local_path("alice", digest), (1, 1))
    house.now += 10_000.0
    assert (await house.retention.run(live_pods=())).blobs == 4


async def test_a_log_stays_as_long_as_its_job_is_not_over(house: House, tmp_path: Path) -> None:
    await together(house.store, running("live"), running("over"))
    await house.store.write(end("over", at=900.0))
    for job in ("live", "over"):
        house.logs.append(f"{job}:0", 0, 1, b"x" * 40_000, 40_000)
    house.logs.finish("over:0", 0)
    for path in (tmp_path / "logs").glob("*/*"):
        os.utime(path, (1, 1))
    assert (await house.retention.run(live_pods=())).logs == 1
    assert (house.logs.size("live:0", 0), house.logs.size("over:0", 0)) == (40_000, 0)


async def test_many_old_jobs_go_in_steps(house: House) -> None:
    names_ = [f"j{n}" for n in range(1_200)]
    await together(house.store, *(running(j) for j in names_))
    await together(house.store, *(end(j, at=102.0) for j in names_))
    assert (await house.retention.run(live_pods=())).jobs == 1_200
    assert await house.store.counts(None, None) == {}
