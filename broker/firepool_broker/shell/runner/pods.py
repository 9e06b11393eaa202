"""Pods as the shell sees them: orders to their provider, what the provider reports, and whether their agents answer.

A pod is ready when its agent answered `hello`. An agent that does not answer is struck and asked again until it answers
(same boot: reachable; another boot: everything believed of the pod is void, it is unmade) or its pod is verified gone.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import CreatePod, DeletePod, MarkReleased, MarkRunning
from firepool_broker.core.events import PodCreateFailed, PodGone, PodReachable, PodReady, PodUnreachable
from firepool_broker.core.ids import Card, PodName
from firepool_broker.shell.ports import (
    AgentUnreachable,
    PodBecameReady,
    PodEnded,
    PodFact,
    PodFailed,
    PodOrder,
    PodProvider,
    PodSeen,
)
from firepool_broker.shell.runner import marks
from firepool_broker.shell.runner.desk import Desk, LivePod
from firepool_broker.shell.runner.words import failure_of, internal
from firepool_wire.agentapi import Hello
from firepool_wire.errors import FirepoolError, HostLost, Internal, from_json

#: A struck agent is asked again after this, and then less often.
ASK_AGAIN_S, ASK_AGAIN_MOST_S = 0.5, 5.0
#: A pod said to be ready whose agent does not answer for this long has failed to start.
HELLO_PATIENCE_S = 10.0
#: When a pod ends, readers of its last frames may finish first; they see the end of their sockets at once.
READERS_GRACE_S = 1.0
#: Annotations gather for this long, so that a short job costs its pod one patch. Raise: fewer patches; after a crash
#: the cheap witness is older (the store and the agent still know).
ANNOTATE_AFTER_S = 0.05


class Pods:
    """Carries pod orders out and turns providers' facts into events."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._annotations: dict[PodName, dict[str, str | None]] = {}
        self._flush_due = False

    # -- orders --------------------------------------------------------------------------------------------------------

    def create(self, effect: CreatePod) -> None:
        """Order a pod; idempotent by name."""

        def failed(error: Exception) -> PodCreateFailed:
            return PodCreateFailed(effect.pod, failure_of(internal(error, "creating a pod")))

        self._desk.spawn(self._create(effect), "creating a pod", failed)

    async def _create(self, effect: CreatePod) -> None:
        desk, pool = self._desk, self._desk.pools.get(effect.sku)
        provider = desk.parts.providers.get(pool.provider) if pool is not None else None
        if pool is None or provider is None:
            self._failed(effect.pod, effect.sku, failure_of(Internal(f"no provider makes pods of {effect.sku!r}")))
            return
        desk.pods[effect.pod] = LivePod(name=effect.pod, sku=effect.sku, provider=provider)
        order = PodOrder(name=effect.pod, pool=pool, template=effect.template, single_use=effect.single_use)
        try:
            await provider.create(order)
        except FirepoolError as error:
            self._failed(effect.pod, effect.sku, failure_of(error))

    def delete(self, effect: DeletePod) -> None:
        """Have the pod unmade; `PodGone` comes once that is verified. Repeated until the provider heard it."""
        self._desk.spawn(self._delete(effect), "deleting a pod")

    async def _delete(self, effect: DeletePod) -> None:
        desk, pod, pause_s = self._desk, self._desk.pods.get(effect.pod), ASK_AGAIN_S
        self._annotations.pop(effect.pod, None)
        if pod is None:  # never made, or gone already
            desk.emit(PodGone(effect.pod, "it does not exist"))
            return
        while not pod.gone.is_set():
            try:
                await pod.provider.delete(effect.pod, effect.why)
            except FirepoolError as error:
                desk.log.warning("pod not deleted", pod=effect.pod, cause=str(error))
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, ASK_AGAIN_MOST_S)

    def mark_running(self, effect: MarkRunning) -> None:
        """Note the owner in the pod's annotations (best effort)."""
        self._annotate(effect.pod, marks.running(effect))

    def mark_released(self, effect: MarkReleased) -> None:
        """Note release and hold deadline in the pod's annotations (best effort)."""
        self._annotate(effect.pod, marks.released(effect))

    def _annotate(self, pod: PodName, annotations: dict[str, str | None]) -> None:
        self._annotations.setdefault(pod, {}).update(annotations)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(ANNOTATE_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        waiting, self._annotations = self._annotations, {}
        if waiting and not self._desk.closing:
            self._desk.spawn(self._patch(waiting), "annotating pods")

    async def _patch(self, waiting: Mapping[PodName, Mapping[str, str | None]]) -> None:
        for name, annotations in waiting.items():
            pod = self._desk.pods.get(name)
            if pod is None or pod.gone.is_set():
                continue
            try:
                await pod.provider.annotate(name, annotations)
            except FirepoolError as error:  # a cheap copy only: store and agent are the witnesses that count
                self._desk.log.info("not annotated", pod=name, cause=str(error))

    # -- what providers report -----------------------------------------------------------------------------------------

    def watch(self, provider: PodProvider) -> "asyncio.Task[None]":
        """Follow a provider's facts until the broker stops."""
        return self._desk.spawn(self._facts(provider), "following a pod provider")

    async def _facts(self, provider: PodProvider) -> None:
        async for fact in provider.facts():
            self.happened(provider, fact)

    def happened(self, provider: PodProvider, fact: PodFact) -> None:
        """One fact about a pod."""
        match fact:
            case PodBecameReady(pod=seen):
                self._desk.spawn(
                    self._greet(provider, seen),
                    "greeting a pod",
                    lambda error: PodCreateFailed(PodName(seen.name), failure_of(internal(error, "greeting a pod"))),
                )
            case PodEnded(name=name, why=why, oom=oom):
                self._desk.spawn(self._ended(PodName(name), why, oom), "a pod's end")
            case PodFailed(name=name, error=error):
                pod = self._desk.pods.get(PodName(name))
                self._failed(PodName(name), pod.sku if pod is not None else "", failure_of(from_json(error)))

    async def _greet(self, provider: PodProvider, seen: PodSeen) -> None:
        name = PodName(seen.name)
        pod = self.seen(provider, seen)
        hello = await self._patient_hello(pod)
        if pod.gone.is_set():
            return
        if hello is None:
            why = f"its agent did not answer within {HELLO_PATIENCE_S:g} s"
            self._failed(name, pod.sku, failure_of(HostLost(f"pod {name} did not come up: {why}")), keep=True)
            await provider.delete(name, why)
            return
        pod.hello = hello
        self._desk.metrics.pods_created.labels(pod.sku).inc()
        self._desk.emit(PodReady(name, cards_of(hello), hello.isolation))

    async def _patient_hello(self, pod: LivePod) -> Hello | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + HELLO_PATIENCE_S
        while not pod.gone.is_set() and loop.time() < until:
            try:
                return await self._desk.parts.agents.hello(pod.address)
            except (AgentUnreachable, FirepoolError) as error:
                self._desk.log.info("no hello yet", pod=pod.name, cause=str(error))
                await asyncio.sleep(ASK_AGAIN_S / 5)
        return None

    def seen(self, provider: PodProvider, seen: PodSeen) -> LivePod:
        """The pod's entry, with the address that the provider sees."""
        name = PodName(seen.name)
        pod = self._desk.pods.get(name)
        if pod is None:
            pod = self._desk.pods[name] = LivePod(name=name, sku=seen.sku, provider=provider)
        pod.address = seen.address
        return pod

    async def _ended(self, name: PodName, why: str, oom: bool) -> None:
        desk, pod = self._desk, self._desk.pods.get(name)
        if pod is not None:
            pod.gone.set()
            if pod.readers:
                await asyncio.wait(set(pod.readers), timeout=READERS_GRACE_S)
            for reader in list(pod.readers):
                reader.cancel()
            self._forget(pod)
        desk.metrics.pods_gone.inc()
        desk.emit(PodGone(name, why, oom))

    def _failed(self, name: PodName, sku: str, failure: Failure, *, keep: bool = False) -> None:
        pod = self._desk.pods.get(name)
        if pod is not None and not keep:
            self._forget(pod)
        self._desk.metrics.pods_failed.labels(sku).inc()
        self._desk.log.warning("pod failed", pod=name, sku=sku, cause=failure.message)
        self._desk.emit(PodCreateFailed(name, failure))

    def _forget(self, pod: LivePod) -> None:
        pod.gone.set()
        self._desk.pods.pop(pod.name, None)
        self._desk.parts.agents.forget(pod.address)

    # -- agents that do not answer -------------------------------------------------------------------------------------

    def strike(self, pod: LivePod, call: str, error: AgentUnreachable) -> None:
        """A call's outcome is unknown. Neither this nor a refusal proves the job dead."""
        desk = self._desk
        desk.metrics.strikes.labels(call).inc()
        if pod.gone.is_set():
            return
        desk.log.warning("agent unreachable", pod=pod.name, call=call, cause=str(error), refused=error.refused)
        desk.emit(PodUnreachable(pod.name, f"{call}: {error}"))
        if pod.struck_at is None:
            pod.struck_at = desk.clock.now()
            desk.spawn(self._ask_again(pod), "asking a struck agent again")

    async def _ask_again(self, pod: LivePod) -> None:
        desk, pause_s = self._desk, ASK_AGAIN_S
        while not pod.gone.is_set():
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, ASK_AGAIN_MOST_S)
            try:
                hello = await desk.parts.agents.hello(pod.address)
            except (AgentUnreachable, FirepoolError) as error:
                desk.log.info("still unreachable", pod=pod.name, cause=str(error))
                continue
            pod.struck_at = None
            if pod.hello is not None and hello.boot_id != pod.hello.boot_id:
                await self.another_boot(pod, hello)
            else:
                pod.hello = hello
                desk.emit(PodReachable(pod.name))
            return

    async def another_boot(self, pod: LivePod, hello: Hello) -> None:
        """The agent is PID 1: another boot means that whatever ran before is dead. The pod is not trusted any further."""
        why = f"its agent booted anew ({hello.boot_id})"
        self._desk.log.warning("another boot", pod=pod.name, boot=hello.boot_id)
        self._forget(pod)
        self._desk.emit(PodGone(pod.name, why))
        await pod.provider.delete(pod.name, why)

    # -- what the API shows --------------------------------------------------------------------------------------------

    def interpreters(self) -> Sequence[dict[str, Any]]:
        """Job interpreters by SKU, as the agents said."""
        found = {
            (pod.sku, pod.hello.python): {
                "sku": pod.sku,
                "python": pod.hello.python,
                "version": pod.hello.python_version,
                "pickle": pod.hello.pickle,
            }
            for pod in self._desk.pods.values()
            if pod.hello is not None
        }
        return list(found.values())


def cards_of(hello: Hello) -> tuple[Card, ...]:
    """The cards that the agent sees."""
    return tuple(Card(str(card["uuid"])) for card in hello.cards)
