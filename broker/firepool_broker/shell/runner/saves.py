"""Effects that write: jobs, starts, ends, in the order of their effects. Answers become events.

Every write is version-checked on its own row by the store. Where the connection broke inside a commit the outcome is
unknown, and is read back before anybody hears of it.
"""

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import CommitEnd, CommitStart, QueueJob, RecordCancel, SettleCommit, StoreJob
from firepool_broker.core.events import (
    CommitLost,
    Committed,
    CommitUnknown,
    EndCommitFailed,
    EndCommitted,
    Event,
    JobStored,
    JobStoreFailed,
)
from firepool_broker.core.ids import AttemptId, JobId, PodName, job_of
from firepool_broker.shell.ports import (
    EndAttempt,
    InsertJob,
    JobRow,
    Lost,
    MoveJob,
    StartAttempt,
    StoreDown,
    Won,
    Write,
)
from firepool_broker.shell.runner.desk import Desk, LiveJob, Run
from firepool_broker.shell.runner.intake import Intake, key_conflict, lighten
from firepool_broker.shell.runner.words import error_of, failure_of
from firepool_wire.errors import StoreUnavailable
from firepool_wire.words import TERMINAL, JobState

#: Between attempts to reach a store that does not answer.
RETRY_S = 0.25

Answer = Won | Lost | StoreDown


class Saves:
    """Carries the store's effects out."""

    def __init__(self, desk: Desk, intake: Intake, end_is_durable: Callable[[AttemptId], None]) -> None:
        self._desk = desk
        self._intake = intake
        self._end_is_durable = end_is_durable
        #: Dispatch token of each start whose write is under way or unknown.
        self._tokens: dict[AttemptId, str] = {}

    # -- a job that waits ----------------------------------------------------------------------------------------------

    def store_job(self, effect: StoreJob) -> None:
        """Insert the job as PENDING or QUEUED."""
        live = self._desk.jobs[effect.ask.job]
        live.state = effect.state
        self._write(self._insert(live, effect.state, None), partial(self._job_stored, live))

    def _job_stored(self, live: LiveJob, answer: Answer) -> None:
        job = live.ask.job
        match answer:
            case Won():
                self._won(live, answer)
                lighten(live)
                self._desk.emit(JobStored(job))
            case Lost(existing=existing):
                failure = failure_of(key_conflict(existing or job))
                self._taken(live, existing, JobStoreFailed(job, failure))
            case StoreDown(unknown=True):
                self._desk.spawn(self._settle_insert(live), "settling an insert")
            case StoreDown():
                self._desk.emit(JobStoreFailed(job, down(answer)))

    async def _settle_insert(self, live: LiveJob) -> None:
        row = await self._read(live.ask.job)
        if row is None:
            self._desk.emit(JobStoreFailed(live.ask.job, down(StoreDown("the insert did not reach the store"))))
        else:
            self._job_stored(live, Won(row.version, row.seq))

    def queue_job(self, effect: QueueJob) -> None:
        """PENDING → QUEUED; repeated until it is written."""
        self._move(effect.job, MoveJob(job=effect.job, version=effect.version, state=JobState.QUEUED))

    def record_cancel(self, effect: RecordCancel) -> None:
        """Set `cancel_requested`; repeated until it is written."""
        live = self._desk.jobs.get(effect.job)
        if live is not None:
            live.cancel_requested = True
        self._move(effect.job, MoveJob(job=effect.job, version=effect.version, cancel_requested=True))

    def _move(self, job: JobId, move: MoveJob) -> None:
        def answered(answer: Answer) -> None:
            live = self._desk.jobs.get(job)
            if isinstance(answer, Won) and live is not None:
                self._won(live, answer)
            elif isinstance(answer, StoreDown):  # written twice it is lost the second time, which says the same
                asyncio.get_running_loop().call_later(RETRY_S, self._move, job, move)

        if not self._desk.closing:
            self._write(move, answered)

    # -- a start -------------------------------------------------------------------------------------------------------

    def commit_start(self, effect: CommitStart) -> None:
        """Write the start with its bindings; a job that was never written is inserted already RUNNING."""
        live = self._desk.jobs[job_of(effect.attempt)]
        live.path, live.why_not_warmer = effect.path.value, effect.why_not_warmer
        live.pods, live.retire_after = effect.pods, effect.retire_after
        token = self._tokens[effect.attempt] = secrets.token_hex(8)
        start = StartAttempt(
            job=live.ask.job,
            attempt=effect.attempt,
            version=effect.version,
            token=token,
            pods=effect.pods,
            path=effect.path.value,
            why_not_warmer=effect.why_not_warmer,
            retire_after=effect.retire_after,
            caller=effect.caller,
            queue=effect.queue,
            tag=effect.tag,
            at=self._desk.clock.now(),
        )
        write: Write = self._insert(live, JobState.RUNNING, start) if effect.insert else start
        self._write(write, partial(self._start_written, live, effect.attempt))

    def _start_written(self, live: LiveJob, attempt: AttemptId, answer: Answer) -> None:
        if isinstance(answer, StoreDown) and answer.unknown:
            self._desk.emit(CommitUnknown(attempt))
            return
        del self._tokens[attempt]
        match answer:
            case Won():
                self._won(live, answer)
                live.state = JobState.RUNNING
                self._desk.metrics.started.labels(live.ask.sku, live.path or "", live.why_not_warmer).inc()
                self._desk.emit(Committed(attempt))
            case Lost(existing=str() as existing):
                self._taken(live, existing, CommitLost(attempt, failure_of(key_conflict(existing)), True))
            case Lost(why=why, state=state):
                failure = failure_of(StoreUnavailable(f"the start of {attempt} was not written: {why}"))
                self._desk.emit(CommitLost(attempt, failure, state in TERMINAL))
            case StoreDown():
                self._desk.emit(CommitLost(attempt, down(answer)))

    def settle(self, effect: SettleCommit) -> None:
        """Read the row's dispatch token until it is known who won."""
        self._desk.spawn(self._settle_start(effect.attempt), "settling a start")

    async def _settle_start(self, attempt: AttemptId) -> None:
        job = job_of(attempt)
        row = await self._read(job)
        live, token = self._desk.jobs.get(job), self._tokens.get(attempt)
        if live is None:
            return
        if row is not None and row.attempt == attempt and row.token == token:
            self._start_written(live, attempt, Won(row.version, row.seq))
        else:
            why = "the row is missing" if row is None else f"the row is {row.state} at version {row.version}"
            self._start_written(live, attempt, Lost(why, row.state if row is not None else None))

    # -- an end --------------------------------------------------------------------------------------------------------

    def commit_end(self, effect: CommitEnd) -> None:
        """Write a terminal state or a re-queue, with everything that the attempt's exit records say."""
        desk, attempt = self._desk, effect.attempt
        live = desk.jobs[job_of(attempt)]
        runs = desk.runs.get(attempt, {})
        first = next((run for run in runs.values() if run.rank == 0), None)
        terminal = effect.state in TERMINAL
        facts = end_facts(effect, live, runs)
        result, blob = (first.result, first.result_blob) if first is not None and terminal else (None, None)
        write = EndAttempt(
            job=live.ask.job,
            attempt=attempt,
            version=effect.version,
            state=effect.state,
            retry_count=effect.retry_count,
            infra_retries=effect.infra_retries,
            facts=facts,
            at=desk.clock.now(),
            result=result,
            result_blob=blob,
        )
        self._write(write, partial(self._end_written, live, write))

    def _end_written(self, live: LiveJob, write: EndAttempt, answer: Answer) -> None:
        attempt = AttemptId(write.attempt)
        match answer:
            case Won():
                self._won(live, answer)
                live.state, live.facts = write.state, dict(write.facts)
                live.result, live.result_blob = write.result, write.result_blob
                live.retry_count, live.infra_retries = write.retry_count, write.infra_retries
                self._desk.emit(EndCommitted(attempt))
                self._end_is_durable(attempt)
            case StoreDown(unknown=False):
                self._desk.emit(EndCommitFailed(attempt, down(answer)))
            case _:
                self._desk.spawn(self._settle_end(live, write), "settling an end")

    async def _settle_end(self, live: LiveJob, write: EndAttempt) -> None:
        """Lost or unknown: it may be this very write that landed before."""
        row = await self._read(live.ask.job)
        if row is not None and row.attempt == write.attempt and row.state is write.state:
            self._end_written(live, write, Won(row.version, row.seq))
            return
        why = "the row is missing" if row is None else f"the row is {row.state} at version {row.version}"
        failure = failure_of(StoreUnavailable(f"the end of {write.attempt} was not written: {why}"))
        self._desk.log.warning("end not written", attempt=write.attempt, cause=why, expected=write.version)
        self._desk.emit(EndCommitFailed(AttemptId(write.attempt), failure))

    # -- common --------------------------------------------------------------------------------------------------------

    def _insert(self, live: LiveJob, state: JobState, start: StartAttempt | None) -> InsertJob:
        ask = live.ask
        return InsertJob(
            job=ask.job,
            caller=ask.caller,
            person=ask.person,
            spec=live.spec,
            state=state,
            submitted_at=ask.submitted_at,
            body_digest=live.body_digest,
            start=start,
        )

    def _won(self, live: LiveJob, answer: Won) -> None:
        live.stored, live.version, live.seq = True, answer.version, answer.seq
        if live.recorded is not None and not live.recorded.done():
            live.recorded.set_result(None)

    def recorded(self, live: LiveJob) -> "asyncio.Future[None]":
        """Done at the next durable write of the job."""
        if live.recorded is None or live.recorded.done():
            live.recorded = asyncio.get_running_loop().create_future()
        return live.recorded

    def _taken(self, live: LiveJob, existing: str | None, event: Event) -> None:
        """The idempotency key has a job already: the submitter hears of that one, then this one is undone."""

        async def replay() -> None:
            if existing is not None and live.answer is not None:
                await self._intake.replay(live, existing)
            self._desk.emit(event)
            self._intake.drop(live, None)

        self._desk.spawn(replay(), "replaying a key", lambda _: event)

    def _write(self, write: Write, then: Callable[[Answer], None]) -> None:
        future = asyncio.ensure_future(self._desk.parts.store.write(write))
        future.add_done_callback(partial(self._written, then))

    def _written(self, then: Callable[[Answer], None], future: "asyncio.Future[Won | Lost]") -> None:
        if future.cancelled() or self._desk.closing:
            return  # the broker stops; what is durable is read at the next start
        error = future.exception()
        if error is None:
            then(future.result())
            return
        if not isinstance(error, StoreDown):
            self._desk.metrics.surprises.inc()
            self._desk.log.error("surprise", doing="writing to the store", exc_info=error)
            error = StoreDown(f"{type(error).__name__}: {error}", unknown=True)
        then(error)

    async def _read(self, job: str) -> JobRow | None:
        """The row, however long the store takes to answer."""
        while True:
            try:
                return await self._desk.parts.store.get(job)
            except StoreDown as error:
                self._desk.log.warning("store does not answer", job=job, cause=str(error))
                await asyncio.sleep(RETRY_S)


def down(error: StoreDown) -> Failure:
    """A store that cannot write, as the engine sees it."""
    return failure_of(StoreUnavailable(f"the job store cannot write: {error}", retry_after_s=1.0))


def end_facts(effect: CommitEnd, live: LiveJob, runs: dict[PodName, Run]) -> dict[str, Any]:
    """What a terminal job shows, as the API serves it (keys of the job body)."""
    ordered = sorted(runs.values(), key=lambda run: run.rank)
    records = [run.exit for run in ordered if run.exit is not None]
    first = next((run for run in ordered if run.rank == 0), None)
    record = first.exit if first is not None else None
    facts: dict[str, Any] = {
        "exit_code": effect.exit.exit_code if effect.exit is not None else None,
        "signal": effect.exit.signal if effect.exit is not None else None,
        "error": _error_json(effect, live, runs),
        "path": effect.path.value if effect.path is not None else None,
        "why_not_warmer": effect.why_not_warmer,
        "times": dict(effect.times),
        "pods": list(live.pods),
        "usage": {
            "peak_rss_bytes": max((r.peak_rss_bytes for r in records if r.peak_rss_bytes is not None), default=None),
            "cpu_s": sum(r.cpu_s or 0.0 for r in records) if records else None,
            "peak_device_bytes": max(
                (r.peak_device_bytes for r in records if r.peak_device_bytes is not None), default=None
            ),
        },
        "dropped_env": sorted({name for r in records for name in r.dropped_env}),
        "outputs": [entry for run in ordered for entry in run.outputs],
        "discarded_bytes": sum(r.discarded_bytes for r in records),
        "log_bytes": sum(r.log_bytes for r in records),
        "log_dropped_bytes": sum(r.log_dropped_bytes for r in records),
        "result_bytes": first.result_bytes if first is not None else 0,
        "leftovers": sum(r.leftovers for r in records),
        "notes": [note for run in ordered for note in run.notes],
    }
    if record is not None and record.first_instruction_at_s is not None and record.launched_at_s is not None:
        facts["launch_to_first_instruction_s"] = record.first_instruction_at_s - record.launched_at_s
    return facts


def _error_json(effect: CommitEnd, live: LiveJob, runs: dict[PodName, Run]) -> dict[str, Any] | None:
    """The failure that the engine settled on, with the agent's own details where it is the agent's error."""
    if effect.failure is None:
        return None
    for run in sorted(runs.values(), key=lambda run: run.rank):
        told = run.exit.error if run.exit is not None else run.error
        if told is not None and told.get("code") == effect.failure.code:
            return {**told, "job_id": live.ask.job}
    return error_of(effect.failure, live.ask.job).to_json()
