"""A pod provider in memory: every pod is a fake agent on a socket in one folder. For tests of the runner."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from firepool_broker.shell.ports import (
    PORT_VERSION,
    PodBecameReady,
    PodEnded,
    PodFact,
    PodFailed,
    PodOrder,
    PodSeen,
)
from firepool_wire.errors import FirepoolError
from tests.shell.fake_agent import FakeAgent


class MemoryProvider:
    """Implements `ports.PodProvider`. A second one over the same folder and pods plays the next broker's provider."""

    port_version: ClassVar[int] = PORT_VERSION

    def __init__(self, folder: Path, earlier: "MemoryProvider | None" = None) -> None:
        self.folder = folder
        self.agents: dict[str, FakeAgent] = earlier.agents if earlier is not None else {}
        self.pods: dict[str, PodSeen] = earlier.pods if earlier is not None else {}
        self.orders: list[str] = []
        #: What the next orders are refused with.
        self.refusals: list[FirepoolError] = []
        #: Names of pods that never come up.
        self.fails: set[str] = set()
        self._making: set[str] = set()
        self._facts: asyncio.Queue[PodFact] = asyncio.Queue()

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    async def list_pods(self) -> Sequence[PodSeen]:
        return list(self.pods.values())

    async def facts(self) -> AsyncIterator[PodFact]:
        while True:
            yield await self._facts.get()

    async def create(self, order: PodOrder) -> None:
        if order.name in self.pods or order.name in self._making:
            return
        if self.refusals:
            raise self.refusals.pop(0)
        self.orders.append(order.name)
        if order.name in self.fails:
            self._facts.put_nowait(PodFailed(order.name, FirepoolError("it never came up").to_json()))
            return
        agent = FakeAgent(self.folder / f"{order.name}.sock", order.name)
        self._making.add(order.name)
        await agent.__aenter__()
        self._making.discard(order.name)
        self.agents[order.name] = agent
        self.pods[order.name] = PodSeen(
            name=order.name,
            sku=order.pool.sku,
            template=order.template,
            created_at=time.time(),
            address=agent.address,
            ready=True,
            single_use=order.single_use,
            incarnation="1",
        )
        self._facts.put_nowait(PodBecameReady(self.pods[order.name]))

    async def delete(self, name: str, why: str) -> None:
        await self.kill(name, why)

    async def kill(self, name: str, why: str = "killed", *, oom: bool = False) -> None:
        """The pod's processes are gone."""
        agent = self.agents.pop(name, None)
        if agent is None:
            return
        self.pods.pop(name)
        await agent.die()
        self._facts.put_nowait(PodEnded(name, why, oom))

    async def annotate(self, name: str, annotations: dict[str, str | None]) -> None:
        pod = self.pods.get(name)
        if pod is None:
            return
        merged = {**pod.annotations, **annotations}
        self.pods[name] = replace(pod, annotations={k: v for k, v in merged.items() if v is not None})

    async def aclose(self, *, leave_pods: bool) -> None:
        if not leave_pods:
            for name in list(self.agents):
                await self.kill(name)

    async def silence(self, name: str) -> None:
        """The agent stops answering, but nobody says that the pod is gone."""
        await self.agents[name].die()

    async def revive(self, name: str, boot_id: str = "boot-1") -> FakeAgent:
        """The agent answers again, with what it knew (same boot) or as another one."""
        old = self.agents[name]
        again = FakeAgent(old.socket, name)
        again.boot_id = boot_id
        if boot_id == old.boot_id:
            again.attempts, again.blobs, again.last_user = old.attempts, old.blobs, old.last_user
        await again.__aenter__()
        self.agents[name] = again
        return again
