"""Effects that are one call to an agent: prepare, abandon, stop, probe, reset. Answers become events.

Launching and following an attempt live in `follow`; what an unanswered call means for a pod in `pods`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import AbandonLease, PrepareLease, ProbeAttempt, ResetPod, StopAttempt
from firepool_broker.core.events import (
    AttemptProbed,
    Event,
    LeasePrepared,
    LeasePrepareFailed,
    PodSettled,
    ResetClean,
    ResetUnclean,
)
from firepool_broker.core.ids import AttemptId, PodName, job_of
from firepool_broker.shell.ports import AgentUnreachable
from firepool_broker.shell.runner.desk import Desk, LivePod
from firepool_broker.shell.runner.follow import Follow
from firepool_broker.shell.runner.pods import Pods
from firepool_broker.shell.runner.words import error_of, exit_of, failure_of, internal
from firepool_wire.agentapi import AttemptStatus, Prepare, Reset, ResetReport, Stop
from firepool_wire.errors import Conflict, FirepoolError, HostLost

#: An agent refuses a prepare that reaches it later than this. Raise: slow hosts; a hung agent keeps its claim longer.
PREPARE_DEADLINE_S = 5.0
PROBES, PROBE_GAP_S = 3, 0.5
RETRY_S = 0.5
RETRY_MOST_S = 5.0
DEFAULT_RESET_WAIT_S = 5.0


class Calls:
    """Carries the agents' simple effects out."""

    def __init__(self, desk: Desk, pods: Pods, follow: Follow) -> None:
        self._desk = desk
        self._pods = pods
        self._follow = follow

    # -- before the commit ---------------------------------------------------------------------------------------------

    def prepare(self, effect: PrepareLease) -> None:
        """Have the agent record who will run and fork the process that waits."""

        def failed(error: Exception) -> LeasePrepareFailed:
            return LeasePrepareFailed(effect.attempt, effect.pod, failure_of(internal(error, "preparing")))

        self._in_turn(effect.pod, self._prepare(effect), "preparing a lease", failed)

    def _in_turn(
        self,
        name: PodName,
        work: Coroutine[Any, Any, None],
        doing: str,
        otherwise: Callable[[Exception], Event | None] | None = None,
    ) -> None:
        """Calls that change whose the pod is reach its agent in the order of their effects."""
        pod = self._desk.pods.get(name)
        if pod is None:
            self._desk.spawn(work, doing, otherwise)
            return
        before = pod.turn
        if before is not None and not before.done():
            work = _after(before, work)
        pod.turn = self._desk.spawn(work, doing, otherwise)

    async def _prepare(self, effect: PrepareLease) -> None:
        desk, pod = self._desk, self._desk.pods.get(effect.pod)
        live = desk.jobs.get(job_of(effect.attempt))
        message = Prepare(
            caller=effect.caller,
            person=effect.person,
            queue=effect.queue,
            tag=effect.tag,
            deadline_s=desk.clock.deadline(PREPARE_DEADLINE_S),
            start="exec" if live is not None and live.argv else "fork",
        )
        try:
            if pod is None:
                raise HostLost(f"pod {effect.pod} is not there any more")
            await desk.parts.agents.prepare(pod.address, effect.attempt, message)
        except AgentUnreachable as error:
            desk.metrics.strikes.labels("prepare").inc()
            self._not_prepared(effect, HostLost(f"the agent of pod {effect.pod} did not prepare: {error}"))
        except FirepoolError as error:
            self._not_prepared(effect, error)
        else:
            desk.emit(LeasePrepared(effect.attempt, effect.pod))

    def _not_prepared(self, effect: PrepareLease, error: FirepoolError) -> None:
        self._desk.log.warning(
            "not prepared", attempt=effect.attempt, pod=effect.pod, code=error.code, cause=error.message
        )
        self._desk.emit(LeasePrepareFailed(effect.attempt, effect.pod, failure_of(error)))

    def abandon(self, effect: AbandonLease) -> None:
        """Undo a prepare that will not be launched."""
        self._in_turn(effect.pod, self._abandon(effect), "abandoning a lease")

    async def _abandon(self, effect: AbandonLease) -> None:
        pod = self._desk.pods.get(effect.pod)
        if pod is None:
            return
        try:
            await self._desk.parts.agents.abandon(pod.address, effect.attempt)
        except AgentUnreachable as error:
            self._pods.strike(pod, "abandon", error)
        except FirepoolError as error:  # it never saw the prepare: nothing is there to undo
            self._desk.log.info("nothing to abandon", attempt=effect.attempt, pod=effect.pod, cause=str(error))

    # -- while it runs -------------------------------------------------------------------------------------------------

    def stop(self, effect: StopAttempt) -> None:
        """End the attempt on one pod; how it ended comes with its events. Repeated until the agent heard it."""
        self._desk.spawn(self._stop(effect), "stopping an attempt")

    async def _stop(self, effect: StopAttempt) -> None:
        desk, pod = self._desk, self._desk.pods.get(effect.pod)
        if pod is None:
            return
        live = desk.jobs.get(job_of(effect.attempt))
        error = error_of(effect.failure, job_of(effect.attempt)).to_json()
        message = Stop(grace_s=live.spec.grace_s if live is not None else 2.0, error=error)
        pause_s = RETRY_S
        while not pod.gone.is_set() and not self._follow.ended(effect.attempt, effect.pod):
            try:
                await desk.parts.agents.stop(pod.address, effect.attempt, message)
            except AgentUnreachable as why:
                self._pods.strike(pod, "stop", why)
            except FirepoolError as why:
                desk.log.info("nothing to stop", attempt=effect.attempt, pod=effect.pod, cause=str(why))
                return
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)

    # -- after a start of the broker -----------------------------------------------------------------------------------

    def probe(self, effect: ProbeAttempt) -> None:
        """Ask what the agent knows of an attempt that the store says runs."""
        self._desk.spawn(
            self._probe(effect),
            "probing an attempt",
            lambda error: AttemptProbed(effect.attempt, effect.pod, "unreachable", None, str(error)),
        )

    async def _probe(self, effect: ProbeAttempt) -> None:
        attempt, name = effect.attempt, effect.pod
        pod = self._desk.pods.get(name)
        if pod is None or pod.gone.is_set():
            self._desk.emit(AttemptProbed(attempt, name, "gone"))
            return
        status = await self._ask(pod, attempt)
        if isinstance(status, AgentUnreachable):
            self._pods.strike(pod, "probe", status)
            self._desk.emit(AttemptProbed(attempt, name, "unreachable", None, str(status)))
        elif status.state == "running":
            self._desk.emit(AttemptProbed(attempt, name, "live"))
        elif status.state == "ended":
            run = await self._follow.collect(attempt, pod)
            if run.exit is not None:
                self._desk.emit(AttemptProbed(attempt, name, "ended", exit_of(run.exit)))
            else:
                self._desk.emit(AttemptProbed(attempt, name, "gone", None, "the pod went while its records were read"))
        else:
            self._desk.emit(AttemptProbed(attempt, name, "unknown", None, "it was never launched"))

    async def _ask(self, pod: LivePod, attempt: AttemptId) -> AttemptStatus | AgentUnreachable:
        last: AgentUnreachable | None = None
        for n in range(PROBES):
            if n:
                await asyncio.sleep(PROBE_GAP_S)
            try:
                status = await self._desk.parts.agents.status(pod.address, attempt)
                if status.state == "prepared":
                    # Never launched: undone, it cannot start any more.
                    await self._desk.parts.agents.abandon(pod.address, attempt)
                return status
            except Conflict:  # its launch is under way right now (installing): its event log tells how that goes
                return AttemptStatus(state="running")
            except AgentUnreachable as error:
                last = error
            except FirepoolError as error:
                last = AgentUnreachable(f"the agent answered {error.code}: {error.message}")
        assert last is not None, "every probe either answered or failed"
        return last

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def reset(self, effect: ResetPod) -> None:
        """Clean the pod and have it proved."""
        self._in_turn(
            effect.pod,
            self._reset(effect),
            "resetting a pod",
            lambda error: ResetUnclean(effect.pod, effect.attempt, f"the reset failed: {error}"),
        )

    async def _reset(self, effect: ResetPod) -> None:
        desk, pod = self._desk, self._desk.pods.get(effect.pod)
        if pod is None:
            desk.emit(ResetUnclean(effect.pod, effect.attempt, "the pod is not there any more"))
            return
        pool = desk.pools.get(pod.sku)
        wait_s = pool.reset_wait_s if pool is not None else DEFAULT_RESET_WAIT_S
        try:
            if not self._follow.knows(effect.attempt, effect.pod):
                # Prepared, committed in vain (cancelled meanwhile), never launched: undone first. Else it has ended.
                with suppress(FirepoolError):
                    await desk.parts.agents.abandon(pod.address, effect.attempt)
            report = await desk.parts.agents.reset(pod.address, Reset(attempt=effect.attempt, wait_s=wait_s))
        except AgentUnreachable as error:
            desk.metrics.strikes.labels("reset").inc()
            desk.emit(ResetUnclean(effect.pod, effect.attempt, f"the agent did not answer: {error}"))
            return
        except FirepoolError as error:
            desk.emit(ResetUnclean(effect.pod, effect.attempt, f"{error.code}: {error.message}"))
            return
        desk.metrics.resets.labels(str(report.clean).lower()).inc()
        desk.metrics.reset_s.observe(report.took_ms / 1000)
        if not report.clean:
            desk.emit(ResetUnclean(effect.pod, effect.attempt, problems_in_words(report)))
            return
        settling = report.settling_bytes > 0
        desk.emit(ResetClean(effect.pod, effect.attempt, settling, tuple(report.layers)))
        if settling:
            await self._settle(pod, effect)

    async def _settle(self, pod: LivePod, effect: ResetPod) -> None:
        while not pod.gone.is_set():
            try:
                await self._desk.parts.agents.settled(pod.address)
            except AgentUnreachable as error:
                self._pods.strike(pod, "settled", error)
                await asyncio.sleep(RETRY_S)
            except FirepoolError as error:
                self._desk.emit(ResetUnclean(effect.pod, effect.attempt, error.message))
                return
            else:
                self._desk.emit(PodSettled(effect.pod))
                return

    def ack(self, attempt: AttemptId, pods: list[PodName]) -> None:
        """The end is durable: the agents may drop their records."""
        self._desk.spawn(self._ack(attempt, pods), "acknowledging an attempt")

    async def _ack(self, attempt: AttemptId, pods: list[PodName]) -> None:
        for name in pods:
            pod = self._desk.pods.get(name)
            if pod is None or pod.gone.is_set():
                continue
            try:
                await self._desk.parts.agents.ack(pod.address, attempt)
            except (AgentUnreachable, FirepoolError) as error:  # the next start of the broker acknowledges again
                self._desk.log.info("not acknowledged", attempt=attempt, pod=name, cause=str(error))


async def _after(before: "asyncio.Task[None]", work: Coroutine[Any, Any, None]) -> None:
    try:
        await asyncio.wait((before,))
    except asyncio.CancelledError:
        work.close()
        raise
    await work


def problems_in_words(report: ResetReport) -> str:
    """What a reset could not confirm, for `explain`."""
    lines = [f"{p.get('what', '?')} at {p.get('where', '?')}: {p.get('detail', '')}" for p in report.problems]
    return "; ".join(lines) or "the agent did not say what"


def lost(pod: PodName, why: str) -> Failure:
    """The attempt's host was lost."""
    return failure_of(HostLost(f"pod {pod} was lost: {why}"))
