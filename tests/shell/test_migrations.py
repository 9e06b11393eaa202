"""The schema: what the classes say, what the versions make, what the snapshot makes, and what is refused."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from firepool_broker.shell.rows import StoreDown
from firepool_broker.shell.store import migrations
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.tables import SQLModel
from firepool_wire.errors import StoreUnavailable


def schema(path: Path) -> set[str]:
    """Tables and indexes, but Alembic's own."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND tbl_name != 'alembic_version'"
        )
        return {" ".join(str(sql).split()) for (sql,) in rows}
    finally:
        connection.close()


def test_the_snapshot_is_what_the_versions_make(tmp_path: Path) -> None:
    migrations.migrate(tmp_path / "by-versions.db", None)
    made = migrations.snapshot(tmp_path / "by-versions.db")
    assert made == (migrations.HERE / "schema.sql").read_text(), "write migrations.snapshot's text to schema.sql"
    migrations.upgrade(tmp_path / "by-snapshot.db")
    assert migrations.snapshot(tmp_path / "by-snapshot.db") == made


def test_the_versions_make_what_the_classes_say(tmp_path: Path) -> None:
    migrations.migrate(tmp_path / "by-versions.db", None)
    engine = create_engine(f"sqlite:///{tmp_path / 'by-classes.db'}")
    SQLModel.metadata.create_all(engine)
    engine.dispose()
    assert schema(tmp_path / "by-versions.db") == schema(tmp_path / "by-classes.db")


def test_the_head_is_the_last_version() -> None:
    last = sorted((migrations.HERE / "versions").glob("[0-9]*.py"))[-1]
    assert last.name.split("_")[0] == migrations.HEAD


def test_a_database_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    migrations.upgrade(path)
    before = path.read_bytes()
    migrations.upgrade(path)
    assert path.read_bytes() == before


async def test_a_schema_of_a_newer_broker_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    migrations.upgrade(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match=r"9999.*0001"):
        await Database(path).open()
    assert path.read_bytes() == before


async def test_a_database_of_somebody_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE jobs (mine TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreDown, match="already exists"):
        await Database(path).open()
    assert path.read_bytes() == before
