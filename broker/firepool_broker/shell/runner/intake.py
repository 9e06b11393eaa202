"""Submissions: from a validated spec to the engine's `Ask`, one job per idempotency key, dependencies watched.

Policy (queue or refuse, who may run where) is the engine's; validation of fields is the API's.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from firepool_broker.core.asks import Ask, Failure
from firepool_broker.core.events import DependencyEnded, JobSubmitted
from firepool_broker.core.ids import Caller, JobId, Person, Queue, ReuseTag, Sku
from firepool_broker.shell.ports import Identity
from firepool_broker.shell.runner.desk import Accepted, Desk, LiveJob
from firepool_broker.shell.runner.words import failure_of
from firepool_wire.errors import BadRequest, Conflict, FirepoolError, NotFound, from_json
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import TERMINAL, JobState

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_EPOCH_MS = 1_704_067_200_000  # 2024-01-01: 40 bits of milliseconds reach to 2058
_RANDOM_BITS = 30
_ID_CHARS = 14

#: Specs with more inline bytes than this are dropped while their job waits and read again for the launch.
LIGHT_BYTES = 2048
#: Submissions of one batch handled before the loop gets a turn.
_BATCH_STEP = 64


class JobIds:
    """Short ids whose order is the order of their making: 40 bits of milliseconds, then 30 random or counted bits."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, now: float) -> JobId:
        """An id above every earlier one of this broker, also when the clock stands still."""
        fresh = ((int(now * 1000) - _EPOCH_MS) << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
        # Within one millisecond the random part is counted up instead of drawn again, which keeps ids distinct.
        same_ms = fresh >> _RANDOM_BITS <= self._last >> _RANDOM_BITS
        self._last = value = self._last + 1 if same_ms else fresh
        chars = [""] * _ID_CHARS
        for place in range(_ID_CHARS - 1, -1, -1):
            chars[place] = _ALPHABET[value & 31]
            value >>= 5
        return JobId("".join(chars))


def requirements_key(spec: JobSpec) -> str:
    """What two jobs must share for a pod's installed dependencies to serve both: the requirement text."""
    return spec.requirements.text if spec.requirements is not None else ""


def ask_of(spec: JobSpec, who: Identity, job: JobId, submitted_at: float) -> Ask:
    """The part of a spec that decisions need."""
    function = spec.entrypoint.function
    return Ask(
        job=job,
        caller=Caller(who.caller),
        person=Person(who.person),
        sku=Sku(spec.sku),
        pods=spec.pods,
        queue=Queue(spec.queue),
        priority=spec.priority,
        tag=ReuseTag(spec.lease_tag) if spec.lease_tag is not None else None,
        single_use=spec.single_use,
        preemptible=spec.preemptible,
        requirements=requirements_key(spec),
        isolation=spec.isolation or "",
        queue_timeout_s=spec.queue_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        run_timeout_s=spec.run_timeout_s,
        client_lease_s=spec.client_lease_s,
        max_retries=spec.max_retries,
        retry_on=spec.retry_on,
        depends=tuple(JobId(d) for d in function.depends) if function is not None else (),
        submitted_at=submitted_at,
    )


def lighten(live: LiveJob) -> None:
    """Drop a stored job's inline arguments while it waits: 100,000 waiting jobs must fit in memory."""
    spec = live.spec
    function = spec.entrypoint.function
    if live.light or function is None or function.args is None or len(function.args) <= LIGHT_BYTES:
        return
    live.spec = replace(spec, entrypoint=replace(spec.entrypoint, function=replace(function, args=None)))
    live.light = True


class Intake:
    """Turns submissions into events and keeps the table of idempotency keys and dependents."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._ids = JobIds()
        #: Live dependency → jobs that wait for it.
        self._dependents: dict[JobId, set[JobId]] = {}

    async def submit(self, who: Identity, spec: JobSpec, body_digest: str) -> Accepted:
        """Submit one job; answers once it is durable. Raises: FirepoolError."""
        answer, joined = await self._begin(who, spec, body_digest)
        # Shielded: a client that hangs up does not take back what it asked for.
        accepted = await asyncio.shield(answer)
        return replace(accepted, replayed=True) if joined else accepted

    async def submit_many(self, who: Identity, specs: Sequence[tuple[JobSpec, str]]) -> list[Accepted | FirepoolError]:
        """Submit a batch; its writes gather in the store's next commits. Every job succeeds or fails on its own."""
        begun: list[tuple[asyncio.Future[Accepted], bool] | FirepoolError] = []
        for n, (spec, digest) in enumerate(specs):
            if n and n % _BATCH_STEP == 0:
                await asyncio.sleep(0)
            try:
                begun.append(await self._begin(who, spec, digest))
            except FirepoolError as error:
                begun.append(error)
        results: list[Accepted | FirepoolError] = []
        for entry in begun:
            if isinstance(entry, FirepoolError):
                results.append(entry)
                continue
            answer, joined = entry
            try:
                accepted = await asyncio.shield(answer)
            except FirepoolError as error:
                results.append(error)
            else:
                results.append(replace(accepted, replayed=True) if joined else accepted)
        return results

    async def _begin(self, who: Identity, spec: JobSpec, body_digest: str) -> "tuple[asyncio.Future[Accepted], bool]":
        caller, key = Caller(who.caller), spec.idempotency_key
        if key is not None:
            first = self._desk.jobs.get(self._desk.keys.get((caller, key), JobId("")))
            if first is not None:
                return await self._join(first, body_digest), True
        function = spec.entrypoint.function
        ended: list[tuple[JobId, Failure | None]] = []
        if function is not None and function.depends:
            ended = await self.settled(caller, [JobId(d) for d in function.depends])
        now = self._desk.clock.now()
        job = self._ids.new(now)
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_retrieve)
        live = LiveJob(
            ask=ask_of(spec, who, job, now),
            spec=spec,
            body_digest=body_digest,
            argv=spec.entrypoint.argv is not None,
            state=JobState.QUEUED,
            answer=answer,
        )
        self.admit(live)
        self._desk.emit(JobSubmitted(live.ask))
        for dependency, failure in ended:
            self._desk.emit(DependencyEnded(job, dependency, failure))
        return answer, False

    async def _join(self, first: LiveJob, body_digest: str) -> "asyncio.Future[Accepted]":
        key = first.spec.idempotency_key
        if not first.body_digest and key is not None:  # found at a start: only the store knows the body's digest
            known = await self._desk.parts.store.by_key(first.ask.caller, key)
            first.body_digest = known[1] if known is not None else ""
        if first.body_digest != body_digest:
            raise key_conflict(first.ask.job)
        if first.answer is not None:
            return first.answer
        done: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        done.set_result(Accepted(first.ask.job, first.state, True))
        return done

    def admit(self, live: LiveJob) -> None:
        """Enter a job in the tables; its dependencies that are live will tell when they end."""
        desk, job = self._desk, live.ask.job
        desk.jobs[job] = live
        if live.spec.idempotency_key is not None:
            desk.keys[live.ask.caller, live.spec.idempotency_key] = job
        for dependency in live.ask.depends:
            if dependency in desk.jobs:
                self._dependents.setdefault(dependency, set()).add(job)

    def drop(self, live: LiveJob, failure: Failure | None) -> None:
        """Forget a job that is durable in a terminal state (or was refused) and tell who depends on it."""
        desk, job = self._desk, live.ask.job
        desk.jobs.pop(job, None)
        key = live.spec.idempotency_key
        if key is not None and desk.keys.get((live.ask.caller, key)) == job:
            del desk.keys[live.ask.caller, key]
        for dependency in live.ask.depends:
            if dependency in self._dependents:
                self._dependents[dependency].discard(job)
        for dependent in self._dependents.pop(job, ()):
            desk.emit(DependencyEnded(dependent, job, failure))

    async def settled(self, caller: Caller, depends: Sequence[JobId]) -> list[tuple[JobId, Failure | None]]:
        """Which of the dependencies have ended already, and how.

        Raises:
            NotFound: the caller has no such job.
        """
        desk = self._desk
        foreign = [d for d in depends if d in desk.jobs and desk.jobs[d].ask.caller != caller]
        rows = {row.job: row for row in await desk.parts.store.get_many([d for d in depends if d not in desk.jobs])}
        ended: list[tuple[JobId, Failure | None]] = []
        for dependency in depends:
            if dependency in desk.jobs and dependency not in foreign:
                continue
            row = rows.get(dependency)
            if row is None or row.caller != caller:
                raise NotFound(f"no job {dependency!r} whose result could be an argument", field="depends")
            if row.state not in TERMINAL:
                raise BadRequest(f"job {dependency!r} ended while it was looked up; submit again", field="depends")
            ended.append((dependency, dependency_failure(row.state, row.facts.get("error"))))
        return ended

    async def replay(self, live: LiveJob, existing: str) -> None:
        """The store knows the key: answer with the job that has it, or refuse another body."""
        desk, key = self._desk, live.spec.idempotency_key
        assert live.answer is not None, "only a submission can meet a taken key"
        assert key is not None, "only a key can be taken"
        known = await desk.parts.store.by_key(live.ask.caller, key)
        row = await desk.parts.store.get(existing)
        if known is None or row is None or known[1] != live.body_digest:
            live.answer.set_exception(key_conflict(existing))
            return
        desk.metrics.replayed.inc()
        live.answer.set_result(Accepted(existing, row.state, True))


def key_conflict(job: str) -> Conflict:
    """The key was used before, with another body."""
    return Conflict(f"the idempotency key belongs to job {job} with another body; use a new key", job_id=job)


def dependency_failure(state: JobState, error: dict[str, object] | None) -> Failure | None:
    """How a terminal job looks to one that wants its result; None = the result is there."""
    if state is JobState.SUCCEEDED:
        return None
    return failure_of(from_json(error or {"code": "Cancelled", "message": f"the job ended as {state}"}))


def _retrieve(answer: "asyncio.Future[Accepted]") -> None:
    """A refusal that nobody waits for any more is not a warning."""
    if not answer.cancelled():
        answer.exception()
