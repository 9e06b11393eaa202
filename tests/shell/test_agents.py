"""The agent client: the port's sentences against the fake agent, and what sets answered, refused and unknown apart."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from firepool_broker.conformance.agents import AgentConformance, frames, launch, prepare
from firepool_broker.shell.agents import Agents
from firepool_broker.shell.agents import client as client_module
from firepool_broker.shell.agents.pool import Connections
from firepool_broker.shell.ports import AgentUnreachable
from firepool_wire.errors import Conflict
from firepool_wire.frames import Kind
from tests.shell.fake_agent import FakeAgent


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeAgent]:
    async with FakeAgent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
async def agents() -> AsyncIterator[Agents]:
    client = Agents()
    yield client
    await client.aclose()
    await asyncio.sleep(0)


class TestConformance(AgentConformance):
    hello_argv = ["print", "hello"]
    wait_argv = ["wait"]

    @pytest.fixture
    def pod(self, fake: FakeAgent) -> str:
        return fake.address


async def test_nobody_listening_is_refused(agents: Agents, tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable) as caught:
        await agents.hello(f"unix:{tmp_path}/nobody.sock")
    assert caught.value.refused


async def test_a_call_that_is_not_answered_in_time_is_unknown_not_refused(
    agents: Agents, fake: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HELLO_TIMEOUT_S", 0.05)
    fake.hang.add("hello")
    with pytest.raises(AgentUnreachable) as caught:
        await agents.hello(fake.address)
    assert not caught.value.refused
    fake.hang.clear()
    assert (await agents.hello(fake.address)).boot_id == "boot-1"


async def test_an_answered_error_is_raised_as_its_own_class(agents: Agents, fake: FakeAgent) -> None:
    fake.refuse["prepare"] = Conflict("the pod is taken")
    with pytest.raises(Conflict, match="the pod is taken"):
        await agents.prepare(fake.address, "j:0", prepare())


async def test_calls_to_one_pod_share_a_kept_connection(agents: Agents, fake: FakeAgent) -> None:
    for _ in range(5):
        await agents.hello(fake.address)
    assert fake.connections == 1
    assert agents.connections.idle == 1


async def test_a_kept_connection_that_the_agent_closed_is_replaced(agents: Agents, fake: FakeAgent) -> None:
    await agents.hello(fake.address)
    await fake.die()
    async with FakeAgent(fake.socket) as again:
        assert (await agents.hello(again.address)).boot_id == "boot-1"


async def test_an_event_stream_that_breaks_off_says_so_and_continues_without_loss(
    agents: Agents, fake: FakeAgent
) -> None:
    await agents.prepare(fake.address, "j:0", prepare())
    await agents.launch(fake.address, "j:0", launch(["print", "one", "two", "three"]))
    whole = await frames(agents, fake.address, "j:0")
    fake.cut_events_after = whole[1].end + 2  # in the middle of a frame
    seen = []
    with pytest.raises(AgentUnreachable):
        async for frame in agents.events(fake.address, "j:0", 0):
            seen.append(frame)
    assert seen == whole[:2]
    assert seen + await frames(agents, fake.address, "j:0", seen[-1].end) == whole


async def test_a_stream_hands_its_connection_back(agents: Agents, fake: FakeAgent) -> None:
    await agents.prepare(fake.address, "j:0", prepare())
    await agents.launch(fake.address, "j:0", launch(["print", "one"]))
    for _ in range(3):
        assert (await frames(agents, fake.address, "j:0"))[-1].kind is Kind.END
    assert fake.connections == 1


async def test_a_slow_reader_holds_the_agent_back_instead_of_filling_memory(agents: Agents, fake: FakeAgent) -> None:
    await agents.prepare(fake.address, "j:0", prepare())
    attempt = fake.attempts["j:0"]
    block = os.urandom(900_000)
    for _ in range(20):
        attempt.add(Kind.LOG, b"\x01" + block)
    fake.finish("j:0")
    total = 0
    async for frame in agents.events(fake.address, "j:0", 0):
        await asyncio.sleep(0.001)
        total += len(frame.payload)
    assert total > 20 * len(block)


async def test_an_output_file_comes_whole(agents: Agents, fake: FakeAgent) -> None:
    await agents.prepare(fake.address, "j:0", prepare())
    await agents.launch(fake.address, "j:0", launch(["write", "out/a b.txt", "content"]))
    pieces = [piece async for piece in agents.output(fake.address, "j:0", "out/a b.txt")]
    assert b"".join(pieces) == b"content"


async def test_idle_connections_are_bounded_over_all_pods(tmp_path: Path) -> None:
    client = Agents(Connections(max_idle=2))
    async with (
        FakeAgent(tmp_path / "a") as a,
        FakeAgent(tmp_path / "b") as b,
        FakeAgent(tmp_path / "c") as c,
    ):
        for agent in (a, b, c):
            await client.hello(agent.address)
        assert client.connections.idle == 2
        assert client.connections.kept(a.address) is None
        client.forget(c.address)
        assert client.connections.idle == 1
        await client.aclose()
        assert client.connections.idle == 0
