"""Who submits: programs that take the steps of a `Workload`, wait at barriers, resend what a dead broker never answered, and now
and then cancel. They know only what a client knows: accepted, refused, ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from firepool_broker.core.asks import Ask, Exit, Failure
from firepool_broker.core.ids import AttemptId, Caller, JobId, Person, Queue, ReuseTag, Sku, job_of
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import Dice
from firepool_broker.sim.load import Line, Work, Workload
from firepool_broker.sim.venue import Venue
from firepool_broker.sim.yard import Body
from firepool_wire.words import Fault, JobState

#: Seconds after which a client tries again when no broker answers, or one refused with a retryable error.
RESEND_S = 0.5

_ENDINGS = {
    "ok": Exit(exit_code=0),
    "error": Exit(
        exit_code=1,
        failure=Failure(code="UserError", message="the function raised", fault=Fault.USER, retryable=False),
    ),
    "oom": Exit(
        exit_code=137,
        signal=9,
        failure=Failure(code="OOM", message="over its memory", fault=Fault.USER, retryable=False),
    ),
    "never": Exit(exit_code=0),
}
_TIMED_OUT = Exit(
    exit_code=137,
    signal=9,
    failure=Failure(code="RunTimeout", message="ran too long", fault=Fault.LIMIT, retryable=False),
)


@dataclass(slots=True, kw_only=True)
class Story:
    """One job as its submitter lives it; times in virtual seconds."""

    job: JobId
    work: Work
    line: str
    depends: tuple[JobId, ...] = ()
    submitted_at: float
    answered: bool = False
    refused: Failure | None = None
    state: JobState | None = None
    ended_at: float | None = None


class Desk(Protocol):
    """What clients need of a broker; the world gives the one that lives, or None."""

    def submit(self, ask: Ask) -> None:
        """A request has arrived."""

    def cancel(self, job: JobId, failure: Failure) -> None:
        """A cancel has arrived."""

    def renew(self, jobs: tuple[JobId, ...]) -> None:
        """A lease renewal has arrived."""


@dataclass(slots=True, kw_only=True)
class Clients:
    """All lines of a workload and how far they are."""

    clock: Clock
    dice: Dice
    venue: Venue
    log: Callable[..., None]
    desk: Callable[[], Desk | None]
    stories: dict[JobId, Story] = field(default_factory=dict)
    _open: dict[str, tuple[Line, int, set[JobId]]] = field(default_factory=dict)

    def begin(self, workload: Workload) -> None:
        """Start every line."""
        for line in workload.lines:
            self._step(line, 0)

    @property
    def done(self) -> bool:
        """Every line has taken its last step."""
        return not self._open

    def body(self, attempt: AttemptId, rank: int) -> Body:
        """What the attempt's code does; each rank of a gang takes a little longer. The agent enforces the run time-out."""
        work = self.stories[job_of(attempt)].work
        run_s = inf if work.ending == "never" else work.body_s * (1.0 + 0.01 * rank)
        if work.run_timeout_s is not None and work.run_timeout_s < run_s:
            return Body(work.run_timeout_s, _TIMED_OUT, work.heavy)
        return Body(run_s, _ENDINGS[work.ending], work.heavy)

    def waiting_for(self) -> list[JobId]:
        """Jobs that have not ended for their submitters."""
        return [job for _, _, jobs in self._open.values() for job in sorted(jobs)]

    # -- lines -------------------------------------------------------------------------------------------------------

    def _step(self, line: Line, number: int) -> None:
        if number == len(line.steps):
            self._open.pop(line.name, None)
            return
        step = line.steps[number]
        jobs = {JobId(f"{line.name}.{number}.{place}") for place in range(len(step.works))}
        self._open[line.name] = (line, number, jobs)
        self.clock.after(step.pause_s, lambda: self._submit_step(line, number))

    def _submit_step(self, line: Line, number: int) -> None:
        for place, work in enumerate(line.steps[number].works):
            job = JobId(f"{line.name}.{number}.{place}")
            depends = tuple(JobId(f"{line.name}.{number}.{other}") for other in work.depends)
            story = Story(job=job, work=work, line=line.name, depends=depends, submitted_at=self.clock.now)
            self.stories[job] = story
            self.log(
                "submit",
                job=job,
                caller=work.caller,
                sku=work.sku,
                pods=work.pods,
                queue=work.queue,
                tag=work.tag,
                single_use=work.single_use,
                priority=work.priority,
                retries=work.max_retries,
            )
            self._send(story)
            if work.client_lease_s is not None and not work.client_gone:
                self._renew(story)
            if self.dice.strikes(self.dice.plan.cancel):
                self.clock.after(self.dice.between(0.0, 10.0), partial(self._cancel, story))

    def _send(self, story: Story) -> None:
        self.clock.after(self.venue.accept.draw(self.dice.time), lambda: self._arrive(story))

    def _arrive(self, story: Story) -> None:
        if story.answered:
            return
        inputs = [self.stories[job] for job in story.depends]
        refused = next((other.refused for other in inputs if other.refused is not None), None)
        if refused is not None:
            self.refused(story.job, refused)
            return
        desk = self.desk()
        if desk is None or not all(other.answered for other in inputs):
            self.clock.after(RESEND_S, lambda: self._arrive(story))
            return
        work = story.work
        desk.submit(
            Ask(
                job=story.job,
                caller=Caller(work.caller),
                person=Person(f"someone@{work.caller}"),
                sku=Sku(work.sku),
                pods=work.pods,
                queue=Queue(work.queue),
                priority=work.priority,
                tag=None if work.tag is None else ReuseTag(work.tag),
                single_use=work.single_use,
                queue_timeout_s=work.queue_timeout_s,
                run_timeout_s=work.run_timeout_s,
                client_lease_s=work.client_lease_s,
                max_retries=work.max_retries,
                retry_on=work.retry_on,
                depends=story.depends,
                submitted_at=self.clock.now,
            )
        )

    def _cancel(self, story: Story) -> None:
        if story.state is not None or story.refused is not None:
            return
        desk = self.desk()
        if desk is None or not story.answered:
            self.clock.after(RESEND_S, lambda: self._cancel(story))
            return
        self.log("cancel", job=story.job)
        desk.cancel(
            story.job,
            Failure(code="Cancelled", message="the submitter cancelled it", fault=Fault.USER, retryable=False),
        )

    def _renew(self, story: Story) -> None:
        if story.state is not None or story.refused is not None:
            return
        desk = self.desk()
        if desk is not None:
            desk.renew((story.job,))
        assert story.work.client_lease_s is not None
        self.clock.after(story.work.client_lease_s / 3.0, lambda: self._renew(story))

    # -- what a broker says ------------------------------------------------------------------------------------------

    def accepted(self, job: JobId, state: JobState) -> None:
        """The broker answered: durable."""
        self.log("accept", job=job, state=state)
        self.stories[job].answered = True

    def refused(self, job: JobId, failure: Failure) -> None:
        """The broker refused; a retryable store error is tried again."""
        self.log("refuse", job=job, code=failure.code)
        story = self.stories[job]
        if story.answered:
            return
        if failure.code == "StoreUnavailable":
            self.clock.after(RESEND_S, lambda: self._arrive(story))
            return
        story.answered = True
        story.refused = failure
        self._closed(story)

    def ended(self, job: JobId, state: JobState) -> None:
        """The broker tells that a job is terminal."""
        story = self.stories[job]
        if story.state is None:
            story.state = state
            story.ended_at = self.clock.now
            story.answered = True
            self._closed(story)

    def broker_is_back(self) -> None:
        """A new broker answers: send again what the old one never answered."""
        for story in self.stories.values():
            if not story.answered:
                self._send(story)

    def _closed(self, story: Story) -> None:
        line, number, jobs = self._open[story.line]
        jobs.discard(story.job)
        if not jobs:
            self._step(line, number + 1)
