"""The way out of the pods' network: one nf_tables table that masquerades what leaves it, spoken to the kernel directly, so that
no `nft` or `iptables` has to be installed. One atomic batch makes it, one removes it.
"""

import errno
import os
import socket
import struct
from ipaddress import IPv4Network
from typing import Final

from firepool_agent.netlink import attribute

_NETLINK_NETFILTER: Final = 12
_SUBSYSTEM: Final = 10 << 8
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_BEGIN, _END = 0x10, 0x11
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_NESTED: Final = 0x8000
_IPV4: Final = 2
_POSTROUTING, _SOURCE_NAT_PRIORITY = 4, 100
_REGISTER: Final = 1
_NETWORK_HEADER, _SOURCE_ADDRESS = 1, 12
_OUT_INTERFACE_NAME, _NAME_BYTES = 7, 16
_EQUAL, _NOT_EQUAL = 0, 1


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _nested(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(parts))


def _data(kind: int, value: bytes) -> bytes:
    return _nested(kind, attribute(1, value))


def _expression(name: str, *parts: bytes) -> bytes:
    return _nested(1, _text(1, name), _nested(2, *parts))


def rule(network: IPv4Network, bridge: str) -> bytes:
    """Expressions of: source in `network`, leaving by another interface than `bridge` → masquerade."""
    mask, base = network.netmask.packed, network.network_address.packed
    return b"".join(
        (
            _expression(
                "payload",
                _number(1, _REGISTER),
                _number(2, _NETWORK_HEADER),
                _number(3, _SOURCE_ADDRESS),
                _number(4, len(base)),
            ),
            _expression(
                "bitwise",
                _number(1, _REGISTER),
                _number(2, _REGISTER),
                _number(3, len(mask)),
                _data(4, mask),
                _data(5, bytes(len(mask))),
            ),
            _expression("cmp", _number(1, _REGISTER), _number(2, _EQUAL), _data(3, base)),
            _expression("meta", _number(1, _REGISTER), _number(2, _OUT_INTERFACE_NAME)),
            _expression(
                "cmp",
                _number(1, _REGISTER),
                _number(2, _NOT_EQUAL),
                _data(3, bridge.encode().ljust(_NAME_BYTES, b"\0")),
            ),
            _expression("masq"),
        )
    )


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """A command (kind of our subsystem) or one of the two marks around a batch, which name the subsystem instead."""
    mark = kind in (_BEGIN, _END)
    payload = struct.pack(">BBH", 0 if mark else _IPV4, 0, _SUBSYSTEM >> 8 if mark else 0) + body
    return struct.pack("=IHHII", 16 + len(payload), kind if mark else _SUBSYSTEM | kind, flags, sequence, 0) + payload


def _batch(commands: list[tuple[int, int, bytes]]) -> None:
    """Carry commands out, all or none. Raises: OSError."""
    words = [_message(_BEGIN, _REQUEST, 0, b"")]
    words += [_message(kind, flags | _REQUEST | _ACK, n, body) for n, (kind, flags, body) in enumerate(commands, 1)]
    words.append(_message(_END, _REQUEST, len(commands) + 1, b""))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as channel:
        channel.settimeout(5)
        channel.bind((0, 0))
        channel.send(b"".join(words))
        heard = 0
        while heard < len(commands):
            heard += _acknowledged(channel.recv(1 << 16))


def _acknowledged(data: bytes) -> int:
    count = offset = 0
    while offset + 20 <= len(data):
        length, kind = struct.unpack_from("=IH", data, offset)
        if kind != 2:
            raise OSError(errno.EPROTO, "nf_tables: unexpected answer from the kernel")
        code = -struct.unpack_from("=i", data, offset + 16)[0]
        if code:
            raise OSError(code, f"nf_tables: {os.strerror(code)}")
        count += 1
        offset += (length + 3) & ~3
    return count


def switch_on(table: str, network: IPv4Network, bridge: str) -> None:
    """Make the table. Raises: OSError: the kernel has no nf_tables, or refused; nothing stays."""
    hook = _nested(4, _number(1, _POSTROUTING), _number(2, _SOURCE_NAT_PRIORITY))
    chain = _text(1, table) + _text(3, "post") + hook + _text(7, "nat")
    commands = [
        (_NEW_TABLE, _CREATE, _text(1, table)),
        (_NEW_CHAIN, _CREATE, chain),
        (_NEW_RULE, _CREATE, _text(1, table) + _text(2, "post") + _nested(4, rule(network, bridge))),
    ]
    _batch(commands)


def switch_off(table: str) -> None:
    """Remove the table. Raises: OSError: there is none."""
    _batch([(_DELETE_TABLE, 0, _text(1, table))])
