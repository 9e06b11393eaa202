"""The nursery's end of the line to its broker: one connection at a time (the newest wins), one JSON object a line."""

import json
import selectors
import socket
from collections.abc import Callable
from typing import Any

from firepool_wire.errors import Internal

Obey = Callable[[dict[str, Any]], None]


class Line:
    """Accepts brokers on a listening socket and passes on what they say."""

    def __init__(
        self, selector: selectors.BaseSelector, listener: socket.socket, obey: Obey, changed: Callable[[bool], None]
    ) -> None:
        self._selector, self._obey, self._changed = selector, obey, changed
        self._peer: socket.socket | None = None
        self._buffer = b""
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        self._hang_up()
        peer.settimeout(5.0)  # a broker that hangs must not hang its pods' keeper
        self._peer, self._buffer = peer, b""
        self._selector.register(peer, selectors.EVENT_READ, self._hear)
        self._changed(True)

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._selector.unregister(self._peer)
            self._peer.close()
            self._peer = None
            self._changed(False)

    def _hear(self) -> None:
        assert self._peer is not None
        try:
            data = self._peer.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                # One broken request must not cost every pod on this machine its keeper.
                error = Internal(f"the nursery cannot read {line[:200]!r}: {type(e).__name__}: {e}")
                self.say({"is": "refused", "name": "", "error": error.to_json()})

    def say(self, message: dict[str, Any]) -> None:
        """Tell the broker; nobody there is nobody told."""
        if self._peer is None:
            return
        try:
            self._peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._hang_up()
