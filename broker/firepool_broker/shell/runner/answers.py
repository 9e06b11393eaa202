"""Effects that tell people: the submitter's answer, the watchers' changes, and a finished job's row.

A job leaves the runner's tables here, when its end is durable and told.
"""

from firepool_broker.core.effects import Accept, Notify, Refuse
from firepool_broker.core.ids import attempt_id
from firepool_broker.shell.ports import JobRow
from firepool_broker.shell.runner.desk import Accepted, Desk, LiveJob
from firepool_broker.shell.runner.intake import Intake, dependency_failure
from firepool_broker.shell.runner.watch import Change, Watch
from firepool_broker.shell.runner.words import error_of
from firepool_wire.words import TERMINAL, JobState


class Answers:
    """Carries `Accept`, `Refuse` and `Notify` out."""

    def __init__(self, desk: Desk, intake: Intake, watch: Watch) -> None:
        self._desk = desk
        self._intake = intake
        self._watch = watch

    def accept(self, effect: Accept) -> None:
        """The job is durable: its submitter may go on."""
        live = self._desk.jobs.get(effect.job)
        if live is None:
            return
        live.state = effect.state
        if live.answer is not None and not live.answer.done():
            self._desk.metrics.submitted.labels(live.ask.sku).inc()
            live.answer.set_result(Accepted(effect.job, effect.state, False))

    def refuse(self, effect: Refuse) -> None:
        """Nothing was written; the submitter hears why."""
        live = self._desk.jobs.get(effect.job)
        if live is None:
            return
        if live.answer is not None and not live.answer.done():
            self._desk.metrics.refused.labels(effect.failure.code).inc()
            # The id was never visible, so the error does not carry it.
            live.answer.set_exception(error_of(effect.failure))
        self._intake.drop(live, effect.failure)
        self._watch.finish(effect.job, None)

    def notify(self, effect: Notify) -> None:
        """Something visible changed; with a terminal state the job is done with."""
        live = self._desk.jobs.get(effect.job)
        if live is None:
            return
        live.state = effect.state
        if effect.state not in TERMINAL:
            self._watch.told(live.ask.caller, Change(effect.job, effect.state, live.seq, None))
            return
        row = row_of(live, self._desk.clock.now())
        error = live.facts.get("error")
        code = str(error["code"]) if error else ""
        self._desk.metrics.ended.labels(live.ask.sku, effect.state.value, code).inc()
        self._intake.drop(live, dependency_failure(effect.state, error))
        self._watch.told(live.ask.caller, Change(effect.job, effect.state, live.seq, row))


def row_of(live: LiveJob, now: float) -> JobRow:
    """The row of a live job as the store has it, or will have it in a moment."""
    started = bool(live.pods) and live.state is not JobState.QUEUED
    return JobRow(
        job=live.ask.job,
        caller=live.ask.caller,
        person=live.ask.person,
        spec=live.spec,
        state=live.state,
        version=live.version,
        retry_count=live.retry_count,
        infra_retries=live.infra_retries,
        cancel_requested=live.cancel_requested,
        submitted_at=live.ask.submitted_at,
        updated_at=now,
        attempt=attempt_id(live.ask.job, live.retry_count) if started else None,
        token=None,
        pods=live.pods,
        retire_after=live.retire_after,
        path=live.path,
        why_not_warmer=live.why_not_warmer,
        facts=live.facts,
        result=live.result,
        result_blob=live.result_blob,
        seq=live.seq,
    )
