"""A job as the core knows it, and the edges that its state may take. Diagrams in the docs are drawn from `EDGES`.

The core keeps a job until its end is durable. What it never has: payloads, environment, results.
"""

from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING

from firepool_broker.core.asks import Ask, Failure
from firepool_broker.core.effects import CommitEnd
from firepool_broker.core.ids import JobId, attempt_id
from firepool_broker.core.records import Record
from firepool_wire.words import JobState, Path, WhyNotWarmer

if TYPE_CHECKING:
    from firepool_broker.core.leases import Lease
    from firepool_broker.core.pods import ReuseKey
    from firepool_broker.core.queue import Lane
    from firepool_broker.core.quota import Usage
    from firepool_broker.core.racks import PoolRecord

PENDING = JobState.PENDING
QUEUED = JobState.QUEUED
RUNNING = JobState.RUNNING
SUCCEEDED = JobState.SUCCEEDED
FAILED = JobState.FAILED
CANCELLED = JobState.CANCELLED

#: Every edge of a job's life, and why it is taken; None = nothing durable yet.
EDGES: dict[tuple[JobState | None, JobState], str] = {
    (None, PENDING): "stored; waits for the results of other jobs",
    (None, QUEUED): "stored; waits for pods, or its lease was not prepared within 20 ms",
    (None, RUNNING): "written once, already started (beyond the paper)",
    (PENDING, QUEUED): "its inputs are there",
    (PENDING, FAILED): "an input failed, or it can never be served",
    (PENDING, CANCELLED): "cancelled before it started",
    (QUEUED, RUNNING): "its start is committed",
    (QUEUED, FAILED): "waited too long, or can never be served",
    (QUEUED, CANCELLED): "cancelled before it started",
    (RUNNING, SUCCEEDED): "every rank ended well",
    (RUNNING, FAILED): "a rank failed and no retry is left",
    (RUNNING, CANCELLED): "cancelled; its process tree is verified gone",
    (RUNNING, QUEUED): "retry, or infrastructure re-queue; the retry count rises",
}


#: Shared by all jobs that wait for nobody; never written to.
_NOTHING: dict[JobId, None] = {}


class Row(IntEnum):
    """What the store has of the job."""

    NONE = 0
    #: An insert is on its way.
    WRITING = 1
    STORED = 2


NOT_STORED, BEING_STORED, STORED = Row

#: state → states that may follow.
NEXT: dict[JobState | None, frozenset[JobState]] = {
    state: frozenset(to for (start, to) in EDGES if start is state) for state in (None, *JobState)
}


class Claimant(Record):
    """What a claim reads of a job; apart for the same reason as `pods.Claimable`."""

    __slots__ = (
        "attempt",
        "key",
        "plain",
        "pods",
        "pool",
        "refused_at",
        "strength",
        "usage",
        "wanted",
    )


class JobRecord(Claimant):
    """One job. Its timer is the earliest of its deadlines (`starts.rearm`)."""

    __slots__ = (
        "accepted",
        "arrival",
        "ask",
        "at_accepted",
        "at_queued",
        "cancel",
        "client_until",
        "end",
        "end_again",
        "end_failures",
        "id",
        "infra_retries",
        "lane",
        "lease",
        "lost_commits",
        "not_before",
        "queue_until",
        "retry_count",
        "row",
        "single_use",
        "state",
        "version",
        "waits_for",
        "why",
    )

    def __init__(self, ask: Ask, pool: "PoolRecord", usage: "Usage", strength: int = 0) -> None:
        self.slot = 0
        self.noted = -1
        self.name = self.id = ask.job
        self.ask = ask
        self.pool = pool
        self.usage = usage
        self.pods = ask.pods
        self.single_use = ask.single_use
        #: One shared pod: the common case, told apart once.
        self.plain = ask.pods == 1 and not ask.single_use
        #: Requirement set that its pod had best have installed ("" = none).
        self.wanted = ask.requirements
        self.key: ReuseKey = (ask.queue, ask.tag)
        #: Isolation that its pods must at least have (`words.STRENGTH`).
        self.strength = strength
        self.state: JobState | None = None
        self.row = Row.NONE
        #: Version of the row once every write emitted so far is applied; the engine is the only writer.
        self.version = 0
        self.accepted = False
        self.retry_count = 0
        #: Id of its present or next attempt; follows `retry_count` (`next_attempt`).
        self.attempt = attempt_id(ask.job, 0)
        self.infra_retries = 0
        self.lease: Lease | None = None
        #: Where it waits; None = not waiting for pods.
        self.lane: Lane | None = None
        #: Order of arrival, the tie-break behind priority and first submission.
        self.arrival = 0
        #: When it was first refused for lack of a pod; a pod that became ready later is `new` to it.
        self.refused_at = inf
        #: Why a warmer path was closed, at the first refused claim.
        self.why: WhyNotWarmer | None = None
        #: What it shall end as, once somebody asked for its end.
        self.cancel: Failure | None = None
        #: The end that is being written.
        self.end: CommitEnd | None = None
        self.end_failures = 0
        #: When a failed end is written again.
        self.end_again = inf
        self.lost_commits = 0
        #: Not placed before this time (back-off after lost commits and lost hosts).
        self.not_before = 0.0
        self.queue_until = inf
        self.client_until = inf
        #: Jobs whose results it still waits for (a dict serves as an ordered set).
        self.waits_for: dict[JobId, None] = _NOTHING
        #: Milestones on the engine's clock; −1 = not reached.
        self.at_accepted = -1.0
        self.at_queued = -1.0

    def next_attempt(self, retry_count: int, infra_retries: int) -> None:
        """Count retries; every re-queue raises the count, so an attempt id never repeats (S41)."""
        self.retry_count, self.infra_retries = retry_count, infra_retries
        self.attempt = attempt_id(self.id, retry_count)

    def due(self) -> float:
        """The earliest of its deadlines: what its one timer is armed for."""
        due = self.client_until if self.cancel is None else inf
        lease = self.lease
        if self.end is not None:
            return self.end_again
        if lease is None:
            if self.lane is None and self.state is QUEUED:
                due = min(due, self.not_before)
            return min(due, self.queue_until)
        for bound in (lease.start_by, lease.run_by, lease.stop_by):
            if bound and bound < due:
                due = bound
        return due

    @property
    def path(self) -> Path | None:
        """How the current attempt got its pods."""
        return self.lease.path if self.lease is not None else None

    def __lt__(self, other: "JobRecord") -> bool:
        """Heap entries of an equal place are the same job twice: either may come first."""
        return False

    def __repr__(self) -> str:
        return f"<job {self.id} {self.state}>"
