"""Run by Alembic: one connection, one transaction, to the database that `upgrade` names."""

from alembic import context
from sqlalchemy import create_engine, event
from sqlmodel import SQLModel

import firepool_broker.shell.store.tables  # noqa: F401  fills the metadata


def _run() -> None:
    engine = create_engine(f"sqlite:///{context.config.attributes['path']}")

    # pysqlite commits before DDL unless it is told to leave transactions alone: a migration must be all or nothing.
    @event.listens_for(engine, "connect")
    def _manual(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

    @event.listens_for(engine, "begin")
    def _begin(connection: object) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # type: ignore[attr-defined]

    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=SQLModel.metadata, transactional_ddl=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


_run()
