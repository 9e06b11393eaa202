"""The pods' network on one machine: a bridge of fixed MAC, an address per pod, and a way out.

Distinct addresses let gangs, torchrun and Ray find distinct hosts, and fixed ports hidden in libraries do not collide. The
way out (forwarding and masquerading) is the kernel's own; where it is refused pods reach each other only, and `note` says
so. Nursery side, apart from `configure`, which runs inside the pod.
"""

import contextlib
import os
import socket
import zlib
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from firepool_agent import masquerade
from firepool_agent.netlink import Netlink

_FORWARD = "/proc/sys/net/ipv4/ip_forward"
#: Networks to try, a free one is taken; each holds 4,000 pods.
_CANDIDATES = tuple(IPv4Network(f"10.{x}.{y}.0/20") for x in (201, 203, 207, 213) for y in (0, 64, 128, 192))
_PEER = "eth0"


class Bridge:
    """The bridge of one nursery. `close` removes everything that `open` made."""

    def __init__(self, key: str) -> None:
        self._tag = f"{zlib.crc32(key.encode()):08x}"
        self.name = f"fp{self._tag}"
        self.network = IPv4Network("0.0.0.0/32")
        #: Why the network is less than wanted ("" = pods reach each other and the world).
        self.note = ""
        self._index = 0
        self._forward_before: str | None = None
        self._taken: dict[str, int] = {}
        self._last = 1

    def open(self) -> None:
        """Make bridge, address and way out. Raises: OSError: no bridge can be made here; nothing stays."""
        self.network = self._free_network()
        mac = bytes.fromhex(f"02{self._tag}01")
        with Netlink() as link:
            with contextlib.suppress(OSError):
                link.delete(self.name)  # left by a nursery of the same home that was killed
            link.add_bridge(self.name, mac)
            try:
                link.add_address(self.name, IPv4Interface((self.gateway, self.network.prefixlen)))
                link.up(self.name)
            except OSError:
                link.delete(self.name)
                raise
        self._index = socket.if_nametoindex(self.name)
        self._way_out()

    @property
    def gateway(self) -> IPv4Address:
        """The bridge's own address."""
        return self.network.network_address + 1

    def _free_network(self) -> IPv4Network:
        with open("/proc/net/route") as f:
            used = [line.split() for line in f.readlines()[1:]]
        taken = {IPv4Address(int.from_bytes(bytes.fromhex(words[1]), "little")) for words in used if len(words) > 1}
        start = int(self._tag, 16) % len(_CANDIDATES)
        for network in _CANDIDATES[start:] + _CANDIDATES[:start]:
            if not any(address in network for address in taken):
                return network
        raise OSError("every network tried for pods is in use on this machine")

    def _way_out(self) -> None:
        """Let pods reach what the machine reaches. Whatever is refused leaves them with each other and is said in `note`."""
        only = "pods reach each other, but not the world"
        try:
            with contextlib.suppress(OSError):
                masquerade.switch_off(self._table)  # left by a nursery of the same home that was killed
            masquerade.switch_on(self._table, self.network, self.name)
        except OSError as e:
            self.note = f"masquerading was refused ({e}): {only}"
            return
        try:
            with open(_FORWARD, "r+") as f:
                before = f.read().strip()
                if before != "1":
                    f.seek(0)
                    f.write("1")
                    self._forward_before = before
        except OSError as e:
            self.note = f"forwarding cannot be switched on ({e}): {only}"

    @property
    def _table(self) -> str:
        return f"firepool_{self._tag}"

    def attach(self, pod: str, pid: int) -> IPv4Interface:
        """Give the network namespace of `pid` a place on the bridge; the pod's address. Raises: OSError."""
        number = self._number(pod)
        with Netlink() as link:
            with contextlib.suppress(OSError):
                link.delete(self._veth(number))
            link.add_veth(self._veth(number), _PEER, pid, self._index)
        return IPv4Interface((self.network.network_address + number, self.network.prefixlen))

    def _veth(self, number: int) -> str:
        return f"{self.name[:10]}v{number:x}"

    def _number(self, pod: str) -> int:
        """Round the network, so that an address comes back late: neighbours may still remember who had it."""
        taken = set(self._taken.values())
        hosts = self.network.num_addresses - 3
        number = next(n for k in range(hosts) if (n := 2 + (self._last - 1 + k) % hosts) not in taken)
        self._taken[pod] = self._last = number
        return number

    def detach(self, pod: str) -> None:
        """Forget a pod's place. Its interface goes with its network namespace: waiting for that costs 20 ms."""
        self._taken.pop(pod, None)

    def close(self) -> None:
        """Remove bridge, interfaces, rules and the forwarding switch, if we turned it on."""
        with Netlink() as link:
            for _, name in socket.if_nameindex():
                if name.startswith(self.name):
                    with contextlib.suppress(OSError):
                        link.delete(name)
        with contextlib.suppress(OSError):
            masquerade.switch_off(self._table)
        others = any(name.startswith("fp") and "v" not in name for _, name in socket.if_nameindex())
        if self._forward_before is not None and os.path.exists(_FORWARD) and not others:
            with open(_FORWARD, "w") as f:
                f.write(self._forward_before)


def configure(address: IPv4Interface | None, gateway: IPv4Address | None) -> None:
    """Inside the pod: loopback up, and the address on the pod's end of the pair. Raises: OSError."""
    with Netlink() as link:
        link.up("lo")
        if address is None:
            return
        link.add_address(_PEER, address)
        link.up(_PEER)
        if gateway is not None:
            link.add_default_route(_PEER, gateway.packed)
