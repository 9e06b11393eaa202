"""One HTTP/1.1 connection to an agent, as an asyncio protocol around llhttp.

One request at a time, kept alive between them. A response is either collected (small JSON answers) or streamed with
back-pressure (event logs, output files). A general client spends more on URLs, cookies, headers and timers than the
whole exchange costs (`decisions/0010-own-http-client-for-agents.md`). Nothing here knows what is asked; only `client` calls this.
"""

import asyncio
from collections import deque
from typing import cast

import httptools

from firepool_broker.shell.ports import AgentUnreachable

#: A streamed body stops being read while this many bytes wait for their consumer. Raise: fewer stalls of fast logs;
#: costs memory per running attempt.
STREAM_BUFFER_BYTES = 1 << 20


class Exchange:
    """One request's answer: resolved at its end, or at its headers when `streamed`."""

    __slots__ = ("body", "done", "headers_only", "status", "streamed")

    def __init__(self, done: "asyncio.Future[Exchange]", *, streamed: bool, headers_only: bool) -> None:
        self.done = done
        self.streamed = streamed
        #: HEAD: nothing follows the headers, whatever they announce.
        self.headers_only = headers_only
        self.status = 0
        self.body: deque[bytes] = deque()

    def content(self) -> bytes:
        """The collected body."""
        return b"".join(self.body)


class Connection(asyncio.Protocol):
    """A connection that carries one exchange after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._complete = False
        self._failure: AgentUnreachable | None = None
        #: Bytes of a streamed body that wait for their consumer, and the consumer that waits for bytes.
        self._waiting_bytes = 0
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self.closed = False
        #: Exchanges begun on this connection; a kept one that fails before its first byte may be tried anew.
        self.used = 0

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, head: bytes, *, streamed: bool = False, headers_only: bool = False) -> "asyncio.Future[Exchange]":
        """Send a request; the answer resolves the future."""
        done: asyncio.Future[Exchange] = self._loop.create_future()
        self._exchange = Exchange(done, streamed=streamed, headers_only=headers_only)
        self._parser = httptools.HttpResponseParser(self)
        self._complete = False
        self.used += 1
        if self._transport is None or self.closed:
            self._fail(AgentUnreachable("the connection is closed"))
        else:
            self._transport.write(head)
        return done

    async def send(self, data: bytes) -> None:
        """Send a part of a request's body, at the agent's pace."""
        if self._writable is not None:
            await self._writable
        if self._transport is None or self.closed:
            raise self._failure or AgentUnreachable("the connection closed during an upload")
        self._transport.write(data)

    async def chunk(self) -> bytes:
        """Next piece of a streamed body; b"" at its end. Raises: AgentUnreachable: it broke off."""
        exchange = self._exchange
        assert exchange is not None, "a streamed exchange is open"
        while not exchange.body:
            if self._complete:
                return b""
            if self._failure is not None:
                raise self._failure
            self._reader = self._loop.create_future()
            await self._reader
        data = exchange.body.popleft() if len(exchange.body) == 1 else exchange.content()
        exchange.body.clear()
        self._waiting_bytes = 0
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        """Whether the last exchange ended cleanly and the agent keeps the connection."""
        return self._complete and not self.closed

    def abort(self, why: AgentUnreachable | None = None) -> None:
        """Drop the connection now; a waiting exchange ends with `why`."""
        if why is not None:
            self._fail(why)
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- the protocol's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # bytes that nobody asked for
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(AgentUnreachable(f"the agent's answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self._complete:
            self._fail(AgentUnreachable(f"the connection broke: {exc or 'closed by the agent'}"))
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # -- the parser's side ---------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        exchange, parser = self._exchange, self._parser
        assert exchange is not None
        assert parser is not None
        exchange.status = parser.get_status_code()
        if exchange.headers_only:
            self._end(keep=parser.should_keep_alive())
        elif exchange.streamed and exchange.status < 300 and not exchange.done.done():
            exchange.done.set_result(exchange)

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.body.append(data)
        if not exchange.streamed or exchange.status >= 300:
            return
        self._waiting_bytes += len(data)
        if self._waiting_bytes > STREAM_BUFFER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake_reader()

    def on_message_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self._end(keep=parser.should_keep_alive())

    def _end(self, *, keep: bool) -> None:
        exchange = self._exchange
        if self._complete or exchange is None:
            return
        self._complete = True
        if not keep:
            self.closed = True
        if not exchange.done.done():
            exchange.done.set_result(exchange)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fail(self, why: AgentUnreachable) -> None:
        if self._failure is None:
            self._failure = why
        exchange = self._exchange
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(self._failure)
        self._wake_reader()
