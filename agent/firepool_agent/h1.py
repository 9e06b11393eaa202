"""HTTP/1.1 as far as the agent speaks it: one client (the broker), keep-alive, JSON or raw bodies with a length, chunked answers.

A strict hand-written reader: an exchange costs about 20 µs here where `h11` costs 91 µs (`decisions/0030`). What it
does not know it refuses: other versions, chunked requests, heads over 16 KiB. Routes and messages live in `routes`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from firepool_wire.errors import BadRequest, FirepoolError, Internal, PayloadTooLarge

MAX_HEAD_BYTES = 16 * 1024
#: Largest body that is read as a whole (JSON messages: inline arguments and results of other jobs are base64 inside).
MAX_JSON_BYTES = 64 * 1024 * 1024

_REASONS = {200: b"OK", 201: b"Created", 404: b"Not Found", 409: b"Conflict", 411: b"Length Required"}
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Malformed(Exception):
    """The peer does not speak our subset; `status` answers it and the connection is closed."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Request:
    """One request; its body is read by whoever handles it."""

    __slots__ = ("_reader", "left", "length", "method", "path", "query")

    def __init__(self, method: str, target: str, length: int, reader: asyncio.StreamReader) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.length = length
        self.left = length
        self._reader = reader

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object ({} when empty). Raises: BadRequest; PayloadTooLarge."""
        if self.length > MAX_JSON_BYTES:
            raise PayloadTooLarge(f"a message of {self.length} bytes is over the limit", limit_bytes=MAX_JSON_BYTES)
        if not self.length:
            return {}
        data = await self._reader.readexactly(self.length)
        self.left = 0
        try:
            body = json.loads(data)
        except ValueError as why:
            raise BadRequest(f"the body is not JSON: {why}") from None
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces of at most 256 KiB. Raises: asyncio.IncompleteReadError: the peer left."""
        while self.left:
            data = await self._reader.read(min(self.left, 256 * 1024))
            if not data:
                raise asyncio.IncompleteReadError(b"", self.left)
            self.left -= len(data)
            yield data

    async def skip(self) -> None:
        """Read away what the handler left of the body, so that the next request starts where it should."""
        async with aclosing(self.chunks()) as rest:
            async for _ in rest:
                pass

    async def peer_left(self) -> None:
        """Returns when the client closes the connection (it says nothing while it reads a stream)."""
        await self._reader.read(1)


class Answer:
    """What a handler returns: a JSON object, or bytes, or a stream of them."""

    __slots__ = ("body", "content_type", "status", "stream")

    def __init__(
        self,
        body: bytes = b"{}",
        *,
        status: int = 200,
        stream: AsyncGenerator[bytes, None] | None = None,
        content_type: str = "application/json",
    ) -> None:
        self.status = status
        self.body = body
        self.stream = stream
        self.content_type = content_type


def problem(error: FirepoolError) -> Answer:
    """An error of the table as problem+json."""
    return Answer(json.dumps(error.to_json()).encode(), status=error.status, content_type="application/problem+json")


Handler = Callable[[Request], Awaitable[Answer]]


class Server:
    """Serves connections of one listening socket with one handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Callback of `asyncio.start_unix_server` and `start_server`."""
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Close every connection; streams end where they are."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except asyncio.CancelledError:
            return  # the client hung up on a stream, or the agent ends
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # the client left, or sent a head that never ends: nobody is there to answer
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. Returns whether the connection can carry another one."""
        try:
            request = _parse(await reader.readuntil(b"\r\n\r\n"), reader)
        except Malformed as wrong:
            text = str(wrong).encode()
            writer.write(_head(Answer(text, status=wrong.status, content_type="text/plain")) + text)
            await writer.drain()
            return False
        answer = await self._answer(request)
        if answer.stream is not None:
            return await self._send_stream(request, writer, answer.stream)
        # One write: every one is a system call of its own.
        writer.write(_head(answer) if request.method == "HEAD" else _head(answer) + answer.body)
        if writer.transport.get_write_buffer_size():
            await writer.drain()
        if request.left:
            await request.skip()
        return True

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._handler(request)
        except FirepoolError as error:
            return problem(error)
        except asyncio.IncompleteReadError:
            raise  # the client left in the middle of its request
        except Exception as bug:  # noqa: BLE001 - the door of the house: a bug becomes an answer, never a hung client
            return problem(Internal(f"{request.method} {request.path}: {type(bug).__name__}: {bug}"))

    async def _send_stream(
        self, request: Request, writer: asyncio.StreamWriter, stream: AsyncGenerator[bytes, None]
    ) -> bool:
        """Send what the stream yields until it ends. A client that hangs up ends it: nothing else would notice before the
        next byte, and there may be none for hours."""
        me = asyncio.current_task()
        assert me is not None
        gone = asyncio.ensure_future(request.peer_left())
        gone.add_done_callback(lambda done: None if done.cancelled() else me.cancel())
        writer.write(_STREAM_HEAD)
        try:
            async with aclosing(stream):
                async for data in stream:
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    if writer.transport.get_write_buffer_size():
                        await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            stays = gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return stays


def _head(answer: Answer) -> bytes:
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (
        answer.status,
        _REASONS.get(answer.status, b"-"),
        answer.content_type.encode(),
        len(answer.body),
    )


def _parse(head: bytes, reader: asyncio.StreamReader) -> Request:
    """Request line and the two headers that matter. Raises: Malformed."""
    if len(head) > MAX_HEAD_BYTES:
        raise Malformed(431, "the head is too large")
    line, *fields = head[:-4].split(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
    except ValueError:
        raise Malformed(400, "not a request line") from None
    if version != "HTTP/1.1":
        raise Malformed(505, "HTTP/1.1 only")
    length = 0
    for field in fields:
        name, colon, value = field.partition(b":")
        match name.lower():
            case b"content-length":
                length = _length(value.strip())
            case b"transfer-encoding":
                raise Malformed(411, "bodies need a Content-Length")
            case _ if not colon:
                raise Malformed(400, "not a header line")
    return Request(method, target, length, reader)


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > 15:
        raise Malformed(400, "not a Content-Length")
    return int(value)
