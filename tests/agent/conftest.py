"""Fixtures of the agent's tests: real agents, ended by pid whatever happens."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.driver import Agent, Client
from tests.agent.podkit import House, Nest


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    """Agents with settings of their own (short paths: a Unix socket's name has 107 bytes)."""
    made: list[Agent] = []
    folders: list[Path] = []

    def make(**settings: Any) -> Agent:
        folders.append(Path(tempfile.mkdtemp(prefix="fp-agent-")))
        made.append(Agent(folders[-1], **settings))
        return made[-1]

    yield make
    for agent in made:
        agent.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    """One agent at level `process`."""
    return make_agent()


@pytest.fixture
def make_pod() -> Iterator[Callable[..., Client]]:
    """Agents in pods of a nursery of their own, at the strongest level that this machine has."""
    clients: list[Client] = []
    with Nest(house=House(serve="firepool_agent.server:serve")) as nest:

        def make(**wish: Any) -> Client:
            state = nest.make(f"pod-{len(clients)}", network="host", python=sys.executable, **wish)
            clients.append(Client(state["socket"]))
            return clients[-1]

        yield make
        for client in clients:
            client.hang_up()
