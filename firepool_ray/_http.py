"""HTTP/1.1 over plain sockets: keep-alive, TCP_NODELAY, TLS and Unix sockets where asked. Bytes in, bytes out.

A call of `http.client` costs three times as much (it parses headers as e-mail) and its import a third of the budget of
`import firepool`. What is not here: retries and what errors mean (`_api`).
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from ssl import SSLContext

#: Largest head of an answer; more is not a broker.
_MAX_HEAD = 64 * 1024
_CHUNK = 256 * 1024


_NO_HEADERS: Mapping[str, str] = {}


class Disconnected(OSError):
    """The connection could not be made, broke, or carried something that is not HTTP. `sent`: the broker may have acted."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Address(NamedTuple):
    """Where a broker listens: `http://host:port`, `https://host:port/base` or `unix:/path/of/socket`."""

    text: str
    host: str
    port: int
    tls: bool
    unix: str | None
    base: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises: ValueError: not an address."""
        if text.startswith("unix:"):
            return cls(text, "localhost", 0, False, text.removeprefix("unix:").removeprefix("//"), "")
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{text!r} is no address of a broker; write http://host:port")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(text, parts.hostname, port, tls, None, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        """The value of `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port in (0, 443 if self.tls else 80) else f"{host}:{self.port}"


@dataclass(slots=True)
class Answer:
    """A whole answer; header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


class Request(NamedTuple):
    """One request; `stream` leaves the body to `Connection.pieces`."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = _NO_HEADERS


class Connection:
    """One keep-alive connection; used by one thread at a time."""

    def __init__(self, address: Address, timeout_s: float, context: "SSLContext | None") -> None:
        self._address = address
        self._buffer = bytearray()
        #: The peer keeps the connection open behind the last answer.
        self.reusable = True
        try:
            self.sock = _connect(address, timeout_s, context)
        except OSError as why:
            raise Disconnected(f"cannot reach {address.text}: {why}", sent=False) from why

    def close(self) -> None:
        """Close the socket; a thread that reads from it gets `Disconnected`."""
        self.reusable = False
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self.sock.close()

    def send(self, request: Request) -> None:
        """Send a request. Raises: Disconnected."""
        lines = [f"{request.method} {self._address.base}{request.path} HTTP/1.1", f"Host: {self._address.host_header}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        if request.body or request.method in ("POST", "PUT"):
            lines.append(f"Content-Length: {len(request.body)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        try:
            if len(request.body) < _CHUNK:
                self.sock.sendall(head + request.body)
            else:
                self.sock.sendall(head)
                self.sock.sendall(request.body)
        except OSError as why:
            self.reusable = False
            raise Disconnected(f"connection to {self._address.text} broke: {why}", sent=True) from why

    def read_head(self) -> Answer:
        """The status line and headers of the next answer. Raises: Disconnected."""
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD:
                    raise Disconnected(f"{self._address.text} does not speak HTTP", sent=True)
                self._more()
                continue
            head = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            answer = self._parse_head(head)
            if answer.status >= 200:
                return answer

    def _parse_head(self, lines: list[str]) -> Answer:
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            self.reusable = False
            raise Disconnected(f"{self._address.text} does not speak HTTP: {lines[0][:80]!r}", sent=True)
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if version == "HTTP/1.0" or headers.get("connection", "").lower() == "close":
            self.reusable = False
        return Answer(int(rest[:3]), headers)

    def pieces(self, answer: Answer, method: str) -> Iterator[bytes]:
        """The body behind a head, in pieces as they arrive. Raises: Disconnected."""
        if method == "HEAD" or answer.status in (204, 304):
            return
        if "chunked" in answer.headers.get("transfer-encoding", "").lower():
            yield from self._chunked()
        elif "content-length" in answer.headers:
            yield from self._sized(int(answer.headers["content-length"]))
        else:
            self.reusable = False
            yield from self._until_closed()

    def read(self, method: str) -> Answer:
        """A whole answer. Raises: Disconnected."""
        answer = self.read_head()
        answer.body = b"".join(self.pieces(answer, method))
        return answer

    def _sized(self, left: int) -> Iterator[bytes]:
        while left:
            if not self._buffer:
                self._more()
            piece = bytes(self._buffer[:left])
            del self._buffer[:left]
            left -= len(piece)
            yield piece

    def _chunked(self) -> Iterator[bytes]:
        while True:
            size = int(self._line().partition(b";")[0], 16)
            if size == 0:
                while self._line():
                    pass
                return
            yield from self._sized(size)
            self._line()

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _until_closed(self) -> Iterator[bytes]:
        while True:
            if self._buffer:
                piece = bytes(self._buffer)
                self._buffer.clear()
                yield piece
            try:
                data = self.sock.recv(_CHUNK)
            except OSError as why:
                raise Disconnected(f"connection to {self._address.text} broke: {why}", sent=True) from why
            if not data:
                return
            self._buffer += data

    def _more(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except OSError as why:
            self.reusable = False
            raise Disconnected(f"connection to {self._address.text} broke: {why or 'timed out'}", sent=True) from why
        if not data:
            self.reusable = False
            raise Disconnected(f"{self._address.text} closed the connection", sent=True)
        self._buffer += data


def _connect(address: Address, timeout_s: float, context: "SSLContext | None") -> socket.socket:
    if address.unix is not None:
        sock = socket.socket(getattr(socket, "AF_UNIX"))  # noqa: B009 - Windows has no such name
        sock.settimeout(timeout_s)
        try:
            sock.connect(address.unix)
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    # Without this an upload waits 40 ms for the peer's delayed acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None:
        return sock
    try:
        return context.wrap_socket(sock, server_hostname=address.host)
    except OSError:
        sock.close()
        raise


class Connections:
    """Idle connections to one address, handed to whichever thread asks."""

    def __init__(self, address: Address, timeout_s: float, ca: str | None) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._context = _tls(ca) if address.tls else None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def take(self) -> tuple[Connection, bool]:
        """A connection, and whether it was used before (then it may be stale). Raises: Disconnected."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self.fresh(), False

    def fresh(self, timeout_s: float | None = None) -> Connection:
        """A connection of one's own, for a stream. Raises: Disconnected."""
        return Connection(self.address, timeout_s or self._timeout_s, self._context)

    def give(self, connection: Connection) -> None:
        """Back into the idle set, or closed where it cannot be used again."""
        with self._lock:
            if connection.reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def call(self, request: Request) -> Answer:
        """One request and its whole answer.

        A kept connection that the broker closed meanwhile is replaced once; every mutating request of ours is idempotent,
        so it may arrive twice.

        Raises:
            Disconnected: no answer.
        """
        while True:
            connection, used = self.take()
            try:
                connection.send(request)
                answer = connection.read(request.method)
            except Disconnected:
                connection.close()
                if used:
                    continue
                raise
            except BaseException:
                # Interrupted between question and answer: what comes next on this connection answers nobody.
                connection.close()
                raise
            self.give(connection)
            return answer

    def forget(self) -> None:
        """After a fork, in the child: close our copies of idle sockets; the parent's stay open."""
        self._lock = threading.Lock()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.sock.close()

    def close(self) -> None:
        """Close every idle connection."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _tls(ca: str | None) -> "SSLContext":
    import ssl  # 20 ms that only https needs

    return ssl.create_default_context(cafile=ca)


def path_of(*parts: str) -> str:
    """`/v1/…` with every part percent-encoded."""
    return "/v1/" + "/".join(quote(part, safe=":") for part in parts)
