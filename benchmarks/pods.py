"""Real pods without a broker: the broker's own local provider and agents client, driven directly.

For benchmarks of what an agent does (`reset`): one call is timed on its own, from the call to its answer.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape
from firepool_broker.shell.agents import Agents
from firepool_broker.shell.local import PROVIDER
from firepool_broker.shell.ports import PodBecameReady, PodEnded, PodFailed, PodOrder, PodProvider
from firepool_wire.agentapi import ExitRecord, Launch, Prepare, Reset, ResetReport, Stop
from firepool_wire.frames import Kind

SKU = Sku("bench")
#: How long anything here may take before the benchmark gives up.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A ready pod."""

    name: str
    address: str

    def agent_pid(self) -> int:
        """The agent, as this machine's /proc shows it: processes of a pod carry its name."""
        wanted = f"fp-{self.name}"[:15]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _comm(entry) == wanted:
                return int(entry.name)
        raise LookupError(f"no process is named {wanted}")


def _comm(entry: Path) -> str:
    try:
        return (entry / "comm").read_text().strip()
    except OSError:
        return ""


class Pods:
    """Makes pods, runs attempts in them, resets them."""

    def __init__(self, provider: PodProvider, memory_mib: int) -> None:
        self._provider = provider
        self._agents = Agents()
        self._pool = Pool(sku=SKU, shape=Shape(cpus=1.0, memory_mib=memory_mib))
        self._ready: dict[str, asyncio.Future[Pod]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._count = 0

    async def follow(self) -> None:
        """Take in what the provider tells, until cancelled."""
        async for fact in self._provider.facts():
            match fact:
                case PodBecameReady(pod=seen):
                    self._ready[seen.name].set_result(Pod(seen.name, seen.address))
                case PodEnded(name=name):
                    self._ended[name].set_result(None)
                case PodFailed(name=name, error=error):
                    self._ready[name].set_exception(RuntimeError(f"pod {name} failed to start: {error}"))

    async def make(self) -> Pod:
        """A new pod that answers."""
        self._count += 1
        name = f"b{os.getpid()}-{self._count}"
        loop = asyncio.get_running_loop()
        self._ready[name], self._ended[name] = loop.create_future(), loop.create_future()
        await self._provider.create(PodOrder(name=name, pool=self._pool, template="t0"))
        async with asyncio.timeout(PATIENCE_S):
            pod = await self._ready[name]
            await self._agents.hello(pod.address)
        return pod

    async def begin(self, pod: Pod, argv: Sequence[str]) -> str:
        """Start a command; the attempt's id."""
        self._count += 1
        attempt = f"bench-{self._count}:0"
        deadline = time.clock_gettime(time.CLOCK_BOOTTIME) + PATIENCE_S
        prepare = Prepare(caller="bench", person="bench", queue="default", tag=None, deadline_s=deadline, start="exec")
        await self._agents.prepare(pod.address, attempt, prepare)
        await self._agents.launch(pod.address, attempt, Launch(deadline_s=deadline, argv=list(argv)))
        return attempt

    async def finish(self, pod: Pod, attempt: str) -> ExitRecord:
        """Wait for the attempt's end."""
        record: ExitRecord | None = None
        async for frame in self._agents.events(pod.address, attempt, 0):
            if frame.kind is Kind.EXIT:
                record = ExitRecord.from_json(frame.json())
        assert record is not None, "an attempt that was launched leaves an exit record"
        return record

    async def started(self, pod: Pod, attempt: str) -> None:
        """Wait for the attempt's first instruction."""
        async for frame in self._agents.events(pod.address, attempt, 0):
            if frame.kind is Kind.STARTED:
                return

    async def stop(self, pod: Pod, attempt: str) -> None:
        """SIGKILL the attempt."""
        await self._agents.stop(pod.address, attempt, Stop(grace_s=0.0))

    async def reset(self, pod: Pod, attempt: str) -> ResetReport:
        """The agent's verified reset after an attempt."""
        return await self._agents.reset(pod.address, Reset(attempt=attempt))

    async def settled(self, pod: Pod) -> None:
        """Wait until the trash's bytes are free again."""
        await self._agents.settled(pod.address)

    async def forget(self, pod: Pod, attempt: str) -> None:
        """Drop the attempt's records, as a broker does once they are durable."""
        await self._agents.ack(pod.address, attempt)

    async def retire(self, pod: Pod, why: str) -> None:
        """Unmake the pod; returns when it is verified gone."""
        await self._provider.delete(pod.name, why)
        async with asyncio.timeout(PATIENCE_S):
            await self._ended[pod.name]
        self._agents.forget(pod.address)

    async def aclose(self) -> None:
        """Hang up."""
        await self._agents.aclose()


@asynccontextmanager
async def pods(memory_mib: int = 512) -> AsyncIterator[Pods]:
    """Pods for the time of a block, in a folder of their own; everything is unmade at its end."""
    home = Path(tempfile.mkdtemp(prefix="firepool-bench-"))
    provider = PROVIDER(home=home)
    await provider.start()
    made = Pods(provider, memory_mib)
    following = asyncio.create_task(made.follow())
    try:
        yield made
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await made.aclose()
        await provider.aclose(leave_pods=False)
        shutil.rmtree(home, ignore_errors=True)
