"""The facts of a start: live pods, what their agents and annotations say, unfinished jobs, newest bindings.

Gathered once, told to the engine as `BrokerStarted`; what follows from them is the engine's. Nothing is decided here
except who is still there to be asked.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from firepool_broker.core.asks import FoundJob, FoundPod, LastUse
from firepool_broker.core.events import BrokerStarted, DependencyEnded
from firepool_broker.core.ids import AttemptId, Caller, JobId, PodName, Queue, ReuseTag, Sku, TemplateDigest
from firepool_broker.shell.ports import AgentUnreachable, Identity, JobRow, PodProvider, PodSeen
from firepool_broker.shell.runner import marks
from firepool_broker.shell.runner.calls import Calls
from firepool_broker.shell.runner.desk import Desk, LiveJob
from firepool_broker.shell.runner.intake import Intake, ask_of, lighten
from firepool_broker.shell.runner.pods import Pods, cards_of
from firepool_broker.shell.runner.words import failure_of
from firepool_wire.agentapi import Hello
from firepool_wire.errors import FirepoolError
from firepool_wire.words import JobState, Path

#: Agents asked at once. Raise: a shorter start on large fleets; costs a file descriptor each.
GREET_AT_ONCE = 256


class Start:
    """Gathers the facts and tells them."""

    def __init__(self, desk: Desk, intake: Intake, pods: Pods, calls: Calls) -> None:
        self._desk = desk
        self._intake = intake
        self._pods = pods
        self._calls = calls
        self._greeting = asyncio.Semaphore(GREET_AT_ONCE)

    async def tell(self) -> None:
        """Read the store, list the pods, greet their agents, and hand the engine what was found."""
        desk, store = self._desk, self._desk.parts.store
        rows = await store.unfinished()
        seen = [(provider, pod) for provider in desk.parts.providers.values() for pod in await provider.list_pods()]
        hellos = await asyncio.gather(*(self._greet(provider, pod) for provider, pod in seen))
        jobs = tuple(self._found_job(row) for row in rows)
        pods = tuple(self._found_pod(pod, hello) for (_, pod), hello in zip(seen, hellos, strict=True))
        bindings = tuple(await store.bindings([pod.name for _, pod in seen]))
        settled = [await self._settled(row) for row in rows if row.state is JobState.PENDING]
        desk.log.info("found", jobs=len(jobs), pods=len(pods), answered=sum(h is not None for h in hellos))
        desk.emit(BrokerStarted(pods, jobs, bindings))
        for event in itertools.chain.from_iterable(settled):
            desk.emit(event)
        self._acknowledge(rows, [(pod, hello) for (_, pod), hello in zip(seen, hellos, strict=True)])

    async def _greet(self, provider: PodProvider, pod: PodSeen) -> Hello | None:
        live = self._pods.seen(provider, pod)
        if not pod.ready or pod.terminating:
            return None
        try:
            async with self._greeting:
                live.hello = await self._desk.parts.agents.hello(pod.address)
        except (AgentUnreachable, FirepoolError) as error:
            self._desk.log.warning("no hello at the start", pod=pod.name, cause=str(error))
        return live.hello

    def _found_pod(self, pod: PodSeen, hello: Hello | None) -> FoundPod:
        return FoundPod(
            pod=PodName(pod.name),
            sku=Sku(pod.sku),
            template=TemplateDigest(pod.template),
            created_at=pod.created_at,
            ready=pod.ready,
            single_use=pod.single_use,
            cards=cards_of(hello) if hello is not None else (),
            isolation=hello.isolation if hello is not None else "",
            annotated=marks.last_use(pod.annotations),
            agent=agent_says(hello.last_user) if hello is not None else None,
            agent_answered=hello is not None,
            terminating=pod.terminating,
        )

    def _found_job(self, row: JobRow) -> FoundJob:
        ask = ask_of(row.spec, Identity(caller=row.caller, person=row.person), JobId(row.job), row.submitted_at)
        live = LiveJob(
            ask=ask,
            spec=row.spec,
            body_digest="",
            argv=row.spec.entrypoint.argv is not None,
            state=row.state,
            stored=True,
            version=row.version,
            seq=row.seq,
            retry_count=row.retry_count,
            infra_retries=row.infra_retries,
            path=row.path,
            why_not_warmer=row.why_not_warmer,
            cancel_requested=row.cancel_requested,
            pods=tuple(PodName(p) for p in row.pods),
            retire_after=row.retire_after,
        )
        lighten(live)
        self._intake.admit(live)
        return FoundJob(
            ask=ask,
            state=row.state,
            retry_count=row.retry_count,
            version=row.version,
            infra_retries=row.infra_retries,
            cancel_requested=row.cancel_requested,
            pods=live.pods if row.state is JobState.RUNNING else (),
            path=Path(row.path) if row.path else None,
            retire_after=any(row.retire_after),
            why_not_warmer=row.why_not_warmer,
            # The start was the last change of a running row that raised its time.
            started_at=row.updated_at if row.state is JobState.RUNNING else None,
        )

    async def _settled(self, row: JobRow) -> list[DependencyEnded]:
        live = self._desk.jobs[JobId(row.job)]
        try:
            ended = await self._intake.settled(Caller(row.caller), live.ask.depends)
        except FirepoolError as error:  # its row went (retention): the job waits for what cannot come
            return [DependencyEnded(JobId(row.job), live.ask.depends[0], failure_of(error))]
        return [DependencyEnded(JobId(row.job), dependency, failure) for dependency, failure in ended]

    def _acknowledge(self, rows: Sequence[JobRow], greeted: Sequence[tuple[PodSeen, Hello | None]]) -> None:
        """Agents that hold records of attempts whose end is durable may drop them."""
        running = {row.attempt for row in rows if row.state is JobState.RUNNING}
        for pod, hello in greeted:
            for attempt in hello.attempts if hello is not None else ():
                if attempt not in running:
                    self._calls.ack(AttemptId(attempt), [PodName(pod.name)])


def agent_says(last_user: Mapping[str, Any] | None) -> LastUse | None:
    """Who used the pod last, from the agent's own disk; None = never used."""
    if last_user is None:
        return None
    tag = last_user.get("tag")
    return LastUse(
        caller=Caller(str(last_user["caller"])),
        queue=Queue(str(last_user.get("queue", "default"))),
        tag=ReuseTag(tag) if tag is not None else None,
        released_at=last_user.get("released_at"),
    )
