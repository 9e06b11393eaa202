"""The pods' network: a way out with the machine's own address, and nothing left behind."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from firepool_agent import masquerade
from tests.agent.podkit import CAN_NAMESPACE, Nest

IP = shutil.which("ip")
pytestmark = [
    pytest.mark.linux,
    pytest.mark.root,
    pytest.mark.skipif(not CAN_NAMESPACE or os.geteuid() != 0 or not IP, reason="needs root, namespaces and ip(8)"),
]
OUTSIDE = """
import socket, sys
s = socket.socket(); s.bind(('0.0.0.0', 80)); s.listen()
print('up', flush=True)
peer, address = s.accept()
peer.sendall(address[0].encode()); peer.close()
sys.stdin.read()
"""


def ip(*words: str, netns: int | None = None) -> None:
    inside = ["nsenter", "-t", str(netns), "-n"] if netns else []
    subprocess.run([*inside, str(IP), *words], check=True, capture_output=True)


@pytest.fixture
def outside() -> Iterator[str]:
    """A host beyond this machine: another network namespace behind a link of its own; tells every caller its address."""
    server = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-I", "-c", OUTSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin and server.stdout
    name = f"fpout{os.getpid() % 100000}"
    try:
        assert server.stdout.readline() == "up\n"
        ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", str(server.pid))
        ip("addr", "add", "198.51.100.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("addr", "add", "198.51.100.2/30", "dev", "far", netns=server.pid)
        ip("link", "set", "far", "up", netns=server.pid)
        yield "198.51.100.2"
    finally:
        server.stdin.close()
        server.stdout.close()
        server.terminate()
        server.wait()
        subprocess.run([str(IP), "link", "del", name], capture_output=True)


def test_a_pod_reaches_the_world_under_the_machines_own_address(outside: str) -> None:
    before = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    with Nest() as nest:
        nest.make()
        nest.say(do="hello")
        assert nest.hear("hello")["network_note"] == ""
        code = f"import socket; s = socket.create_connection(('{outside}', 80), 10); print(s.recv(100).decode())"
        assert nest.attempt(code)["out"] == "198.51.100.1\n"
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == before


def test_a_table_is_made_and_removed_as_a_whole() -> None:
    masquerade.switch_on("firepool_test", IPv4Network("10.99.0.0/20"), "fptest")
    masquerade.switch_off("firepool_test")
    with pytest.raises(FileNotFoundError):
        masquerade.switch_off("firepool_test")


def test_addresses_come_back_late(tmp_path: Path) -> None:
    with Nest() as nest:
        seen = []
        for n in range(3):
            seen.append(nest.make(f"p{n}")["address"])
            nest.say(do="unmake", name=f"p{n}", why="x")
            nest.hear("ended", f"p{n}")
        assert len(set(seen)) == 3
        assert all(socket.inet_aton(address) for address in seen)


def test_a_pod_without_network_has_loopback_only() -> None:
    with Nest() as nest:
        state = nest.make(network="none")
        assert state["address"] == ""
        code = """
import socket
print([name for _, name in socket.if_nameindex()])
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); socket.create_connection(s.getsockname(), 5).close(); print('loop')
"""
        assert nest.attempt(code)["out"] == "['lo']\nloop\n"
