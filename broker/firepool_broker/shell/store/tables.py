"""The tables of the store as SQLModel classes: the one description of the schema. A migration makes them (a test compares the
two), pages and administration read through them; the hot path writes with the statements of `statements`.

Large columns come last in `jobs`, so that SQLite never touches their overflow pages for a filter or a count.
"""

from typing import Any

from sqlalchemy import JSON, CheckConstraint, Column, Float, Index, Integer, LargeBinary, String, Text, text
from sqlmodel import Field, SQLModel

from firepool_wire.words import TERMINAL, JobState


def _in(states: frozenset[JobState]) -> Any:
    names = ", ".join(f"'{s.value}'" for s in sorted(states))
    return text(f"state IN ({names})")


_LIVE = _in(frozenset(JobState) - TERMINAL)
_DONE = _in(TERMINAL)


class Job(SQLModel, table=True):
    """A job and its newest attempt."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_id", "id", unique=True),
        Index("jobs_key", "caller", "key", unique=True, sqlite_where=text("key IS NOT NULL")),
        # Counts and run progress, covering.
        Index("jobs_run", "caller", "run", "state"),
        # Recovery, and the newest change of a caller.
        Index("jobs_live", "caller", "seq", sqlite_where=_LIVE),
        # Resumable event streams.
        Index("jobs_done", "caller", "seq", sqlite_where=_DONE),
    )

    #: Order of insertion (the `seq` of the insert): the order of pages.
    n: int = Field(primary_key=True)
    id: str = Field(sa_column=Column(String, nullable=False))
    caller: str
    person: str
    state: str
    version: int
    #: Place of the newest change in the order of all changes.
    seq: int
    retry_count: int
    infra_retries: int
    cancel_requested: bool = Field(sa_column=Column(Integer, nullable=False))
    submitted_at: float = Field(sa_column=Column(Float, nullable=False))
    #: Time of the newest insert, start or end.
    updated_at: float = Field(sa_column=Column(Float, nullable=False))
    sku: str
    queue: str
    run: str | None = None
    #: Idempotency key, unique per caller until retention forgets it.
    key: str | None = None
    body_digest: str
    attempt: str | None = None
    #: Dispatch token of the newest start: tells who won after a lost connection.
    token: str | None = None
    path: str | None = None
    why_not_warmer: str
    #: JSON arrays, one entry per pod of the attempt.
    pods: str = Field(sa_column=Column(Text, nullable=False))
    retire_after: str = Field(sa_column=Column(Text, nullable=False))
    #: JSON object.
    labels: str = Field(sa_column=Column(Text, nullable=False))
    result_blob: str | None = None
    #: Sparse JSON of the spec; JSON of the facts of the end.
    spec: str = Field(sa_column=Column(Text, nullable=False))
    facts: str = Field(sa_column=Column(Text, nullable=False))
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))


class Attempt(SQLModel, table=True):
    """One execution that has ended (the one under way is part of its job's row)."""

    __tablename__ = "attempts"
    # One tree, no second index: a job's attempts are a range of ids.
    __table_args__ = ({"sqlite_with_rowid": False},)

    #: `<job>:<retry count>`.
    id: str = Field(primary_key=True)
    job: str
    #: State that the job went to: terminal, or QUEUED for a retry.
    outcome: str
    started_at: float = Field(sa_column=Column(Float, nullable=False))
    ended_at: float = Field(sa_column=Column(Float, nullable=False))
    path: str | None = None
    pods: str = Field(sa_column=Column(Text, nullable=False))
    facts: str = Field(sa_column=Column(Text, nullable=False))


class Bound(SQLModel, table=True):
    """A pod bound to an attempt by a committed start; the newest of a pod says who used it last."""

    __tablename__ = "bindings"
    __table_args__ = (Index("bindings_pod", "pod"),)

    #: Order of commit.
    n: int = Field(primary_key=True)
    pod: str
    attempt: str
    job: str
    rank: int
    caller: str
    queue: str
    tag: str | None = None
    retire_after: bool = Field(sa_column=Column(Integer, nullable=False))


class CallerRecord(SQLModel, table=True):
    """A trust domain."""

    __tablename__ = "callers"

    name: str = Field(primary_key=True)
    created_at: float = Field(sa_column=Column(Float, nullable=False))
    #: Sparse JSON of `CallerLimits`.
    limits: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class PersonRecord(SQLModel, table=True):
    """A person seen in a caller."""

    __tablename__ = "people"

    caller: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    created_at: float = Field(sa_column=Column(Float, nullable=False))


class Token(SQLModel, table=True):
    """A bearer token by the sha256 of its text."""

    __tablename__ = "tokens"
    __table_args__ = (
        # A name can be given again after its token was revoked.
        Index("tokens_name", "caller", "name", unique=True, sqlite_where=text("revoked_at IS NULL")),
    )

    digest: str = Field(primary_key=True)
    name: str
    caller: str
    person: str
    role: str
    created_at: float = Field(sa_column=Column(Float, nullable=False))
    expires_at: float | None = Field(default=None, sa_column=Column(Float))
    revoked_at: float | None = Field(default=None, sa_column=Column(Float))


class Setting(SQLModel, table=True):
    """A named piece of running configuration (the applied pools)."""

    __tablename__ = "settings"

    name: str = Field(primary_key=True)
    body: Any = Field(sa_column=Column(JSON, nullable=False))
    updated_at: float = Field(sa_column=Column(Float, nullable=False))


class Leader(SQLModel, table=True):
    """One row: the epoch that every writing transaction checks, and the last place given out in the order of changes."""

    __tablename__ = "leader"
    __table_args__ = (CheckConstraint("id = 1", name="leader_is_one_row"),)

    id: int = Field(primary_key=True)
    epoch: int
    seq: int
    pid: int
    since: float = Field(sa_column=Column(Float, nullable=False))
