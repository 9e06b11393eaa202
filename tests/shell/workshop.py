"""Builds what the tests of the runner's rooms stand on: a desk with the real stores, the real agent client, and pods that
are fake agents. Events that a room emits gather in `told` instead of reaching an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from firepool_broker.core.asks import Ask
from firepool_broker.core.events import Event
from firepool_broker.core.ids import JobId, PodName, Sku
from firepool_broker.core.pools import Pool
from firepool_broker.shell.agents import Agents
from firepool_broker.shell.blobs.joblogs import LogFiles
from firepool_broker.shell.blobs.local import LocalBlobs
from firepool_broker.shell.metrics import Metrics
from firepool_broker.shell.ports import Identity, JobRow, PodOrder
from firepool_broker.shell.runner import Runner
from firepool_broker.shell.runner.desk import Desk, LiveJob, Parts
from firepool_broker.shell.runner.intake import ask_of
from firepool_broker.shell.store.config import Configuration
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_broker.shell.store.tokens import SqliteTokens
from firepool_wire.jobspec import Entrypoint, JobSpec
from firepool_wire.words import JobState
from tests.shell.fake_agent import FakeAgent
from tests.shell.memory_provider import MemoryProvider

E = TypeVar("E")
PATIENCE_S = 30.0
ALICE = Identity(caller="alice", person="alice")
BOB = Identity(caller="bob", person="bob")


def argv_spec(*argv: str, **fields: Any) -> JobSpec:
    """A command job."""
    return JobSpec(entrypoint=Entrypoint(argv=argv or ("print", "hello")), **fields)


def parts(home: Path, provider: MemoryProvider) -> Parts:
    """The real stores in `home`, the real agent client, and the given provider."""
    database = Database(home / "store.db")
    return Parts(
        store=SqliteJobs(database),
        blobs=LocalBlobs(home / "blobs"),
        logs=LogFiles(home / "logs"),
        tokens=SqliteTokens(database),
        config=Configuration(database),
        agents=Agents(),
        providers={"local": provider},
    )


async def until(true: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds; fails with `what` after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what} did not come"
        await asyncio.sleep(0.002)
    return found


@dataclass
class Workshop:
    """A desk on its own."""

    desk: Desk
    provider: MemoryProvider
    told: list[Event] = field(default_factory=list)

    async def event(self, kind: type[E]) -> E:
        """The first event of a kind, once it was told."""
        found: E = await until(lambda: next((e for e in self.told if isinstance(e, kind)), None), kind.__name__)
        return found

    def job(self, job: str = "j1", spec: JobSpec | None = None, *, pods: tuple[str, ...] = ("p1",)) -> LiveJob:
        """A live job as a submission leaves it."""
        spec = spec or argv_spec()
        ask: Ask = ask_of(spec, ALICE, JobId(job), time.time())
        live = LiveJob(
            ask=ask, spec=spec, body_digest="d", argv=spec.entrypoint.argv is not None, state=JobState.QUEUED
        )
        live.pods = tuple(PodName(p) for p in pods)
        self.desk.jobs[ask.job] = live
        return live


@asynccontextmanager
async def workshop(home: Path) -> AsyncIterator[Workshop]:
    """A desk with one pool `cpu`."""
    provider = MemoryProvider(home / "pods")
    await provider.start()
    told: list[Event] = []
    desk = Desk(parts(home, provider), Metrics(), told.append)
    desk.pools["cpu"] = Pool(sku=Sku("cpu"))
    await desk.parts.store.open()
    try:
        yield Workshop(desk, provider, told)
    finally:
        await desk.stop_tasks()
        await desk.parts.agents.aclose()
        await provider.aclose(leave_pods=False)
        await desk.parts.store.aclose()
        await desk.parts.blobs.aclose()
        await _closed_transports()


def order(name: str) -> PodOrder:
    """An order of a cpu pod."""
    return PodOrder(name=name, pool=Pool(sku=Sku("cpu")), template="t0")


@dataclass
class House:
    """A whole runner: real engine, real stores, pods that are fake agents."""

    runner: Runner
    provider: MemoryProvider
    home: Path

    async def submit(self, *argv: str, who: Identity = ALICE, digest: str = "d", **fields: Any) -> str:
        """Submit a command; its id."""
        return (await self.runner.submit(who, argv_spec(*argv, **fields), digest)).job

    async def done(self, job: str) -> JobRow:
        """The terminal row of a job."""
        row = await self.runner.wait_terminal(job, PATIENCE_S)
        assert row is not None, f"{job} did not end: {self.runner.engine.story_of(JobId(job))}"
        return row

    async def running(self, job: str) -> FakeAgent:
        """The agent that a job runs on, once it runs there."""

        def found() -> FakeAgent | None:
            for agent in self.provider.agents.values():
                for attempt, record in agent.attempts.items():
                    if attempt.startswith(f"{job}:") and record.state == "running":
                        return agent
            return None

        agent: FakeAgent = await until(found, f"a running attempt of {job}")
        return agent

    async def crash(self) -> None:
        """End as a killed broker does: nothing is told to anybody, the pods live on."""
        self.runner.desk.closing = True
        self.runner._wake.stop()
        self.runner.end_streams()
        await self.runner.desk.stop_tasks()
        await self.runner.desk.parts.agents.aclose()
        await self.runner.desk.parts.store.aclose()
        await _closed_transports()

    async def restarted(self, pools: Sequence[Pool] | None = None) -> "House":
        """The next broker over the same store and pods."""
        return await opened(self.home, MemoryProvider(self.provider.folder, self.provider), pools)


POOL = Pool(sku=Sku("cpu"), min_count=0, max_count=2, max_idle_count=2, isolation="portable")


async def opened(
    home: Path, provider: MemoryProvider | None = None, pools: Sequence[Pool] | None = None, **replaced: Any
) -> House:
    """Start a runner in `home`; `replaced` are parts other than the usual ones."""
    provider = provider or MemoryProvider(home / "pods")
    made = replace(parts(home, provider), **replaced)
    runner = Runner(made)
    await runner.start(pools if pools is not None else (POOL,))
    return House(runner, provider, home)


@asynccontextmanager
async def house(home: Path, *pools: Pool, **replaced: Any) -> AsyncIterator[House]:
    """A runner with pools (default: one `cpu` pool of two pods)."""
    house = await opened(home, pools=pools or None, **replaced)
    try:
        yield house
        house.runner.engine.check(everything=True)
        assert not house.runner.broken.is_set()
    finally:
        await close(house)


async def close(house: House) -> None:
    """Stop a runner and all pods."""
    await house.runner.aclose(leave_pods=False)
    await _closed_transports()


async def _closed_transports() -> None:
    """Aborted connections close in the loop's next turns; a loop that ends before would leave them open."""
    for _ in range(5):
        await asyncio.sleep(0)
