"""The local provider with a real nursery and real agents passes the suite, and keeps what is particular to it."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from firepool_broker.conformance.providers import ProviderConformance, Witness
from firepool_broker.core.ids import Sku, TemplateDigest
from firepool_broker.core.pools import Pool, Shape
from firepool_broker.shell.local import PROVIDER, LocalProvider
from firepool_broker.shell.local.link import run_directory
from firepool_broker.shell.ports import PodOrder, PodProvider
from firepool_wire.errors import BadRequest, CapacityUnavailable, FirepoolError, IsolationUnavailable


class LocalWorld:
    """One broker home; every provider made over it is closed, and the nursery with its pods is gone afterwards."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="fp-local-"))
        self._made: list[LocalProvider] = []

    def new_provider(self) -> LocalProvider:
        provider = PROVIDER(home=self.home, python=None)
        self._made.append(provider)
        return provider

    def order(self, name: str, **more: Any) -> PodOrder:
        shape = more.pop("shape", Shape(memory_mib=512))
        return PodOrder(
            name=name, pool=Pool(sku=Sku("cpu"), template=TemplateDigest("t1"), shape=shape, **more), template="t1"
        )

    def pid(self, name: str) -> int:
        """Host pid of a pod's agent."""
        for provider in reversed(self._made):
            if name in provider._pods:
                return provider._pods[name].pid
        raise AssertionError(f"no pod {name}")

    async def kill(self, name: str) -> None:
        pid = self.pid(name)
        fd = os.pidfd_open(pid)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, gone.set)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), 10)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    async def close(self) -> None:
        for provider in self._made:
            await provider.aclose(leave_pods=True)
        last = LocalProvider(home=self.home)
        await last.start()
        await last.aclose(leave_pods=False)
        shutil.rmtree(run_directory(self.home), ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture
async def world() -> AsyncIterator[LocalWorld]:
    made = LocalWorld()
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.linux
class TestLocalProvider(ProviderConformance):
    """The suite against real pods."""


async def started(world: LocalWorld) -> tuple[LocalProvider, Witness]:
    provider = world.new_provider()
    await provider.start()
    return provider, Witness(provider)


@pytest.mark.linux
async def test_a_level_that_this_machine_cannot_give_is_refused_with_the_fix(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREPOOL_ISOLATION_MAX", "process")
    provider, witness = await started(world)
    with pytest.raises(IsolationUnavailable, match="FIREPOOL_ISOLATION_MAX") as refused:
        await provider.create(world.order("one", isolation="namespaces"))
    assert refused.value.details["fix"] == "unset FIREPOOL_ISOLATION_MAX"
    assert await provider.list_pods() == []
    await witness.stop()


@pytest.mark.linux
async def test_an_interpreter_that_does_not_exist_is_refused_by_name(world: LocalWorld) -> None:
    provider, witness = await started(world)
    with pytest.raises(BadRequest, match="/no/such/python"):
        await provider.create(world.order("one", settings=(("python", "/no/such/python"),)))
    await witness.stop()


@pytest.mark.linux
async def test_simulated_cards_are_given_to_one_pod_each(world: LocalWorld) -> None:
    provider, witness = await started(world)
    shape = Shape(accelerator="h200", gpus=2, memory_mib=512, simulated=True)
    for name in ("one", "two"):
        await provider.create(world.order(name, shape=shape))
        await witness.ready(name)
    cards = [card for state in provider._pods.values() for card in state.cards]
    assert len({card["uuid"] for card in cards}) == 4
    assert all(card["simulated"] and card["vram_bytes"] == 141 << 30 for card in cards)
    await witness.stop()


@pytest.mark.linux
async def test_real_cards_that_are_not_there_are_a_limit_not_a_crash(world: LocalWorld) -> None:
    provider, witness = await started(world)
    with pytest.raises(CapacityUnavailable, match="this machine has 0 free"):
        await provider.create(world.order("one", shape=Shape(accelerator="nosuch", gpus=1)))
    await witness.stop()


@pytest.mark.linux
async def test_a_simulated_start_delays_readiness_and_nothing_else(world: LocalWorld) -> None:
    provider, witness = await started(world)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await provider.create(world.order("one", simulated_start_s=0.6))
    (pod,) = await provider.list_pods()
    assert not pod.ready
    await witness.ready("one")
    assert loop.time() - began >= 0.6
    await witness.stop()


@pytest.mark.linux
async def test_when_the_nursery_is_killed_every_pod_ends_and_the_next_order_is_served(world: LocalWorld) -> None:
    provider, witness = await started(world)
    await provider.create(world.order("one"))
    await witness.ready("one")
    os.kill(int(provider.about["pid"]), signal.SIGKILL)
    ended = await witness.ended("one")
    assert "nursery" in ended.why
    await provider.create(world.order("two"))
    await witness.ready("two")
    assert [p.name for p in await provider.list_pods()] == ["two"]
    await witness.stop()


async def test_the_local_provider_is_a_provider(tmp_path: Path) -> None:
    assert isinstance(LocalProvider(home=tmp_path), PodProvider)


async def test_the_socket_directory_is_private_and_never_somebody_elses(tmp_path: Path) -> None:
    run = run_directory(tmp_path / ("x" * 80))
    assert run.stat().st_mode & 0o777 == 0o700
    assert len(str(run / "a-pod-with-quite-a-long-name.sock")) < 108
    run.rmdir()
    run.symlink_to(tmp_path)
    try:
        with pytest.raises(FirepoolError, match="not a directory of this user"):
            run_directory(tmp_path / ("x" * 80))
    finally:
        run.unlink()
