"""Just enough of rtnetlink to give a pod an address: links, addresses and routes over one raw socket.

Standard library only, since the nursery is part of the agent's house. Every call raises `OSError` with the kernel's error.
What the network of a machine looks like is `network`'s business.
"""

import errno
import os
import socket
import struct
from ipaddress import IPv4Interface, IPv4Network
from types import TracebackType
from typing import Final, Self

_NEWLINK, _DELLINK, _NEWADDR, _NEWROUTE = 16, 17, 20, 24
_ERROR: Final = 2
_REQUEST, _ACK, _EXCL, _CREATE = 0x1, 0x4, 0x200, 0x400
_IFF_UP: Final = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_PID = 1, 3, 10, 18, 19
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_RT_TABLE_MAIN, _RTPROT_BOOT, _RTN_UNICAST = 254, 3, 1


def attribute(kind: int, data: bytes) -> bytes:
    """One netlink attribute, padded to four bytes."""
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + b"\0" * (-length % 4)


def _name(text: str) -> bytes:
    return attribute(_IFLA_IFNAME, text.encode() + b"\0")


def _link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


class Netlink:
    """One rtnetlink socket in the current network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _ask(self, kind: int, flags: int, body: bytes, what: str) -> None:
        self._sequence += 1
        head = struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST | _ACK, self._sequence, 0)
        self._socket.send(head + body)
        answer = self._socket.recv(65_536)
        if len(answer) < 20 or struct.unpack_from("=H", answer, 4)[0] != _ERROR:
            raise OSError(errno.EPROTO, f"{what}: unexpected answer from the kernel")
        code = -struct.unpack_from("=i", answer, 16)[0]
        if code:
            raise OSError(code, f"{what}: {os.strerror(code)}")

    def add_bridge(self, name: str, mac: bytes) -> None:
        """Create a bridge; its MAC is fixed, or it would change with its members and break neighbours' caches."""
        info = attribute(_IFLA_LINKINFO, attribute(_INFO_KIND, b"bridge"))
        body = _link() + _name(name) + attribute(_IFLA_ADDRESS, mac) + info
        self._ask(_NEWLINK, _CREATE | _EXCL, body, f"bridge {name}")

    def add_veth(self, name: str, peer: str, peer_pid: int, bridge: int) -> None:
        """Create a pair of interfaces: `name` here on the bridge, `peer` in the network namespace of a process."""
        far = _link() + _name(peer) + attribute(_IFLA_NET_NS_PID, struct.pack("=I", peer_pid))
        data = attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, far))
        body = _link(0, _IFF_UP, _IFF_UP) + _name(name) + attribute(_IFLA_MASTER, struct.pack("=i", bridge))
        self._ask(_NEWLINK, _CREATE | _EXCL, body + attribute(_IFLA_LINKINFO, data), f"veth {name}")

    def delete(self, name: str) -> None:
        """Delete an interface (its peer goes with it)."""
        self._ask(_DELLINK, 0, _link() + _name(name), f"delete {name}")

    def up(self, name: str) -> None:
        """Bring an interface up."""
        self._ask(_NEWLINK, 0, _link(0, _IFF_UP, _IFF_UP) + _name(name), f"up {name}")

    def add_address(self, name: str, address: IPv4Interface) -> None:
        """Give an interface an address with its prefix."""
        head = struct.pack("=BBBBi", socket.AF_INET, address.network.prefixlen, 0, 0, socket.if_nametoindex(name))
        packed = address.ip.packed
        body = head + attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)
        self._ask(_NEWADDR, _CREATE | _EXCL, body, f"address {address} on {name}")

    def add_default_route(self, name: str, gateway: bytes) -> None:
        """Route everything else through a gateway."""
        self.add_route(name, IPv4Network("0.0.0.0/0"), gateway)

    def add_route(self, name: str, target: IPv4Network, gateway: bytes) -> None:
        """Route a network through a gateway on an interface."""
        head = struct.pack(
            "=BBBBBBBBI", socket.AF_INET, target.prefixlen, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, 0, _RTN_UNICAST, 0
        )
        body = (
            head
            + attribute(_RTA_GATEWAY, gateway)
            + attribute(_RTA_OIF, struct.pack("=i", socket.if_nametoindex(name)))
        )
        if target.prefixlen:
            body += attribute(_RTA_DST, target.network_address.packed)
        self._ask(_NEWROUTE, _CREATE | _EXCL, body, f"route {target}")
