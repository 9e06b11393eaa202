"""The real agent and the broker's client for it pass the port's suite together: over a plain process and in a real pod."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from firepool_broker.conformance.agents import AgentConformance
from firepool_broker.shell.agents import Agents
from tests.agent.driver import Client


@pytest.fixture
async def agents() -> AsyncIterator[Agents]:
    client = Agents()
    yield client
    await client.aclose()


class TestAgentOfAProcess(AgentConformance):
    @pytest.fixture
    def pod(self, make_agent: Callable[..., Client]) -> str:
        return f"unix:{make_agent().socket_path}"


class TestAgentInAPod(AgentConformance):
    @pytest.fixture
    def pod(self, make_pod: Callable[..., Any]) -> str:
        return f"unix:{make_pod().socket_path}"
