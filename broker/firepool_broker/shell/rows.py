"""What crosses the job store's door: the writes, their answers, and the read model. Plain data; the port that takes them is
`ports.JobStore`, what stands behind it lives in `store`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firepool_wire.jobspec import JobSpec
from firepool_wire.words import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertJob:
    """Insert a job row (version 1). Conflict on (caller, idempotency key) → `Lost`."""

    job: str
    caller: str
    person: str
    spec: JobSpec
    state: JobState
    submitted_at: float
    body_digest: str
    #: Written once, already running: the start that belongs to it.
    start: "StartAttempt | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    """QUEUED → RUNNING with bindings, conditional on `version`; writes `token` to see who won after a lost connection."""

    job: str
    attempt: str
    version: int
    token: str
    pods: tuple[str, ...]
    path: str
    why_not_warmer: str
    retire_after: tuple[bool, ...]
    caller: str
    queue: str
    tag: str | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """RUNNING (or PENDING, QUEUED) → terminal or QUEUED again, conditional on `version`; replaces the attempt's facts."""

    job: str
    attempt: str
    version: int
    state: JobState
    retry_count: int
    infra_retries: int
    #: Everything that a terminal job shows (exit code, error, path, times, usage, result), JSON-able.
    facts: Mapping[str, Any]
    at: float
    #: Inline result frames (≤ INLINE_RESULT_BYTES) or None; larger ones are in the blob store under `result_blob`.
    result: bytes | None = None
    result_blob: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveJob:
    """PENDING → QUEUED, or set `cancel_requested`; conditional on `version` where given (None: whatever it is)."""

    job: str
    version: int | None
    state: JobState | None = None
    cancel_requested: bool | None = None


Write = InsertJob | StartAttempt | EndAttempt | MoveJob


@dataclass(frozen=True, slots=True)
class Won:
    """The write is durable; `version` is the row's new version, `seq` its new place in the order of visible changes."""

    version: int
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The write changed nothing: version moved, row missing, or key taken (`existing` = the job that has it)."""

    why: str
    state: JobState | None = None
    existing: str | None = None


class StoreDown(Exception):
    """The store cannot write now. `unknown`: the connection broke inside the commit, so the outcome is not known."""

    def __init__(self, why: str, *, unknown: bool = False) -> None:
        super().__init__(why)
        self.unknown = unknown


@dataclass(slots=True, kw_only=True)
class JobRow:
    """A job as the store has it: the read model of the API and of recovery."""

    job: str
    caller: str
    person: str
    spec: JobSpec
    state: JobState
    version: int
    retry_count: int
    infra_retries: int
    cancel_requested: bool
    submitted_at: float
    updated_at: float
    attempt: str | None
    token: str | None
    pods: tuple[str, ...]
    retire_after: tuple[bool, ...]
    path: str | None
    why_not_warmer: str
    facts: dict[str, Any]
    result: bytes | None
    result_blob: str | None
    #: Position in the caller-visible order of changes (the cursor of event streams).
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Filters of a list; None = any."""

    caller: str | None = None
    states: tuple[JobState, ...] | None = None
    sku: str | None = None
    queue: str | None = None
    run: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Opaque position from the previous page.
    cursor: str | None = None
    limit: int = 100
