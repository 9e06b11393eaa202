"""Ports that wait for peers: both ways of asking agree, and answers of the kernel are read as they are written."""

import os
import socket
import struct

import pytest

from firepool_agent import procfs, sockets

pytestmark = pytest.mark.linux


def ports_of(found: set[procfs.Listener]) -> set[tuple[str, int]]:
    return {(each.protocol, each.port) for each in found if each.uid == os.getuid()}


def test_the_kernel_and_proc_agree_on_who_waits() -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as idle:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        idle.bind(("127.0.0.1", 0))
        mine = {("tcp", tcp.getsockname()[1]), ("udp", udp.getsockname()[1])}
        for seen in (ports_of(sockets.listeners()), ports_of(procfs.listeners())):
            assert mine <= seen
            assert ("tcp", idle.getsockname()[1]) not in seen
    assert not mine & ports_of(sockets.listeners())


def test_a_refusal_of_the_kernel_is_an_error_and_not_an_empty_table() -> None:
    refused = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2)
    with pytest.raises(FileNotFoundError):
        sockets.parse_answer("tcp", refused)


@pytest.mark.parametrize("data", [b"", b"\0" * 15, b"\0" * 16, struct.pack("=IHHII", 500, 20, 0, 1, 0)])
def test_a_short_answer_never_runs_past_its_end(data: bytes) -> None:
    found, _ = sockets.parse_answer("tcp", data)
    assert found == set()
