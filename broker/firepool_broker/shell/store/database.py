"""The SQLite file of one broker: its connections, the leader's lock and epoch, reads off the event loop, checkpoints.

WAL with `synchronous=FULL`: a commit is on the disk when its write is answered. Three connections: the writer's thread has
one, point reads run on the event loop with another (20 µs; a hop to a thread costs more), long reads and checkpoints have
their own in a background thread, where neither holds up a commit.

One broker per file: `flock` on `<file>.lock`, released by the kernel when the process dies. Who gets it raises the epoch,
and every writing transaction checks that the epoch is still its own: a broker that lost the lock in whatever way writes
nothing more.
"""

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from firepool_broker.shell.rows import StoreDown
from firepool_broker.shell.store import migrations
from firepool_broker.shell.store.writer import Writer
from firepool_wire.errors import StoreUnavailable

T = TypeVar("T")

#: Between checkpoints while there are commits. Raise: a longer log to read back after a crash. Lower: more disk work.
CHECKPOINT_EVERY_S = 1.0

#: Pages of log (4 KiB each) above which the writer itself completes the checkpoint, so that the log starts over: under
#: writes without a pause the background alone never catches up. Raise: rarer stalls. Lower: a smaller log file.
LOG_PAGES = 16_384


class Database:
    """The open file. Build it, `await open()`, hand it to the stores, `await aclose()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        self._lock: int | None = None
        self._writer: Writer | None = None
        self._connections: list[sqlite3.Connection] = []
        self._background: ThreadPoolExecutor | None = None
        #: Point reads, on the event loop's thread.
        self._near: sqlite3.Connection | None = None
        #: Long reads and checkpoints, in the background thread.
        self._far: sqlite3.Connection | None = None
        self._checkpointing = threading.Event()
        self._checkpointed_at = 0.0
        #: Log pages after the newest checkpoint.
        self._log_pages = 0

    async def open(self) -> None:
        """Take the lock, migrate forward, become the leader, start the writer. A second call does nothing.

        Raises:
            StoreUnavailable: another broker has the file, or its schema is newer than this broker.
            StoreDown: the file cannot be opened or written.
        """
        if self._writer is not None:
            return
        self._background = ThreadPoolExecutor(1, thread_name_prefix="firepool-store-reader")
        try:
            connection, seq = await self.aside(self._open)
        except BaseException:
            self._background.shutdown()
            self._release()
            raise
        self._writer = Writer(connection, self.epoch, seq, self._after_commit)
        self._writer.start()

    @property
    def writer(self) -> Writer:
        """The thread that commits. Raises: StoreDown when the store is not open."""
        if self._writer is None:
            raise StoreDown("the job store is not open")
        return self._writer

    @property
    def near(self) -> sqlite3.Connection:
        """Connection for point reads on the event loop. Raises: StoreDown when the store is not open."""
        if self._near is None:
            raise StoreDown("the job store is not open")
        return self._near

    async def far(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Run a long read in the background thread. Raises: StoreDown."""
        if self._far is None:
            raise StoreDown("the job store is not open")
        connection = self._far
        try:
            return await self.aside(lambda: read(connection))
        except sqlite3.Error as error:
            raise StoreDown(f"the job store cannot be read: {error}") from error

    async def aside(self, work: Callable[[], T]) -> T:
        """Run blocking work in the background thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._background, work)

    async def aclose(self) -> None:
        """Commit what is queued, write the log back, let go of the file."""
        if self._writer is not None:
            await self._writer.stop()
            self._writer = None
        if self._background is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._background.shutdown)
        self._release()

    def _open(self) -> tuple[sqlite3.Connection, int]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            # 0600: specs carry environment variables. The log and its index get the file's own mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            migrations.upgrade(self.path)
            writing, self._near, self._far = (self._connect() for _ in range(3))
            ((self.epoch, seq),) = writing.execute(
                "UPDATE leader SET epoch = epoch + 1, pid = ?, since = ? WHERE id = 1 RETURNING epoch, seq",
                (os.getpid(), time.time()),
            ).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise StoreDown(f"the job store at {self.path} cannot be opened: {error}") from error
        return writing, seq

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=10.0
        )
        self._connections.append(connection)
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            # Checkpoints are ours: SQLite's own would make one commit in a hundred some ms longer.
            "wal_autocheckpoint=0",
            f"journal_size_limit={LOG_PAGES * 4096}",
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def _after_commit(self) -> None:
        """In the writer's thread."""
        if self._log_pages >= LOG_PAGES and not self._checkpointing.is_set():
            self._checkpoint(self._connections[0])  # the writer's own; the next commit starts the log over
            self._log_pages = 0
        if time.monotonic() - self._checkpointed_at < CHECKPOINT_EVERY_S or self._checkpointing.is_set():
            return
        self._checkpointed_at = time.monotonic()
        self._checkpointing.set()
        try:
            assert self._background is not None
            self._background.submit(self._checkpoint_far)
        except RuntimeError:  # closing: the last connection to close writes the log back
            self._checkpointing.clear()

    def _checkpoint_far(self) -> None:
        try:
            assert self._far is not None
            self._checkpoint(self._far)
        finally:
            self._checkpointing.clear()

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        # A checkpoint that fails (disk full, reader in the way) loses nothing: the log keeps what it has, and grows.
        with suppress(sqlite3.Error):
            ((_, self._log_pages, _),) = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _release(self) -> None:
        self._near = self._far = None
        while self._connections:
            self._connections.pop().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: Path) -> int:
    """Lock the sidecar file. Not inherited over exec, so pods that outlive the broker do not keep it."""
    handle = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise StoreUnavailable(
            f"Another broker (process {holder}) has the job store at {path}. Use that one (`firepool status`), stop it, or"
            " start with another --home.",
            holder=holder,
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
