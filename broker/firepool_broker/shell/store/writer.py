"""The thread that commits.

What is asked for while a commit is under way gathers and shares the next one (group commit); nothing waits for a timer. A
group is handed over once per turn of the event loop and answered with one call back into it, so that a busy loop and this
thread meet twice per group, not twice per write. The broker sets `sys.setswitchinterval(1e-4)`: with CPython's 5 ms a commit
beside a busy loop takes tens of milliseconds.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from firepool_broker.shell.rows import Lost, StoreDown, Won, Write
from firepool_broker.shell.store import group as groups
from firepool_broker.shell.store import statements
from firepool_broker.shell.store.entries import Entry, Task, entry

T = TypeVar("T")

#: Most writes of one transaction. Raise: fewer commits under a flood. Lower: an earlier answer for the first of the group.
MOST_WRITES = 256

#: Errors of a COMMIT after which the group is known not to be there: nothing was synced as committed.
_KNOWN = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM})

Outcome = tuple["asyncio.Future[Any]", Any]


class Writer:
    """Owns the writing connection from `start` to `stop`. `write` and `do` belong to the event loop's thread."""

    def __init__(self, connection: sqlite3.Connection, epoch: int, seq: int, committed: Callable[[], None]) -> None:
        self._connection = connection
        self._epoch = epoch
        #: Last place given out in the order of changes; the thread's own.
        self._seq = seq
        #: Called in the thread after each commit (checkpoints).
        self._committed = committed
        self._loop = asyncio.get_running_loop()
        self._gathering: list[Entry | Task] = []
        self._queue: SimpleQueue[list[Entry | Task] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="firepool-store-writer", daemon=True)
        self._stopping = False

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def write(self, write: Write) -> "asyncio.Future[Won | Lost]":
        """Queue a job write. The awaitable raises BadRequest or TypeError (see `entries`), or StoreDown."""
        future: asyncio.Future[Won | Lost] = self._loop.create_future()
        try:
            self._gather(entry(write, future))
        except Exception as error:  # noqa: BLE001  every refusal goes to the one who awaits the answer
            future.set_exception(error)
        return future

    def do(self, work: Callable[[sqlite3.Connection], T]) -> "asyncio.Future[T]":
        """Queue other writing work, in order with the writes; it sees and may change everything. Raises: StoreDown."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._gather(Task(work, future))
        return future

    async def stop(self) -> None:
        """Commit what is queued, then end the thread."""
        self._stopping = True
        self._hand_over()
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        # The thread's last answers were posted before it ended: one turn of the loop delivers them.
        await asyncio.sleep(0)

    def _gather(self, item: Entry | Task) -> None:
        if self._stopping:
            raise StoreDown("the job store is closed")
        if not self._gathering:
            # At the end of this turn: all that this turn asks for goes over together.
            self._loop.call_soon(self._hand_over)
        self._gathering.append(item)

    def _hand_over(self) -> None:
        if self._gathering:
            self._queue.put(self._gathering)
            self._gathering = []

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backlog: list[Entry | Task] = []
        open_ = True
        while open_ or backlog:
            if not backlog:
                batch = self._queue.get()
                open_ = batch is not None
                backlog = batch or []
            with suppress(Empty):
                while open_ and len(backlog) < MOST_WRITES:
                    batch = self._queue.get_nowait()
                    open_ = batch is not None
                    backlog += batch or []
            backlog = self._serve(backlog)

    def _serve(self, backlog: list[Entry | Task]) -> list[Entry | Task]:
        """Commit the first group of the backlog (a task is a group of its own); returns the rest."""
        if not backlog:
            return backlog
        first = backlog[0]
        if isinstance(first, Task):
            self._post(self._commit_task(first))
            return backlog[1:]
        size = next((i for i, item in enumerate(backlog[:MOST_WRITES]) if isinstance(item, Task)), MOST_WRITES)
        self._post(self._commit_group([item for item in backlog[:size] if isinstance(item, Entry)]))
        return backlog[size:]

    def _commit_group(self, group: Sequence[Entry]) -> list[Outcome]:
        try:
            answers = self._transaction(lambda c: groups.all_at_once(c, group, self._seq + 1), len(group))
            if answers is None:
                answers = self._transaction(lambda c: groups.one_by_one(c, group, self._seq + 1), len(group))
        except StoreDown as down:
            return [(item.future, down) for item in group]
        assert answers is not None
        return [(item.future, answer) for item, answer in zip(group, answers, strict=True)]

    def _commit_task(self, task: Task) -> list[Outcome]:
        try:
            return [(task.future, self._transaction(task.work, 0))]
        except Exception as error:  # noqa: BLE001  the task's own error belongs to the one who asked
            return [(task.future, error)]

    def _transaction(self, work: Callable[[sqlite3.Connection], T], places: int) -> T:
        """Run `work` in a fenced transaction that takes `places` of the order; None from it rolls back.

        Raises:
            StoreDown: the store cannot write, or another broker leads; nothing was written (or it is `unknown`).
        """
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            fenced = connection.execute(statements.FENCE, (self._seq + places, self._epoch)).rowcount
            if fenced != 1:
                raise StoreDown("another broker leads this job store now")
            result = work(connection)
            if result is None and places:
                connection.execute("ROLLBACK")
                return result
        except BaseException as error:
            self._roll_back()
            if isinstance(error, sqlite3.OperationalError | sqlite3.DatabaseError):
                raise StoreDown(f"the job store cannot write: {error}") from error
            raise
        self._commit()
        self._seq += places
        self._committed()
        return result

    def _commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            # A sync that failed leaves the commit record in the log, where a crash could still bring it to life. The next
            # transaction overwrites it: once that is through, this one is known to be gone.
            known = error.sqlite_errorcode & 0xFF in _KNOWN or self._overwrite()
            raise StoreDown(f"the job store cannot commit: {error}", unknown=not known) from error

    def _overwrite(self) -> bool:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(statements.FENCE, (self._seq, self._epoch))
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            self._roll_back()
            return False
        return True

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors.
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _post(self, outcomes: list[Outcome]) -> None:
        with suppress(RuntimeError):  # the loop was closed without `stop`: nobody is left to hear it
            self._loop.call_soon_threadsafe(_deliver, outcomes)


def _deliver(outcomes: list[Outcome]) -> None:
    for future, outcome in outcomes:
        if future.done():  # the one who asked was cancelled; the write stands
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
