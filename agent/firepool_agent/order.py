"""What the agent hands a waiting attempt at launch, and how it crosses: one JSON message on the job socket, big inputs as
descriptors beside it.

Both sides import this, the job's inside the job interpreter: standard library only.
"""

import json
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct(">I")

#: Signal that makes a forked attempt write the stacks of all its threads. Programs rarely use real-time signals.
STACKS_SIGNAL = 63

#: Message of a waiting attempt to the agent; its sender's pid is told by the kernel (SCM_CREDENTIALS).
WAITING = b"W"


@dataclass(slots=True, kw_only=True)
class Order:
    """Everything that is bound late, ready for the attempt's process."""

    attempt: str
    argv: list[str] | None = None
    #: `FunctionEntry` as JSON.
    function: dict[str, Any] | None = None
    #: base64 of RESULT frames: results of other jobs that are arguments here.
    depends: list[str] = field(default_factory=list)
    #: The whole environment.
    env: dict[str, str] = field(default_factory=dict)
    #: What goes in front of `sys.path`: package, then layers.
    paths: list[str] = field(default_factory=list)
    #: Package tree and layers that the attempt shall see (as the agent's process sees them).
    package: str | None = None
    layers: list[str] = field(default_factory=list)
    #: Start a new interpreter instead of going on in the forked one, and why.
    fresh: str | None = None
    untrusted: bool = False
    max_result_bytes: int
    #: Names of the descriptors that came with the message: `payload`, `args`.
    blobs: list[str] = field(default_factory=list)

    def pack(self) -> bytes:
        """The message as bytes."""
        # Flat: `dataclasses.asdict` would copy every nested container first.
        body = json.dumps({name: getattr(self, name) for name in self.__slots__}, separators=(",", ":")).encode()
        return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> tuple[Order, dict[str, int]] | None:
    """Wait for the order. Returns it with its descriptors by name, or None when the agent closed the socket instead."""
    data, fds, _, _ = socket.recv_fds(sock, 65536, 2)
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    parts = [data[_LENGTH.size :]]
    left = length - len(parts[0])
    while left > 0:
        part = sock.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    order = Order(**json.loads(b"".join(parts)))
    return order, dict(zip(order.blobs, fds, strict=True))


def read_blob(fd: int) -> bytes:
    """All bytes of a descriptor, from its start."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()
