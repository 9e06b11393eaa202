"""Effects that write or read the job store: queued in their order, answered when their group is durable."""

from collections.abc import Callable
from dataclasses import dataclass, field

from firepool_broker.core.asks import Ask
from firepool_broker.core.effects import CommitEnd, CommitStart, QueueJob, RecordCancel, SettleCommit, StoreJob
from firepool_broker.core.events import (
    CommitLost,
    Committed,
    CommitUnknown,
    EndCommitFailed,
    EndCommitted,
    JobStored,
    JobStoreFailed,
)
from firepool_broker.core.ids import AttemptId, JobId, job_of
from firepool_broker.sim.hands.answers import Answers
from firepool_broker.sim.ledger import End, Insert, Move, Pending, Start, Verdict, Write
from firepool_broker.sim.scene import Scene, failure
from firepool_wire.words import TERMINAL, JobState

StoreEffect = StoreJob | QueueJob | CommitStart | RecordCancel | CommitEnd | SettleCommit


@dataclass(slots=True)
class StoreHand:
    """The store as one life of the broker uses it."""

    scene: Scene
    answers: Answers
    #: Asks that came through this broker's door (a start that is written once needs the whole job).
    asks: dict[JobId, Ask] = field(default_factory=dict)
    #: Dispatch token of the newest try to start each attempt.
    tokens: dict[AttemptId, int] = field(default_factory=dict)

    def carry(self, effect: StoreEffect) -> None:
        """Queue the write of one effect."""
        plan = self.scene.dice.plan
        match effect:
            case StoreJob(ask, state):
                self._write(Insert(ask, state), plan.store_fails, 0.0, lambda v: self._stored(ask.job, v))
            case QueueJob(job, version):
                self._write(Move(job, version, JobState.QUEUED), 0.0, 0.0, lambda v: None)
            case RecordCancel(job, version):
                self._write(Move(job, version), 0.0, 0.0, lambda v: None)
            case CommitStart(attempt):
                token = self.scene.ledger.next_token()
                self.tokens[attempt] = token
                write = Start(effect, self.asks[job_of(attempt)], token, self.scene.clock.now)
                self._write(write, plan.commit_lost, plan.commit_unknown, lambda v: self._started(attempt, v))
            case CommitEnd(attempt):
                self._write(End(effect), plan.end_fails, 0.0, lambda v: self._ended(attempt, v))
            case SettleCommit(attempt):
                self.scene.clock.after(
                    self.scene.venue.commit.draw(self.scene.dice.time), lambda: self._settle(attempt)
                )

    def _write(self, write: Write, lost: float, unknown: float, answer: Callable[[Verdict], None]) -> None:
        dice = self.scene.dice
        fate: Verdict = "won"
        if dice.strikes(lost):
            fate = "lost"
        elif dice.strikes(unknown):
            fate = "unknown"
        durable = dice.coin() if fate == "unknown" else fate == "won"
        self.scene.ledger.waiting.append(Pending(write, fate, durable, answer))
        self._begin_commit()

    def _begin_commit(self) -> None:
        if self.scene.ledger.take_group():
            delay_s = self.scene.venue.commit.draw(self.scene.dice.time)
            self.scene.clock.after(delay_s, self._finish_commit)

    def _finish_commit(self) -> None:
        if not self.answers.alive:
            return
        for pending, verdict, row in self.scene.ledger.finish_group():
            if row is not None:
                self.scene.log_row(row)
            elif pending.fate == "won" and job_written(pending.write) in self.scene.ledger.rows:
                # Writes that follow a failed insert find no row: no fault of theirs.
                self.scene.log("stale", write=type(pending.write).__name__, job=job_written(pending.write))
            pending.answer(verdict)
        self._begin_commit()

    def _stored(self, job: JobId, verdict: Verdict) -> None:
        if verdict == "won":
            self.answers.later(0.0, JobStored(job))
        else:
            self.answers.later(0.0, JobStoreFailed(job, failure("StoreUnavailable", "the disk is full")))

    def _started(self, attempt: AttemptId, verdict: Verdict) -> None:
        match verdict:
            case "won":
                self.answers.later(0.0, Committed(attempt))
            case "lost":
                self.answers.later(0.0, self._lost(attempt))
            case "unknown":
                self.answers.later(0.0, CommitUnknown(attempt))

    def _lost(self, attempt: AttemptId) -> CommitLost:
        row = self.scene.ledger.rows.get(job_of(attempt))
        terminal = row is not None and row.state in TERMINAL
        return CommitLost(attempt, failure("StoreUnavailable", "the start was not written"), terminal)

    def _settle(self, attempt: AttemptId) -> None:
        if not self.answers.alive:
            return
        row = self.scene.ledger.rows.get(job_of(attempt))
        won = row is not None and row.token == self.tokens[attempt]
        self.answers.later(0.0, Committed(attempt) if won else self._lost(attempt))

    def _ended(self, attempt: AttemptId, verdict: Verdict) -> None:
        if verdict == "won":
            self.answers.later(0.0, EndCommitted(attempt))
        else:
            self.answers.later(0.0, EndCommitFailed(attempt, failure("StoreUnavailable", "the end was not written")))


def job_written(write: Write) -> JobId:
    """The job that a write is about."""
    match write:
        case Insert(ask):
            return ask.job
        case Start(commit) | End(commit):
            return job_of(commit.attempt)
        case Move(job):
            return job
