"""What a pod provider must do, in sentences; run against the local provider, every fake, and out-of-tree ones.

A test file subclasses `ProviderConformance` and provides one async fixture, `world`: an object with

    new_provider()       a provider that was not started yet; a second one over the same world plays the next broker's
    order(name, **more)  a `PodOrder` that the world can serve
    kill(name)           coroutine: end a pod's processes behind the provider's back

The fixture closes every provider that it made and leaves no pod behind.
"""

import asyncio
from typing import Any, Protocol

import pytest

from firepool_broker.shell.ports import (
    PORT_VERSION,
    PodBecameReady,
    PodEnded,
    PodFact,
    PodFailed,
    PodOrder,
    PodProvider,
    PodSeen,
)

PATIENCE_S = 30.0


class World(Protocol):
    """What the fixture gives."""

    def new_provider(self) -> PodProvider: ...
    def order(self, name: str, **more: Any) -> PodOrder: ...
    async def kill(self, name: str) -> None: ...


class Witness:
    """Consumes a provider's facts and waits for those that a test is about."""

    def __init__(self, provider: PodProvider) -> None:
        self.seen: list[PodFact] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._watch(provider))

    async def _watch(self, provider: PodProvider) -> None:
        async for fact in provider.facts():
            self.seen.append(fact)
            self._changed.set()

    async def ready(self, name: str) -> PodSeen:
        """The pod, once it became ready."""
        while True:
            for fact in self.seen:
                if isinstance(fact, PodBecameReady) and fact.pod.name == name:
                    return fact.pod
                assert not (isinstance(fact, PodFailed) and fact.name == name), f"{name} failed: {fact}"
            await self._next(f"{name} to become ready")

    async def ended(self, name: str) -> PodEnded:
        """The pod's end."""
        while True:
            for fact in self.seen:
                if isinstance(fact, PodEnded) and fact.name == name:
                    return fact
            await self._next(f"{name} to end")

    async def _next(self, what: str) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE_S:g} s for {what}; saw {self.seen}") from None

    async def stop(self) -> None:
        """Consume no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class ProviderConformance:
    """Sentences about `ports.PodProvider`."""

    async def test_it_is_made_for_these_ports(self, world: World) -> None:
        assert world.new_provider().port_version == PORT_VERSION

    async def test_a_created_pod_becomes_ready_with_an_address(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        order = world.order("one")
        await provider.create(order)
        pod = await witness.ready("one")
        assert (pod.sku, pod.template, pod.ready) == (order.pool.sku, order.template, True)
        assert pod.address
        assert [p.name for p in await provider.list_pods()] == ["one"]
        await witness.stop()

    async def test_the_same_order_twice_makes_one_pod(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        await asyncio.gather(provider.create(world.order("one")), provider.create(world.order("one")))
        first = await witness.ready("one")
        await provider.create(world.order("one"))
        assert [(p.name, p.incarnation) for p in await provider.list_pods()] == [("one", first.incarnation)]
        await witness.stop()

    async def test_a_deleted_pod_ends_and_is_listed_no_more(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        await provider.create(world.order("one"))
        await witness.ready("one")
        await provider.delete("one", "the test is over")
        await provider.delete("one", "twice")
        ended = await witness.ended("one")
        assert not ended.oom
        assert await provider.list_pods() == []
        await witness.stop()

    async def test_deleting_an_unknown_pod_does_nothing(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        await provider.delete("nobody", "no reason")
        assert await provider.list_pods() == []

    async def test_a_pod_that_dies_by_itself_ends_exactly_once(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        for name in ("one", "two"):
            await provider.create(world.order(name))
            await witness.ready(name)
        await world.kill("one")
        await witness.ended("one")
        await provider.delete("two", "so that later facts have come")
        await witness.ended("two")
        assert [f.name for f in witness.seen if isinstance(f, PodEnded)] == ["one", "two"]
        assert not [f for f in witness.seen if isinstance(f, PodFailed)]
        await witness.stop()

    async def test_annotations_merge_and_none_removes_one(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        await provider.create(world.order("one"))
        await witness.ready("one")
        await provider.annotate("one", {"caller": "alice", "queue": "q"})
        await provider.annotate("one", {"queue": None, "used": "true"})
        (pod,) = await provider.list_pods()
        assert dict(pod.annotations) == {"caller": "alice", "used": "true"}
        await witness.stop()

    async def test_pods_and_annotations_outlive_their_broker(self, world: World) -> None:
        before = world.new_provider()
        await before.start()
        witness = Witness(before)
        await before.create(world.order("one"))
        first = await witness.ready("one")
        await before.annotate("one", {"caller": "alice"})
        await witness.stop()
        await before.aclose(leave_pods=True)

        after = world.new_provider()
        await after.start()
        (pod,) = await after.list_pods()
        assert (pod.name, pod.incarnation, pod.address, pod.ready) == ("one", first.incarnation, first.address, True)
        assert pod.created_at == pytest.approx(first.created_at)
        assert dict(pod.annotations) == {"caller": "alice"}

    async def test_a_pod_that_died_while_no_broker_looked_is_not_found_alive(self, world: World) -> None:
        before = world.new_provider()
        await before.start()
        witness = Witness(before)
        await before.create(world.order("one"))
        await witness.ready("one")
        await witness.stop()
        await before.aclose(leave_pods=True)
        await world.kill("one")

        after = world.new_provider()
        await after.start()
        watching = Witness(after)
        if await after.list_pods():  # it may be found dying, never for good
            await watching.ended("one")
        assert await after.list_pods() == []
        await watching.stop()

    async def test_closing_without_leaving_pods_leaves_none(self, world: World) -> None:
        provider = world.new_provider()
        await provider.start()
        witness = Witness(provider)
        await provider.create(world.order("one"))
        await witness.ready("one")
        await witness.stop()
        await provider.aclose(leave_pods=False)

        after = world.new_provider()
        await after.start()
        assert await after.list_pods() == []
