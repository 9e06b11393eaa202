"""Tokens in SQLite and in memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from firepool_broker.conformance.memory_parts import MemoryTokens
from firepool_broker.conformance.tokens import ALICE, Clock, TokenStoreConformance
from firepool_broker.core.ids import Caller, Sku
from firepool_broker.core.pools import CallerLimits, Pool, Shape
from firepool_broker.shell.ports import TokenStore
from firepool_broker.shell.rows import StoreDown
from firepool_broker.shell.store.config import Configuration
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.tokens import SqliteTokens


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "store.db")
    await database.open()
    yield database
    await database.aclose()


class TestSqliteTokens(TokenStoreConformance):
    @pytest.fixture
    async def tokens(self, database: Database, clock: Clock) -> TokenStore:
        return SqliteTokens(database, clock)


class TestMemoryTokens(TokenStoreConformance):
    @pytest.fixture
    async def tokens(self, clock: Clock) -> TokenStore:
        return MemoryTokens(clock)


async def test_the_text_of_a_token_is_nowhere_in_the_file(database: Database, tmp_path: Path) -> None:
    token = await SqliteTokens(database).create(ALICE, "laptop")
    stored = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"laptop" in stored
    assert token.encode() not in stored
    assert token.removeprefix("fp_").encode() not in stored


async def test_tokens_and_revocations_survive_a_restart(tmp_path: Path) -> None:
    database = Database(tmp_path / "store.db")
    await database.open()
    tokens = SqliteTokens(database)
    kept, revoked = await tokens.create(ALICE, "kept"), await tokens.create(ALICE, "revoked")
    await tokens.revoke("revoked", ALICE.caller)
    await database.aclose()
    database = Database(tmp_path / "store.db")
    await database.open()
    try:
        assert await SqliteTokens(database).identify(kept) == ALICE
        assert await SqliteTokens(database).identify(revoked) is None
    finally:
        await database.aclose()


async def test_no_token_is_accepted_while_the_store_is_closed(tmp_path: Path) -> None:
    with pytest.raises(StoreDown):
        await SqliteTokens(Database(tmp_path / "store.db")).identify("fp_x")


async def test_pools_and_limits_survive_a_restart(tmp_path: Path) -> None:
    pools = [
        Pool(sku=Sku("cpu")),
        Pool(sku=Sku("h200"), shape=Shape(gpus=8), preload=("numpy",), settings=(("a", "b"),)),
    ]
    database = Database(tmp_path / "store.db")
    await database.open()
    config = Configuration(database)
    assert await config.load_pools() is None
    await config.save_pools(pools[:1])
    await config.save_pools(pools)
    await config.set_limits(Caller("a"), CallerLimits(max_pods=3))
    await config.set_limits(Caller("a"), CallerLimits(max_processors=4, tag_boundary="hint"))
    assert await config.add_caller(Caller("b"))
    assert not await config.add_caller(Caller("b"))
    await database.aclose()
    database = Database(tmp_path / "store.db")
    await database.open()
    try:
        config = Configuration(database)
        assert await config.load_pools() == pools
        assert await config.limits() == {
            Caller("a"): CallerLimits(max_processors=4, tag_boundary="hint"),
            Caller("b"): CallerLimits(),
        }
    finally:
        await database.aclose()


async def test_a_token_makes_its_caller_and_person_known(database: Database) -> None:
    await SqliteTokens(database).create(ALICE, "laptop")
    config = Configuration(database)
    assert list(await config.limits()) == [ALICE.caller]
    assert await config.people(Caller(ALICE.caller)) == [ALICE.person]
