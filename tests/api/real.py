"""The API in front of the real runner, engine, store and blobs; only the agents are fakes that do what their argv says."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from firepool_broker.api.app import create_app
from firepool_broker.api.limits import ApiSettings
from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool
from firepool_broker.shell.runner import Runner
from tests.api.world import PEOPLE, World, serving
from tests.shell.memory_provider import MemoryProvider
from tests.shell.workshop import parts

POOLS = (Pool(sku=Sku("cpu"), max_count=2, isolation="portable", idle_timeout_s=60.0),)


@contextlib.asynccontextmanager
async def real_world(
    folder: Path, pools: Sequence[Pool] = POOLS, settings: ApiSettings | None = None
) -> AsyncIterator[World]:
    """Everything, and its end."""
    provider = MemoryProvider(folder / "pods")
    runner = Runner(parts(folder, provider))
    await runner.start(pools)
    try:
        tokens = {name: await runner.tokens.create(who, name) for name, who in PEOPLE.items()}
        app = create_app(runner, settings)
        async with aiohttp.ClientSession() as session, serving(app, runner.end_streams) as (server, base):
            yield World(runner, app, tokens, session, base, server)
    finally:
        await runner.aclose(leave_pods=False)


@dataclass(frozen=True)
class Elsewhere:
    """A real world that turns in another thread, for callers that block."""

    world: World
    loop: asyncio.AbstractEventLoop


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[Elsewhere]:
    """A real world in a thread of its own."""
    ready: list[Elsewhere | BaseException] = []
    told, stop = threading.Event(), asyncio.Event()

    async def turn() -> None:
        try:
            async with real_world(folder) as running:
                ready.append(Elsewhere(running, asyncio.get_running_loop()))
                told.set()
                await stop.wait()
        except BaseException as error:
            ready.append(error)
            raise
        finally:
            told.set()

    thread = threading.Thread(target=asyncio.run, args=(turn(),), name="elsewhere")
    thread.start()
    told.wait(30)
    found = ready[0]
    if isinstance(found, BaseException):
        thread.join()
        raise found
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(stop.set)
        thread.join()
