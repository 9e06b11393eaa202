"""The agent client: the calls of `firepool_wire.agentapi` over kept-alive connections.

Three outcomes stay apart: answered (a message, or the `FirepoolError` that the agent sent), refused (nobody listens:
`AgentUnreachable.refused`), and unknown (timed out or broken off). All mutating calls are idempotent by attempt id, so a
kept connection that turns out to be closed is replaced and the call sent again.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

from firepool_broker.shell.agents.http1 import Connection, Exchange
from firepool_broker.shell.agents.pool import Connections
from firepool_broker.shell.ports import AgentUnreachable
from firepool_wire.agentapi import (
    AttemptStatus,
    Hello,
    Launch,
    Launched,
    Message,
    Prepare,
    Prepared,
    Reset,
    ResetReport,
    Stats,
    Stop,
)
from firepool_wire.errors import FirepoolError, Internal, from_json
from firepool_wire.frames import Frame, Kind, Parser

#: Seconds after which a call's outcome counts as unknown. Raise: slow hosts get their time. Lower: a hung agent shows
#: sooner, and a slow one is struck for it.
CALL_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 2.0
#: A launch unpacks and installs, so it may take as long as its own deadline plus this margin.
LAUNCH_MARGIN_S = 5.0
#: A reset waits for uninterruptible tasks on top of this.
RESET_MARGIN_S = 15.0
SETTLE_TIMEOUT_S = 120.0
UPLOAD_TIMEOUT_S = 300.0
UPLOAD_CHUNK = 256 * 1024

#: One encoder for all calls: `json.dumps` with separators makes a new one each time.
_dump = json.JSONEncoder(separators=(",", ":")).encode


class Agents:
    """Implements `ports.AgentClient` for agents on Unix sockets."""

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections or Connections()

    async def hello(self, address: str) -> Hello:
        """Who the agent is. Also the probe of a pod that was unreachable."""
        return Hello.from_json(await self._json(address, "GET", "/v1/hello", timeout_s=HELLO_TIMEOUT_S))

    async def prepare(self, address: str, attempt: str, message: Prepare) -> Prepared:
        """Record the attempt on the agent's disk and have its process wait."""
        return Prepared.from_json(await self._json(address, "PUT", _path(attempt, "/prepare"), message))

    async def launch(self, address: str, attempt: str, message: Launch) -> Launched:
        """Bind everything late and release the process; answers when it was released."""
        timeout_s = (message.start_timeout_s or UPLOAD_TIMEOUT_S) + LAUNCH_MARGIN_S
        body = await self._json(address, "PUT", _path(attempt, "/launch"), message, timeout_s=timeout_s)
        return Launched.from_json(body)

    async def status(self, address: str, attempt: str) -> AttemptStatus:
        """What the agent knows of an attempt (state `unknown` included)."""
        return AttemptStatus.from_json(await self._json(address, "GET", _path(attempt), timeout_s=HELLO_TIMEOUT_S))

    async def events(self, address: str, attempt: str, offset: int) -> AsyncIterator[Frame]:
        """The event log from `offset` on, until its END frame; breaking off before raises `AgentUnreachable`."""
        parser = Parser(offset)
        connection = await self._open_stream(address, _path(attempt, f"/events?from={offset}"))
        try:
            while data := await connection.chunk():
                for frame in parser.feed(data):
                    yield frame
                    if frame.kind is Kind.END:
                        await _drain(connection)
                        return
            raise AgentUnreachable(f"the event log of {attempt} broke off at offset {parser.offset}")
        except ValueError as error:
            raise AgentUnreachable(f"the event log of {attempt} is damaged: {error}") from error
        finally:
            self.connections.give_back(address, connection)

    async def stop(self, address: str, attempt: str, message: Stop) -> None:
        """Begin to end the attempt; how it ended comes with its events."""
        await self._json(address, "POST", _path(attempt, "/stop"), message)

    async def abandon(self, address: str, attempt: str) -> None:
        """Undo a prepare that will not be launched."""
        await self._json(address, "POST", _path(attempt, "/abandon"))

    async def ack(self, address: str, attempt: str) -> None:
        """Exit record and log are stored; the agent may drop them."""
        await self._json(address, "POST", _path(attempt, "/ack"))

    async def output(self, address: str, attempt: str, path: str) -> AsyncIterator[bytes]:
        """An output file's bytes."""
        connection = await self._open_stream(address, _path(attempt, f"/outputs/{quote(path)}"))
        try:
            while data := await connection.chunk():
                yield data
        finally:
            self.connections.give_back(address, connection)

    async def reset(self, address: str, message: Reset) -> ResetReport:
        """Clean the pod and prove it."""
        timeout_s = message.wait_s + RESET_MARGIN_S
        return ResetReport.from_json(await self._json(address, "POST", "/v1/reset", message, timeout_s=timeout_s))

    async def settled(self, address: str) -> None:
        """Answers once the trash's bytes are free again."""
        await self._json(address, "GET", "/v1/settled", timeout_s=SETTLE_TIMEOUT_S)

    async def has_blob(self, address: str, digest: str) -> bool:
        """Whether the pod's cache has the blob."""
        head = _head("HEAD", f"/v1/blobs/{quote(digest)}", 0)
        exchange = await self._call(address, head, timeout_s=CALL_TIMEOUT_S, headers_only=True)
        if exchange.status not in (200, 404):
            raise _error(exchange)
        return exchange.status == 200

    async def put_blob(self, address: str, digest: str, path: FilePath) -> None:
        """Put a file's bytes into the pod's cache; the agent checks the digest."""
        size = (await asyncio.to_thread(path.stat)).st_size
        head = _head("PUT", f"/v1/blobs/{quote(digest)}", size)
        connection = await self.connections.dial(address)
        timer = _expire(connection, UPLOAD_TIMEOUT_S, f"pushing {digest}")
        try:
            done = connection.ask(head)
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, UPLOAD_CHUNK):
                    if done.done():  # refused early (no space): the answer says why
                        break
                    await connection.send(data)
            exchange = await done
        finally:
            timer.cancel()
            self.connections.give_back(address, connection)
        if exchange.status >= 300:
            raise _error(exchange)

    async def stacks(self, address: str, attempt: str) -> str:
        """Stacks of all threads of the attempt, as text."""
        return str((await self._json(address, "POST", _path(attempt, "/stacks")))["stacks"])

    async def stats(self, address: str) -> Stats:
        """Live figures of the pod."""
        return Stats.from_json(await self._json(address, "GET", "/v1/stats"))

    def forget(self, address: str) -> None:
        """The pod is gone; its idle connections go too."""
        self.connections.forget(address)

    async def aclose(self) -> None:
        """Drop every connection."""
        self.connections.close()

    async def _json(
        self, address: str, method: str, path: str, message: Message | None = None, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        body = _encode(message) if message is not None else b""
        exchange = await self._call(address, _head(method, path, len(body)) + body, timeout_s=timeout_s)
        if exchange.status >= 300:
            raise _error(exchange)
        content = exchange.content()
        answer: dict[str, Any] = json.loads(content.decode()) if content else {}
        return answer

    async def _call(self, address: str, request: bytes, *, timeout_s: float, headers_only: bool = False) -> Exchange:
        connection = await self.connections.take(address)
        while True:
            timer = _expire(connection, timeout_s, "the call")
            fresh = connection.used == 0
            try:
                return await connection.ask(request, headers_only=headers_only)
            except AgentUnreachable:
                if fresh or timer.when() <= asyncio.get_running_loop().time():
                    raise
            finally:
                timer.cancel()
                self.connections.give_back(address, connection)
            # A kept connection that the agent had closed meanwhile: the call is idempotent, so it goes out again.
            connection = await self.connections.dial(address)

    async def _open_stream(self, address: str, path: str) -> Connection:
        connection = await self.connections.take(address)
        while True:
            fresh = connection.used == 0
            timer = _expire(connection, CALL_TIMEOUT_S, "opening the stream")
            try:
                exchange = await connection.ask(_head("GET", path, 0), streamed=True)
            except BaseException as error:
                self.connections.drop(connection)
                if fresh or not isinstance(error, AgentUnreachable):
                    raise
            else:
                if exchange.status < 300:
                    return connection
                self.connections.give_back(address, connection)
                raise _error(exchange)
            finally:
                timer.cancel()
            connection = await self.connections.dial(address)


def _expire(connection: Connection, timeout_s: float, what: str) -> asyncio.TimerHandle:
    loop = asyncio.get_running_loop()
    why = AgentUnreachable(f"{what} was not answered within {timeout_s:g} s")
    return loop.call_later(timeout_s, connection.abort, why)


async def _drain(connection: Connection) -> None:
    """Read the closing chunk, so that the connection can be kept."""
    while await connection.chunk():
        continue


def _path(attempt: str, rest: str = "") -> str:
    return f"/v1/attempts/{_quoted(attempt)}{rest}"


@lru_cache(maxsize=4096)
def _quoted(attempt: str) -> str:
    return quote(attempt, safe="")


def _head(method: str, path: str, length: int) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: agent\r\nContent-Length: {length}\r\n\r\n".encode()


def _encode(message: Message) -> bytes:
    # Messages are flat: `dataclasses.asdict` would copy every nested container first.
    names: tuple[str, ...] = type(message).__slots__  # type: ignore[attr-defined]
    return _dump({name: getattr(message, name) for name in names}).encode()


def _error(exchange: Exchange) -> FirepoolError:
    content = exchange.content()
    try:
        body = json.loads(content)
    except ValueError:
        return Internal(f"the agent answered {exchange.status}: {content[:200]!r}")
    return from_json(body)
