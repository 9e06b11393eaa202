"""The job store on SQLite, and the one in memory that it is compared with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from firepool_broker.conformance.memory import MemoryJobs
from firepool_broker.conformance.stores import JobStoreConformance
from firepool_broker.shell.ports import JobStore
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs


class TestSqliteJobs(JobStoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[JobStore]:
        store = SqliteJobs(Database(tmp_path / "store.db"))
        await store.open()
        yield store
        await store.aclose()


class TestMemoryJobs(JobStoreConformance):
    @pytest.fixture
    async def store(self) -> JobStore:
        return MemoryJobs()
