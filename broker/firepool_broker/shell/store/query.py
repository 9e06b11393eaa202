"""Pages and counts of jobs: filters made into SQL. Names of columns are ours, values are always bound."""

import sqlite3
from typing import Any

from firepool_broker.shell.rows import JobFilter, JobRow
from firepool_broker.shell.store.reading import SELECT_JOB, job_row
from firepool_wire.errors import BadRequest

#: Largest page.
MOST_ROWS = 1_000


def page(connection: sqlite3.Connection, where: JobFilter) -> tuple[list[JobRow], str | None]:
    """A page, newest submission first, and the cursor of the next one (None: no more).

    Raises:
        BadRequest: the cursor is none of ours.
    """
    terms, values = _terms(where)
    limit = max(1, min(where.limit, MOST_ROWS))
    text = f"{SELECT_JOB} WHERE {' AND '.join(terms) or 'TRUE'} ORDER BY n DESC LIMIT ?"
    rows = connection.execute(text, [*values, limit + 1]).fetchall()
    more = len(rows) > limit
    return [job_row(row) for row in rows[:limit]], str(rows[limit - 1][0]) if more else None


def counts(connection: sqlite3.Connection, caller: str | None, run: str | None) -> dict[str, int]:
    """Jobs by state."""
    terms, values = _terms(JobFilter(caller=caller, run=run))
    text = f"SELECT state, count(*) FROM jobs WHERE {' AND '.join(terms) or 'TRUE'} GROUP BY state"
    return dict(connection.execute(text, values).fetchall())


def _terms(where: JobFilter) -> tuple[list[str], list[Any]]:
    terms: list[str] = []
    values: list[Any] = []
    for column, value in (
        ("caller", where.caller),
        ("sku", where.sku),
        ("queue", where.queue),
        ("run", where.run),
    ):
        if value is not None:
            terms.append(f"{column} = ?")
            values.append(value)
    if where.states is not None:
        terms.append(f"state IN ({', '.join('?' * len(where.states))})")
        values += [s.value for s in where.states]
    for name, value in where.labels.items():
        terms.append("EXISTS (SELECT 1 FROM json_each(jobs.labels) AS label WHERE label.key = ? AND label.value = ?)")
        values += [name, value]
    if where.cursor is not None:
        # Digits of other scripts pass `isdigit`, and a number past 64 bits cannot be bound.
        if not (where.cursor.isascii() and where.cursor.isdigit() and len(where.cursor) < 19):
            raise BadRequest(f"{where.cursor!r} is not a cursor of an earlier page", field="cursor")
        terms.append("n < ?")
        values.append(int(where.cursor))
    return terms, values
