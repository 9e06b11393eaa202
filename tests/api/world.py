"""One broker's API over real HTTP: uvicorn on a free port, the real store in a temporary folder, tokens of every kind."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI

from firepool_broker.api.app import close_streams, create_app
from firepool_broker.api.limits import ApiSettings
from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape
from firepool_broker.shell.ports import Identity
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_broker.shell.store.tokens import SqliteTokens
from tests.api.fake_runner import FakeRunner

#: Name of a token → whose it is.
PEOPLE = {
    "ann": Identity(caller="team-a", person="ann"),
    "viewer": Identity(caller="team-a", person="vic", role="viewer"),
    "admin": Identity(caller="team-a", person="ada", role="team-admin"),
    "bob": Identity(caller="team-b", person="bob"),
    "operator": Identity(caller="ops", person="olga", role="operator"),
}

POOLS = [
    Pool(sku=Sku("cpu"), max_count=4),
    Pool(sku=Sku("h200"), shape=Shape(accelerator="h200", gpus=1, simulated=True), untrusted=True),
]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The error's code, where it is a problem document."""
        return self.json().get("code") if "problem+json" in self.headers.get("content-type", "") else None


@dataclass
class World:
    runner: Any
    app: FastAPI
    tokens: dict[str, str]
    session: aiohttp.ClientSession
    base: str
    server: uvicorn.Server

    def headers(self, who: str | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {self.tokens[who]}"} if who else {}), **(extra or {})}

    async def call(
        self, method: str, path: str, who: str | None = "ann", *, headers: Mapping[str, str] | None = None, **how: Any
    ) -> Reply:
        async with self.session.request(method, self.base + path, headers=self.headers(who, headers), **how) as r:
            return Reply(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    async def submit(self, *argv: str, who: str = "ann", **fields: Any) -> str:
        reply = await self.call("POST", "/v1/jobs", who, json=spec(*argv, **fields))
        assert reply.status == 201, reply.body
        return str(reply.json()["id"])


def spec(*argv: str, **fields: Any) -> dict[str, Any]:
    """A job spec's JSON."""
    return {"entrypoint": {"argv": list(argv or ("print",))}, **fields}


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI, end_streams: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[uvicorn.Server, str]]:
    """The application behind a real HTTP server on a free port."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http="httptools", lifespan="off", log_config=None, timeout_graceful_shutdown=2
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.002)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield server, f"http://127.0.0.1:{port}"
    finally:
        close_streams(app)
        end_streams()
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def world(folder: Path, settings: ApiSettings | None = None, **runner: Any) -> AsyncIterator[World]:
    """Everything, and its end."""
    database = Database(folder / "store.db")
    store, tokens = SqliteJobs(database), SqliteTokens(database)
    await store.open()
    texts = {name: await tokens.create(who, name) for name, who in PEOPLE.items()}
    late = Identity(caller="team-a", person="old", expires_at=time.time() - 60)
    texts["expired"] = await tokens.create(late, "expired")
    texts["revoked"] = await tokens.create(PEOPLE["ann"], "revoked")
    await tokens.revoke("revoked", "team-a")
    texts["unknown"] = "fp_nobody"
    fake = FakeRunner(store, tokens, list(POOLS), **runner)
    app = create_app(fake, settings)
    try:
        async with aiohttp.ClientSession() as session, serving(app) as (server, base):
            yield World(fake, app, texts, session, base, server)
    finally:
        for window in fake.windows:
            window.end()
        await store.aclose()
