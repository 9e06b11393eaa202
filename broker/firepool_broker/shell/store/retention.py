"""Forgets what is old and referenced by nothing: jobs with their attempts and bindings, idempotency keys, blobs, logs.

What is kept whatever its age: jobs that are not terminal; the newest binding of every pod that lives (it says who used the
pod last); blobs that any remaining job mentions; logs of jobs that are not over. Work goes in small steps, so that no commit
waits long behind it.
"""

import re
import sqlite3
import time
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Any, Protocol

from firepool_broker.shell.store.database import Database

DAY_S = 86_400.0

#: Rows of one deleting transaction: some 5 ms.
_STEP = 500

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Seconds after which things are forgotten. Raise: more disk. Lower: less to look back on."""

    #: Terminal jobs, since their end.
    jobs_s: float = 90 * DAY_S
    #: Logs of jobs that are over, since their last byte.
    logs_s: float = 7 * DAY_S
    #: Blobs that no job mentions, since they were last stored or asked for. At least the longest queue timeout.
    blobs_s: float = 2 * DAY_S
    #: Idempotency keys, since submission.
    keys_s: float = DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What one run removed."""

    jobs: int = 0
    keys: int = 0
    bindings: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    logs: int = 0


class Sweeps(Protocol):
    """A blob store that can be swept; keys are made by the `name` that comes with it."""

    async def sweep(self, keep: Container[str], older_than_s: float) -> Any:
        """Remove what is old and not in `keep`; the answer has `files` and `bytes`."""
        ...


class SweepsLogs(Protocol):
    """A log store that can be swept, in a thread."""

    def sweep(self, keep: Container[str], older_than_s: float) -> int:
        """Remove old logs of jobs that are not in `keep`."""
        ...


@dataclass(frozen=True, slots=True)
class Retention:
    """One broker's housekeeping; `run` is called every hour or so."""

    database: Database
    blobs: Sweeps
    logs: SweepsLogs
    #: (caller, digest) → the key by which the blob store knows the blob.
    key: Callable[[str, str], str | None]
    ages: Ages = Ages()
    clock: Callable[[], float] = time.time

    async def run(self, live_pods: Collection[str]) -> Forgotten:
        """Forget everything that is due. Raises: StoreDown, StoreUnavailable: the rest is done next time."""
        now = self.clock()
        keys = await self._steps(lambda c: _forget_keys(c, now - self.ages.keys_s))
        jobs = await self._steps(lambda c: _forget_jobs(c, now - self.ages.jobs_s))
        bindings = await self._forget_bindings(live_pods)
        unfinished = await self.database.far(_unfinished)
        logs = await self.database.aside(lambda: self.logs.sweep(unfinished, self.ages.logs_s))
        keep = await self.database.far(lambda c: _mentioned(c, self.key))
        swept = await self.blobs.sweep(keep, self.ages.blobs_s)
        return Forgotten(jobs=jobs, keys=keys, bindings=bindings, blobs=swept.files, blob_bytes=swept.bytes, logs=logs)

    async def _steps(self, step: Callable[[sqlite3.Connection], int]) -> int:
        total = 0
        while done := await self.database.writer.do(step):
            total += done
        return total

    async def _forget_bindings(self, live_pods: Collection[str]) -> int:
        old = await self.database.far(lambda c: _old_bindings(c, frozenset(live_pods)))
        for at in range(0, len(old), _STEP):
            part = old[at : at + _STEP]
            await self.database.writer.do(lambda c, p=part: _delete_bindings(c, p))  # type: ignore[misc]
        return len(old)


def _forget_keys(connection: sqlite3.Connection, before: float) -> int:
    return connection.execute(
        "UPDATE jobs SET key = NULL WHERE n IN (SELECT n FROM jobs WHERE key IS NOT NULL AND submitted_at < ?"
        " AND state IN ('CANCELLED', 'FAILED', 'SUCCEEDED') LIMIT ?)",
        (before, _STEP),
    ).rowcount


def _forget_jobs(connection: sqlite3.Connection, before: float) -> int:
    due = connection.execute(
        "SELECT n, id FROM jobs WHERE state IN ('CANCELLED', 'FAILED', 'SUCCEEDED') AND updated_at < ? LIMIT ?",
        (before, _STEP),
    ).fetchall()
    for n, job in due:
        connection.execute("DELETE FROM attempts WHERE id > ? AND id < ? AND job = ?", (f"{job}:", f"{job};", job))
        connection.execute("DELETE FROM jobs WHERE n = ?", (n,))
    return len(due)


def _old_bindings(connection: sqlite3.Connection, live_pods: frozenset[str]) -> list[int]:
    """Bindings of jobs that are forgotten, but the newest of a pod that lives."""
    rows = connection.execute(
        "SELECT n, pod, n = (SELECT max(n) FROM bindings AS newer WHERE newer.pod = b.pod) FROM bindings AS b"
        " WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = b.job)"
    )
    return [n for n, pod, newest in rows if not (newest and pod in live_pods)]


def _delete_bindings(connection: sqlite3.Connection, rows: list[int]) -> int:
    return connection.executemany("DELETE FROM bindings WHERE n = ?", [(n,) for n in rows]).rowcount


def _unfinished(connection: sqlite3.Connection) -> frozenset[str]:
    rows = connection.execute("SELECT id FROM jobs WHERE state IN ('PENDING', 'QUEUED', 'RUNNING')")
    return frozenset(job for (job,) in rows)


def _mentioned(connection: sqlite3.Connection, key: Callable[[str, str], str | None]) -> frozenset[str]:
    """Every digest that a job's row mentions anywhere: also in fields that a later version adds."""
    keep: set[str] = set()
    rows = connection.execute(
        "SELECT caller, coalesce(result_blob, ''), spec, facts FROM jobs"
        " UNION ALL SELECT caller, '', '', attempts.facts FROM attempts JOIN jobs ON jobs.id = attempts.job"
    )
    for caller, *texts in rows:
        for text in texts:
            keep.update(k for d in _DIGEST.findall(text) if (k := key(caller, d)) is not None)
    return frozenset(keep)
