"""Which ports wait for peers in this network namespace: asked of the kernel by sock_diag (0.3 ms), where /proc/net/tcp walks
the whole connection table of the machine (2 ms a file). Kernels without it are read from /proc/net.
"""

import os
import socket
import struct
from typing import Final

from firepool_agent import procfs

_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_DUMP: Final = 0x301
#: TCP_LISTEN and TCP_CLOSE (an unconnected UDP socket) as bits of the state filter.
_LISTEN, _CLOSE = 1 << 10, 1 << 7
_TABLES: Final = (
    ("tcp", socket.AF_INET, socket.IPPROTO_TCP, _LISTEN),
    ("tcp6", socket.AF_INET6, socket.IPPROTO_TCP, _LISTEN),
    ("udp", socket.AF_INET, socket.IPPROTO_UDP, _CLOSE),
    ("udp6", socket.AF_INET6, socket.IPPROTO_UDP, _CLOSE),
)
_HEAD: Final = struct.Struct("=IHHII")
#: Offsets in struct inet_diag_msg: local port (network order), uid.
_PORT, _UID = 4, 64


def parse_answer(protocol: str, data: bytes) -> tuple[set[procfs.Listener], bool]:
    """Listeners in one answer of the kernel, and whether it was the last. Raises: OSError: the kernel refused."""
    found: set[procfs.Listener] = set()
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, kind = struct.unpack_from("=IH", data, offset)
        body = offset + _HEAD.size
        if kind == _DONE or length < _HEAD.size:
            return found, True
        if kind == _ERROR:
            code = -struct.unpack_from("=i", data, body)[0]
            raise OSError(code, f"sock_diag: {os.strerror(code)}")
        if body + _UID + 4 <= len(data):
            port = struct.unpack_from(">H", data, body + _PORT)[0]
            found.add(procfs.Listener(protocol, port, struct.unpack_from("=I", data, body + _UID)[0]))
        offset += (length + 3) & ~3
    return found, False


def _ask(channel: socket.socket, table: tuple[str, int, int, int]) -> set[procfs.Listener]:
    protocol, family, number, states = table
    body = struct.pack("=BBBBI", family, number, 0, 0, states) + b"\0" * 48
    channel.send(_HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
    found: set[procfs.Listener] = set()
    last = False
    while not last:
        more, last = parse_answer(protocol, channel.recv(1 << 16))
        found |= more
    return found


def listeners() -> set[procfs.Listener]:
    """Every waiting socket in this network namespace."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as channel:
            return set().union(*(_ask(channel, table) for table in _TABLES))
    except OSError:
        return procfs.listeners()
