"""The SQL of the hot path: a whole run of like writes as one statement.

Why set-shaped when SQLite is in-process and there is no round trip to save: the GIL. `executemany` gives it up and takes it
back once per row; next to a busy event loop a group of 64 took 24 ms that way and 3 ms as one statement (switch interval
0.1 ms; quiet: 4.3 and 1.4 ms). Runs are cut into powers of two, so that a few prepared statements serve every length.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

#: A row of parameters.
Row = tuple[Any, ...]

#: Most rows of one statement; 28 columns of 64 rows are far below SQLite's 32,766 variables.
MOST_ROWS = 64

JOB_COLUMNS = (
    "n, id, caller, person, state, version, seq, retry_count, infra_retries, cancel_requested, submitted_at, updated_at,"
    " sku, queue, run, key, body_digest, attempt, token, path, why_not_warmer, pods, retire_after, labels, result_blob,"
    " spec, facts, result"
)


@dataclass(frozen=True)
class Statement:
    """A statement over rows of parameters. `{0}`, `{1}`, … stand for a row's values, `{rows}` for where the rows go."""

    #: Text for a single row and for many: a lone row is bound directly, which spares SQLite a temporary table.
    one: str
    many: str
    width: int


def _update(text: str, width: int) -> Statement:
    numbered = [f"?{i + 1}" for i in range(width)]
    named = [f"v.column{i + 1}" for i in range(width)]
    one = text.replace("{rows}", "").format(*numbered)
    many = text.replace("{rows}", "FROM (VALUES %ROWS%) AS v").format(*named)
    return Statement(one, many, width)


def _insert(head: str, tail: str, width: int) -> Statement:
    text = f"{head} VALUES %ROWS% {tail}"
    return Statement(text.replace("%ROWS%", f"({', '.join('?' * width)})"), text, width)


#: n, id, caller, … as `JOB_COLUMNS`. A taken id or key inserts nothing.
INSERT = _insert(f"INSERT INTO jobs ({JOB_COLUMNS})", "ON CONFLICT DO NOTHING", 28)

#: pod, attempt, job, rank, caller, queue, tag, retire_after.
BIND = _insert("INSERT INTO bindings (pod, attempt, job, rank, caller, queue, tag, retire_after)", "", 8)

#: job, version, attempt, token, path, why, pods, retire_after, at, seq.
START = _update(
    "UPDATE jobs SET state = 'RUNNING', version = version + 1, attempt = {2}, token = {3}, path = {4},"
    " why_not_warmer = {5}, pods = {6}, retire_after = {7}, updated_at = {8}, seq = {9} {rows}"
    " WHERE id = {0} AND version = {1} AND state = 'QUEUED'",
    10,
)

#: job, version, state, retry_count, infra_retries, facts, at, result, result_blob, seq.
END = _update(
    "UPDATE jobs SET state = {2}, version = version + 1, retry_count = {3}, infra_retries = {4}, facts = {5},"
    " updated_at = {6}, result = {7}, result_blob = {8}, seq = {9} {rows}"
    " WHERE id = {0} AND version = {1} AND state IN ('PENDING', 'QUEUED', 'RUNNING')",
    10,
)

#: As END, for a job that goes back to QUEUED: it has no attempt then.
REQUEUE = _update(
    "UPDATE jobs SET state = {2}, version = version + 1, retry_count = {3}, infra_retries = {4}, facts = {5},"
    " updated_at = {6}, result = {7}, result_blob = {8}, seq = {9},"
    " attempt = NULL, token = NULL, pods = '[]', retire_after = '[]' {rows}"
    " WHERE id = {0} AND version = {1} AND state = 'RUNNING'",
    10,
)

#: The first seven of REQUEUE's values, run before it: keeps the attempt that another will follow.
KEEP = Statement(
    one="INSERT OR REPLACE INTO attempts (id, job, outcome, started_at, ended_at, path, pods, facts)"
    " SELECT attempt, id, ?3, updated_at, ?7, path, pods, ?6 FROM jobs"
    " WHERE id = ?1 AND version = ?2 AND state = 'RUNNING'",
    many="INSERT OR REPLACE INTO attempts (id, job, outcome, started_at, ended_at, path, pods, facts)"
    " SELECT j.attempt, j.id, v.column3, j.updated_at, v.column7, j.path, j.pods, v.column6"
    " FROM (VALUES %ROWS%) AS v CROSS JOIN jobs AS j"
    " WHERE j.id = v.column1 AND j.version = v.column2 AND j.state = 'RUNNING'",
    width=7,
)

#: job, version or NULL, state or NULL, cancel_requested or NULL, seq. Returns who moved and the new version.
MOVE = _update(
    "UPDATE jobs SET state = coalesce({2}, state), cancel_requested = coalesce({3}, cancel_requested),"
    " version = version + 1, seq = {4} {rows}"
    " WHERE id = {0} AND version = coalesce({1}, version) AND state IN ('PENDING', 'QUEUED', 'RUNNING')"
    " AND ({2} IS NULL OR state = 'PENDING') RETURNING id, version",
    5,
)

#: Begins every writing transaction: a broker that is not the leader any more writes nothing.
FENCE = "UPDATE leader SET seq = ? WHERE id = 1 AND epoch = ?"


def run(connection: sqlite3.Connection, statement: Statement, rows: Sequence[Row]) -> int:
    """Execute the statement over the rows; returns how many database rows it changed."""
    changed = 0
    for chunk in _chunks(rows):
        changed += connection.execute(_text(statement, len(chunk)), _flat(chunk)).rowcount
    return changed


def returning(connection: sqlite3.Connection, statement: Statement, rows: Sequence[Row]) -> list[Row]:
    """As `run` for a statement with RETURNING."""
    out: list[Row] = []
    for chunk in _chunks(rows):
        out += connection.execute(_text(statement, len(chunk)), _flat(chunk)).fetchall()
    return out


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    at = 0
    while at < len(rows):
        size = min(MOST_ROWS, 1 << ((len(rows) - at).bit_length() - 1))
        yield rows[at : at + size]
        at += size


def _flat(chunk: Sequence[Row]) -> Row | list[Any]:
    return chunk[0] if len(chunk) == 1 else [value for row in chunk for value in row]


@cache
def _text(statement: Statement, size: int) -> str:
    if size == 1:
        return statement.one
    row = f"({', '.join('?' * statement.width)})"
    return statement.many.replace("%ROWS%", ", ".join([row] * size))
