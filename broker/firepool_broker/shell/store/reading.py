"""Database rows back as what the ports speak."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firepool_broker.core.asks import Binding
from firepool_broker.core.ids import AttemptId, Caller, PodName, Queue, ReuseTag
from firepool_broker.shell.rows import JobRow
from firepool_broker.shell.store.statements import JOB_COLUMNS, Row
from firepool_wire.jobspec import JobSpec, from_sparse
from firepool_wire.words import JobState

SELECT_JOB = f"SELECT {JOB_COLUMNS} FROM jobs"

#: Names asked for by one statement.
_MANY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt that was followed by another; the newest attempt of a job is part of its `JobRow`."""

    attempt: str
    started_at: float
    ended_at: float
    path: str | None
    pods: tuple[str, ...]
    facts: dict[str, Any]


def job_row(row: Row) -> JobRow:
    """A row of `SELECT_JOB`."""
    return JobRow(
        job=row[1],
        caller=row[2],
        person=row[3],
        spec=from_sparse(JobSpec, json.loads(row[25])),
        state=JobState(row[4]),
        version=row[5],
        retry_count=row[7],
        infra_retries=row[8],
        cancel_requested=bool(row[9]),
        submitted_at=row[10],
        updated_at=row[11],
        attempt=row[17],
        token=row[18],
        pods=tuple(json.loads(row[21])),
        retire_after=tuple(json.loads(row[22])),
        path=row[19],
        why_not_warmer=row[20],
        facts=json.loads(row[26]),
        result=row[27],
        result_blob=row[24],
        seq=row[6],
    )


def jobs_by_id(connection: sqlite3.Connection, jobs: Sequence[str]) -> list[JobRow]:
    """Those of the jobs that exist, in the order of `jobs`."""
    found: dict[str, JobRow] = {}
    for at in range(0, len(jobs), _MANY):
        part = jobs[at : at + _MANY]
        marks = ", ".join("?" * len(part))
        found.update((row[1], job_row(row)) for row in connection.execute(f"{SELECT_JOB} WHERE id IN ({marks})", part))
    return [found[j] for j in jobs if j in found]


def newest_bindings(connection: sqlite3.Connection, pods: Sequence[str]) -> list[Binding]:
    """The newest binding of each pod that has one."""
    out: list[Binding] = []
    for at in range(0, len(pods), _MANY):
        part = pods[at : at + _MANY]
        marks = ", ".join("?" * len(part))
        query = (
            "SELECT pod, attempt, caller, queue, tag, retire_after FROM bindings WHERE n IN"
            f" (SELECT max(n) FROM bindings WHERE pod IN ({marks}) GROUP BY pod) ORDER BY n"
        )
        out += [_binding(row) for row in connection.execute(query, part)]
    return out


def _binding(row: Row) -> Binding:
    pod, attempt, caller, queue, tag, retire_after = row
    return Binding(
        pod=PodName(pod),
        attempt=AttemptId(attempt),
        caller=Caller(caller),
        queue=Queue(queue),
        tag=None if tag is None else ReuseTag(tag),
        retire_after=bool(retire_after),
    )


def past_attempts(connection: sqlite3.Connection, job: str) -> list[PastAttempt]:
    """The attempts of a job before its newest, oldest first."""
    # Attempt ids are `<job>:<n>`: a range of the primary key (';' follows ':').
    query = (
        "SELECT id, started_at, ended_at, path, pods, facts FROM attempts WHERE id > ? AND id < ? AND job = ?"
        " ORDER BY length(id), id"
    )
    return [
        PastAttempt(
            attempt=row[0],
            started_at=row[1],
            ended_at=row[2],
            path=row[3],
            pods=tuple(json.loads(row[4])),
            facts=json.loads(row[5]),
        )
        for row in connection.execute(query, (f"{job}:", f"{job};", job))
    ]
