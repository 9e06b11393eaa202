"""The job store of the simulated shell: exactly what the real one would hold (rows, versions, bindings, tokens), so that a
broker can die at any instant and the next one can be built from it.

One writer. Writes that gather while a commit is under way share the next one, in their order (`design.md` §6). A group is
all or nothing when the broker dies in the middle; each write is still checked on its own row.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from firepool_broker.core.asks import Ask, Binding, Exit, Failure, FoundJob
from firepool_broker.core.effects import CommitEnd, CommitStart
from firepool_broker.core.ids import AttemptId, JobId, PodName, job_of
from firepool_wire.words import TERMINAL, JobState, Path

#: How a write went: durable, changed nothing, or not known to the broker.
Verdict = Literal["won", "lost", "unknown"]


@dataclass(slots=True, kw_only=True)
class Row:
    """One job as the store has it."""

    ask: Ask
    state: JobState
    version: int = 1
    retry_count: int = 0
    infra_retries: int = 0
    cancel_requested: bool = False
    attempt: AttemptId | None = None
    token: int = 0
    pods: tuple[PodName, ...] = ()
    retire_after: bool = False
    path: Path | None = None
    why_not_warmer: str = ""
    started_at: float | None = None
    exit: Exit | None = None
    failure: Failure | None = None
    times: tuple[tuple[str, float], ...] = ()

    def found(self) -> FoundJob:
        """The row as recovery sees it."""
        return FoundJob(
            ask=self.ask,
            state=self.state,
            retry_count=self.retry_count,
            version=self.version,
            infra_retries=self.infra_retries,
            cancel_requested=self.cancel_requested,
            pods=self.pods if self.state is JobState.RUNNING else (),
            path=self.path,
            retire_after=self.retire_after,
            why_not_warmer=self.why_not_warmer,
            started_at=self.started_at,
        )


@dataclass(frozen=True, slots=True)
class Insert:
    """Insert a row, PENDING or QUEUED."""

    ask: Ask
    state: JobState


@dataclass(frozen=True, slots=True)
class Start:
    """Write a start with its bindings and its token; `ask` is needed when the row is written once, already RUNNING."""

    commit: CommitStart
    ask: Ask
    token: int
    at: float


@dataclass(frozen=True, slots=True)
class End:
    """Write a terminal state or a re-queue."""

    commit: CommitEnd


@dataclass(frozen=True, slots=True)
class Move:
    """PENDING → QUEUED (`state`), or `cancel_requested`."""

    job: JobId
    version: int
    state: JobState | None = None


Write = Insert | Start | End | Move


@dataclass(slots=True)
class Pending:
    """A queued write, what the fault dice say of it, and whom to tell."""

    write: Write
    fate: Verdict
    #: For `unknown`: whether it did become durable.
    durable: bool
    answer: Callable[[Verdict], None]


@dataclass(slots=True)
class Ledger:
    """Rows and bindings, and the one writer's queue."""

    rows: dict[JobId, Row] = field(default_factory=dict)
    bindings: dict[PodName, Binding] = field(default_factory=dict)
    waiting: list[Pending] = field(default_factory=list)
    in_flight: list[Pending] = field(default_factory=list)
    tokens: int = 0

    def next_token(self) -> int:
        """A dispatch token that no other start has."""
        self.tokens += 1
        return self.tokens

    def take_group(self) -> bool:
        """Put everything that waits in flight; False when a commit is under way or nothing waits."""
        if self.in_flight or not self.waiting:
            return False
        self.in_flight, self.waiting = self.waiting, []
        return True

    def finish_group(self) -> list[tuple[Pending, Verdict, Row | None]]:
        """Make the group in flight durable, write by write; each with its verdict and the row that it changed."""
        group, self.in_flight = self.in_flight, []
        done: list[tuple[Pending, Verdict, Row | None]] = []
        for pending in group:
            if pending.fate == "lost" or (pending.fate == "unknown" and not pending.durable):
                done.append((pending, pending.fate, None))
                continue
            row = self.apply(pending.write)
            verdict: Verdict = "lost" if row is None else pending.fate
            done.append((pending, verdict, row))
        return done

    def crash(self, *, durable: bool) -> list[Row]:
        """The writer died: what waited is lost, the group in flight is durable as a whole or not at all."""
        self.waiting = []
        group, self.in_flight = self.in_flight, []
        if not durable:
            return []
        rows = [self.apply(pending.write) for pending in group if pending.durable]
        return [row for row in rows if row is not None]

    def unfinished(self) -> list[FoundJob]:
        """Every job that is not terminal."""
        return [row.found() for row in self.rows.values() if row.state not in TERMINAL]

    def bindings_of(self, pods: Iterable[PodName]) -> list[Binding]:
        """The newest committed binding of each pod that ever had one."""
        return [self.bindings[pod] for pod in pods if pod in self.bindings]

    def apply(self, write: Write) -> Row | None:
        """Change the row if the write's condition holds; None = nothing changed."""
        match write:
            case Insert(ask, state):
                return None if ask.job in self.rows else self._put(ask, state)
            case Start():
                return self._start(write)
            case End(commit):
                return self._end(commit)
            case Move(job, version, state):
                row = self.rows.get(job)
                if row is None or row.version != version or row.state in TERMINAL:
                    return None
                moved = replace(row, version=version + 1)
                if state is None:
                    moved.cancel_requested = True
                else:
                    moved.state = state
                self.rows[job] = moved
                return moved

    def _put(self, ask: Ask, state: JobState) -> Row:
        row = Row(ask=ask, state=state)
        self.rows[ask.job] = row
        return row

    def _start(self, write: Start) -> Row | None:
        commit = write.commit
        job = job_of(commit.attempt)
        row = self.rows.get(job)
        if commit.insert:
            if row is not None:
                return None
            row = Row(ask=write.ask, state=JobState.QUEUED, version=0)
        elif row is None or row.version != commit.version or row.state is not JobState.QUEUED:
            return None
        started = replace(
            row,
            state=JobState.RUNNING,
            version=row.version + 1,
            attempt=commit.attempt,
            token=write.token,
            pods=commit.pods,
            retire_after=any(commit.retire_after),
            path=commit.path,
            why_not_warmer=commit.why_not_warmer,
            started_at=write.at,
        )
        self.rows[job] = started
        for pod, retire in zip(commit.pods, commit.retire_after, strict=True):
            self.bindings[pod] = Binding(
                pod=pod,
                attempt=commit.attempt,
                caller=commit.caller,
                queue=commit.queue,
                tag=commit.tag,
                retire_after=retire,
            )
        return started

    def _end(self, commit: CommitEnd) -> Row | None:
        job = job_of(commit.attempt)
        row = self.rows.get(job)
        if row is None or row.version != commit.version or row.state in TERMINAL:
            return None
        if row.state is JobState.RUNNING and row.attempt != commit.attempt:
            return None
        ended = replace(
            row,
            state=commit.state,
            version=row.version + 1,
            retry_count=commit.retry_count,
            infra_retries=commit.infra_retries,
            pods=(),
            exit=commit.exit,
            failure=commit.failure,
            path=commit.path,
            why_not_warmer=commit.why_not_warmer,
            times=commit.times,
        )
        self.rows[job] = ended
        return ended
