"""Calls to the broker's API: JSON in and out, errors as exceptions, repeated only where repeating can help.

Repeated are calls that no broker answered (they are idempotent by their keys) and refusals that carry `retry_after_s`;
every other error is the caller's at once. The broker alone re-runs jobs: this only gets messages through.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from firepool_ray._config import Target
from firepool_ray._http import Address, Answer, Connection, Connections, Disconnected, Request
from firepool_wire.errors import BrokerUnavailable, FirepoolError, from_json
from firepool_wire.version import FIREPOOL

#: First pause between two tries, doubled each time up to the second figure.
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0


class Api:
    """One broker, spoken to by any number of threads."""

    def __init__(self, target: Target, *, request_timeout_s: float, patience_s: float) -> None:
        self.target = target
        self._connections = Connections(Address.parse(target.address), request_timeout_s, target.ca)
        self._patience_s = patience_s
        self._headers = {"User-Agent": f"firepool/{FIREPOOL}"}
        if target.token:
            self._headers["Authorization"] = f"Bearer {target.token}"
        self._json_headers = {**self._headers, "Content-Type": "application/json"}
        #: Set when the session ends: pauses between tries end at once.
        self.closing = threading.Event()

    def json(self, method: str, path: str, body: object = None, *, patience_s: float | None = None) -> Any:
        """A call with a JSON body (or none), and its JSON answer. Raises: FirepoolError."""
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        answer = self.call(Request(method, path, data, self._json_headers), patience_s)
        return json.loads(answer.body) if answer.body else None

    def raw(self, method: str, path: str, body: bytes = b"") -> Answer:
        """A call whose body, or answer, is not JSON. Raises: FirepoolError."""
        return self.call(Request(method, path, body, self._headers), None)

    def call(self, request: Request, patience_s: float | None) -> Answer:
        """A call, repeated where that can help. Raises: FirepoolError."""
        deadline = monotonic() + (self._patience_s if patience_s is None else patience_s)
        pause = _BACKOFF_S
        while True:
            try:
                return checked(self._connections.call(request))
            except Disconnected as why:
                error: FirepoolError = BrokerUnavailable(f"no broker answers at {self.target.address}: {why}")
            except FirepoolError as refusal:
                if not refusal.retryable or refusal.retry_after_s is None:
                    raise
                error, pause = refusal, refusal.retry_after_s
            # Jitter, so that a thousand clients do not come back as one.
            pause *= 0.75 + os.urandom(1)[0] / 510
            if monotonic() + pause > deadline or self.closing.wait(pause):
                raise error
            pause = min(pause * 2, _MAX_BACKOFF_S)

    @contextmanager
    def stream(
        self, path: str, *, silence_s: float | None = None
    ) -> Iterator[tuple[Answer, Connection, Iterator[bytes]]]:
        """A GET whose body is read in pieces as it comes, on a connection of its own.

        Args:
            path: path and query.
            silence_s: how long nothing may come before the connection counts as dead.

        Raises:
            FirepoolError: the broker refused.
            Disconnected: no answer; while reading too.
        """
        connection = self._connections.fresh(silence_s)
        try:
            connection.send(Request("GET", path, b"", self._headers))
            head = connection.read_head()
            if head.status >= 400:
                head.body = b"".join(connection.pieces(head, "GET"))
                checked(head)
            yield head, connection, connection.pieces(head, "GET")
        finally:
            connection.close()

    def forget(self) -> None:
        """After a fork, in the child: close our copies of the parent's sockets, telling nobody."""
        self._connections.forget()

    def close(self) -> None:
        """End pauses and close idle connections."""
        self.closing.set()
        self._connections.close()


def checked(answer: Answer) -> Answer:
    """The answer, or the error that it carries. Raises: FirepoolError."""
    if answer.status < 400:
        return answer
    try:
        body = json.loads(answer.body)
        if not isinstance(body, dict) or "code" not in body:
            raise ValueError("not a problem document")
    except ValueError:
        text = answer.body[:200].decode("utf-8", "replace")
        # A proxy's words, not the broker's: nobody knows more than that it did not work.
        raise BrokerUnavailable(f"HTTP {answer.status} from something that is not a broker: {text!r}") from None
    body.setdefault("message", body.get("detail", ""))
    raise from_json(body)
