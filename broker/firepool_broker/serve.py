"""One broker as an object: its parts joined, its socket served, its address and token published. `main` runs it."""

import asyncio
import contextlib
import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from firepool_broker.api.app import close_streams, create_app
from firepool_broker.core.pools import Pool
from firepool_broker.settings import Settings, default_pools, interpreter_of, read_pools, stamp
from firepool_broker.shell.agents import Agents
from firepool_broker.shell.blobs import names
from firepool_broker.shell.blobs.joblogs import LogFiles
from firepool_broker.shell.blobs.local import LocalBlobs
from firepool_broker.shell.ports import PORT_VERSION, Identity, PodProvider, StoreDown, TokenStore
from firepool_broker.shell.runner import Parts, Runner
from firepool_broker.shell.store.config import Configuration
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_broker.shell.store.retention import Retention
from firepool_broker.shell.store.tokens import SqliteTokens
from firepool_wire.errors import Internal, StoreUnavailable
from firepool_wire.version import FIREPOOL

PROVIDERS = "firepool.providers"
LOCAL_CALLER = "local"

#: How long open requests may finish after the broker was told to stop. Raise: fewer broken answers. Lower: faster stops.
GRACE_S = 2

#: Between looks for what is old enough to be forgotten. Raise: more disk for longer.
HOUSEKEEPING_S = 3600.0


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `main` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Broker:
    """Built from settings; `start`, then `failed` or a signal, then `aclose`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._log: Any = structlog.get_logger("firepool")
        database = Database(settings.home / "store.db")
        blobs, self._logs = LocalBlobs(settings.home / "blobs"), LogFiles(settings.home / "logs")
        self._retention = Retention(database, blobs, self._logs, names.key)
        self._parts = Parts(
            store=SqliteJobs(database),
            blobs=blobs,
            logs=self._logs,
            tokens=SqliteTokens(database),
            config=Configuration(database),
            agents=Agents(),
            providers=load_providers(settings),
        )
        self.runner = Runner(self._parts, self)
        self.app = create_app(self.runner, stamp=self.stamp)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Take the store, adopt what lives, serve, publish the address."""
        settings = self.settings
        asked = read_pools(settings.pools_file) if settings.pools_file is not None else None
        if asked is None and settings.simulate is not None:
            asked = default_pools(settings.simulate)
        await self.runner.start(asked, default_pools())
        await publish_token(self._parts.tokens, settings.token_file)
        listener = listen(settings)
        host, port = listener.getsockname()[:2]
        self.address = f"http://{host}:{port}"
        config = uvicorn.Config(
            self.app,
            http="httptools",
            loop="none",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise Internal("the HTTP server did not start")
            await asyncio.sleep(0.005)
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._publish()
        self._log.info("ready", address=self.address, home=str(settings.home), pools=sorted(self.runner.desk.pools))

    def stamp(self, pools: Sequence[Pool]) -> list[Pool]:
        """The pools with their template digests."""
        return stamp(pools, self.settings.python)

    def interpreter(self, pool: Pool) -> dict[str, Any]:
        """The pool's job interpreter, before an agent says it."""
        return interpreter_of(pool, self.settings.python)

    async def failed(self) -> None:
        """Returns when the engine's invariants broke."""
        await self.runner.broken.wait()

    async def _keep_house(self) -> None:
        """Forget what is old, every hour."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            try:
                gone = await self._retention.run(list(self.runner.desk.pods))
            except (StoreDown, StoreUnavailable) as error:
                self._log.warning("housekeeping put off", cause=str(error))
            else:
                self._log.info("forgotten", jobs=gone.jobs, logs=gone.logs, blobs=gone.blobs, bytes=gone.blob_bytes)

    async def aclose(self) -> None:
        """Stop serving, stop or leave the pods, close the store.

        After a broken invariant the pods stay: they and the store hold the truth from which the next start rebuilds.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.address:
                self.settings.address_file.unlink()
        close_streams(self.app)
        self.runner.end_streams()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self.runner.aclose(leave_pods=self.settings.leave_pods or self.runner.broken.is_set())
        with contextlib.suppress(StoreUnavailable):  # what is not on disk is with the agents still
            self._logs.flush()

    def _publish(self) -> None:
        """Write `broker.json`, whole or not at all, for programs that look for a broker on this machine."""
        settings = self.settings
        body = {
            "address": self.address,
            "pid": os.getpid(),
            "started_at": self.runner.now(),
            "version": FIREPOOL,
            "token_file": str(settings.token_file),
        }
        write_private(settings.address_file, json.dumps(body))
        write_private(settings.home / "port", self.address.rpartition(":")[2])


def load_providers(settings: Settings) -> Mapping[str, PodProvider]:
    """Every provider that is installed, by name. Raises: Internal: one is made for other ports."""
    return {point.name: _load(point, settings) for point in entry_points(group=PROVIDERS)}


def _load(point: EntryPoint, settings: Settings) -> PodProvider:
    factory = point.load()
    provider: PodProvider = factory(home=settings.home, python=settings.python)
    if provider.port_version != PORT_VERSION:
        raise Internal(f"provider {point.name!r} is made for ports {provider.port_version}, this is {PORT_VERSION}")
    return provider


def listen(settings: Settings) -> socket.socket:
    """The listening socket: the port asked for, or the last run's where it is free, or any."""
    wanted = [settings.port]
    if settings.port == 0:
        with contextlib.suppress(OSError, ValueError):
            wanted.insert(0, int((settings.home / "port").read_text()))
    for n, port in enumerate(wanted):
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, port))
        except OSError:
            listener.close()
            if n == len(wanted) - 1:
                raise
        else:
            return listener
    raise AssertionError("at least one port is tried")


async def publish_token(tokens: TokenStore, file: Path) -> None:
    """See that the token file holds a token that this store knows."""
    with contextlib.suppress(OSError):
        if await tokens.identify(file.read_text().strip()) is not None:
            return
    person = getpass.getuser()
    await tokens.revoke("local-operator", LOCAL_CALLER)
    identity = Identity(caller=LOCAL_CALLER, person=person, role="operator")
    write_private(file, await tokens.create(identity, "local-operator"))


def write_private(file: Path, text: str) -> None:
    """Replace a file with mode 0600 at once."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
    fresh.replace(file)
