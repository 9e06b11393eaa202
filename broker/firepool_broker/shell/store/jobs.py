"""`ports.JobStore` on SQLite."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from firepool_broker.core.asks import Binding
from firepool_broker.shell.rows import JobFilter, JobRow, Lost, StoreDown, Won, Write
from firepool_broker.shell.store import query
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.reading import (
    SELECT_JOB,
    PastAttempt,
    job_row,
    jobs_by_id,
    newest_bindings,
    past_attempts,
)

T = TypeVar("T")

#: Reads of up to this many rows by key run on the event loop (some 20 µs each).
_NEAR_ROWS = 8


class SqliteJobs:
    """The jobs of one `Database`.

    Every write that wins raises its row's version by exactly one and gives it the next place in the order of changes
    (`seq`), which grows over restarts too. A re-queue clears the row's attempt, token and pods; path and reason stay.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        """Open the database. Raises: StoreDown; StoreUnavailable (another broker has it, or its schema is newer)."""
        await self._database.open()

    def write(self, write: Write) -> Awaitable[Won | Lost]:
        """Queue a write; its answer comes when its group is durable.

        Raises (when awaited):
            StoreDown: nothing was written, or (`unknown`) nobody can tell.
            BadRequest: a text is not valid Unicode.
        """
        try:
            return self._database.writer.write(write)
        except StoreDown as down:
            refused: asyncio.Future[Won | Lost] = asyncio.get_running_loop().create_future()
            refused.set_exception(down)
            return refused

    async def get(self, job: str) -> JobRow | None:
        """The row of a job."""
        found = self._near(lambda c: c.execute(f"{SELECT_JOB} WHERE id = ?", (job,)).fetchone())
        return None if found is None else job_row(found)

    async def get_many(self, jobs: Sequence[str]) -> list[JobRow]:
        """The rows of those of the jobs that exist, in the order asked for."""
        if len(jobs) <= _NEAR_ROWS:
            return self._near(lambda c: jobs_by_id(c, jobs))
        return await self._database.far(lambda c: jobs_by_id(c, jobs))

    async def by_key(self, caller: str, key: str) -> tuple[str, str] | None:
        """(job id, body digest) of an idempotency key, or None."""
        text = "SELECT id, body_digest FROM jobs WHERE caller = ? AND key = ?"
        found: tuple[str, str] | None = self._near(lambda c: c.execute(text, (caller, key)).fetchone())
        return found

    async def page(self, where: JobFilter) -> tuple[list[JobRow], str | None]:
        """A page, newest submission first, and the cursor of the next. Raises: BadRequest (not a cursor)."""
        return await self._database.far(lambda c: query.page(c, where))

    async def unfinished(self) -> list[JobRow]:
        """Every job that is not terminal, oldest submission first."""
        text = f"{SELECT_JOB} WHERE state IN ('PENDING', 'QUEUED', 'RUNNING') ORDER BY n"
        return await self._database.far(lambda c: [job_row(row) for row in c.execute(text)])

    async def bindings(self, pods: Sequence[str]) -> list[Binding]:
        """The newest committed binding of each pod that ever had one."""
        return await self._database.far(lambda c: newest_bindings(c, pods))

    async def ended_since(self, caller: str, seq: int, limit: int) -> list[JobRow]:
        """Terminal rows of a caller behind `seq`, in the order of their ends."""
        text = (
            f"{SELECT_JOB} WHERE caller = ? AND seq > ? AND state IN ('CANCELLED', 'FAILED', 'SUCCEEDED')"
            " ORDER BY seq LIMIT ?"
        )
        return await self._database.far(lambda c: [job_row(row) for row in c.execute(text, (caller, seq, limit))])

    async def newest_seq(self, caller: str) -> int:
        """The place of the caller's newest change (0: none)."""
        text = (
            "SELECT max(coalesce((SELECT max(seq) FROM jobs WHERE caller = ?1 AND state IN ('PENDING', 'QUEUED', 'RUNNING')), 0),"
            " coalesce((SELECT max(seq) FROM jobs WHERE caller = ?1 AND state IN ('CANCELLED', 'FAILED', 'SUCCEEDED')), 0))"
        )
        ((newest,),) = self._near(lambda c: c.execute(text, (caller,)).fetchall())
        return int(newest)

    async def counts(self, caller: str | None, run: str | None) -> dict[str, int]:
        """Jobs by state."""
        return await self._database.far(lambda c: query.counts(c, caller, run))

    async def attempts(self, job: str) -> list[PastAttempt]:
        """The attempts before the newest, oldest first."""
        return self._near(lambda c: past_attempts(c, job))

    async def aclose(self) -> None:
        """Commit what is queued and let go of the file."""
        await self._database.aclose()

    def _near(self, read: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return read(self._database.near)
        except sqlite3.Error as error:
            raise StoreDown(f"the job store cannot be read: {error}") from error
