"""Brings a database forward to the schema of `tables`, from code, with the versions that ship in the wheel.

An empty database is made at once from `schema.sql`, which is exactly what the versions make (a test compares them), and a
database that is up to date is left alone: SQLAlchemy and Alembic, which take long to import, are loaded only for a real migration.
"""

import sqlite3
from pathlib import Path

from firepool_wire.errors import StoreUnavailable

#: The newest version that this broker knows; equal to the last file of `versions` (a test compares them).
HEAD = "0001"

HERE = Path(__file__).parent


def current(connection: sqlite3.Connection) -> str | None:
    """The schema version of a database, None for an empty one."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone() is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else None


def upgrade(path: Path) -> None:
    """Make or migrate the database at `path`, all or nothing.

    Raises:
        StoreUnavailable: the schema is newer than this broker.
        sqlite3.Error: the database cannot be written.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        found = current(connection)
        if found is None:
            script = (HERE / "schema.sql").read_text(encoding="utf-8")
            connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nCOMMIT;")
    finally:
        connection.close()
    if found not in (None, HEAD):
        migrate(path, found)


def migrate(path: Path, found: str | None) -> None:
    """Run the versions behind `found` with Alembic, in one transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    known = {s.revision for s in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreUnavailable(
            f"The job store at {path} has schema {found}; this broker knows up to {HEAD}. Install the newer Firepool"
            " that wrote it, or start with another --home.",
            found=found,
            known=HEAD,
        )
    config.attributes["path"] = path
    command.upgrade(config, "head")


def snapshot(path: Path) -> str:
    """The statements that make a database like the one at `path`: the text of `schema.sql`."""
    connection = sqlite3.connect(path)
    try:
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
        statements = [" ".join(str(row[0]).split()) + ";" for row in connection.execute(query)]
        (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        row = connection.execute("SELECT id, epoch, seq, pid, since FROM leader").fetchone()
    finally:
        connection.close()
    statements.append(f"INSERT INTO alembic_version (version_num) VALUES ('{version}');")
    statements.append(f"INSERT INTO leader (id, epoch, seq, pid, since) VALUES {row};")
    return "\n".join(statements) + "\n"
