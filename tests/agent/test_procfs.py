"""The text of /proc as values: recorded samples, what a hostile process can write into it, and arbitrary text."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firepool_agent import procfs

STATUS = """Name:\tpython
Umask:\t0022
State:\tS (sleeping)
Tgid:\t4242
Ngid:\t0
Pid:\t4242
PPid:\t4241
TracerPid:\t0
Uid:\t1000\t1001\t1002\t1003
Gid:\t1000\t1000\t1000\t1000
"""
SHM = """       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime
         0         32  1600                524288  1041  1041      2  1000  1000  1000  1000 1700000000          0
        42          7   666                  1024  1042  1042      0     0     0     0     0          0          0
"""
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41 1 0000000000000000 100
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 42 1 0000000000000000 20
"""
MOUNTS = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 0:22 /slots/1/work /work\\040dir rw - tmpfs tmpfs rw,size=1024k
"""


def test_a_status_gives_pid_parent_state_and_the_real_uid() -> None:
    assert procfs.parse_status(STATUS) == procfs.Process(4242, 4241, "S", 1000)


@pytest.mark.parametrize("name", ["x\\nPid:\t1", "Uid:\t0", "a b", ") R 1", "Pid:\t7\tx"])
def test_a_process_cannot_forge_its_lines_by_its_name(name: str) -> None:
    assert procfs.parse_status(STATUS.replace("python", name)) == procfs.Process(4242, 4241, "S", 1000)


def test_a_status_that_was_cut_is_no_process() -> None:
    assert procfs.parse_status(STATUS[:60]) is None


def test_system_v_objects_are_found_by_their_headings() -> None:
    assert procfs.parse_sysvipc("shm", SHM) == [procfs.IpcObject("shm", 32, 1000), procfs.IpcObject("shm", 7, 0)]


def test_message_queues_have_a_heading_of_their_own() -> None:
    text = "       key      msqid perms      cbytes  qnum lspid lrpid   uid   gid\n      1234          9   666           0     0     0     0  1005  1005\n"
    assert procfs.parse_sysvipc("msg", text) == [procfs.IpcObject("msg", 9, 1005)]


def test_only_sockets_that_wait_are_listeners() -> None:
    assert procfs.parse_sockets("tcp", TCP) == {procfs.Listener("tcp", 8080, 1000)}


def test_mounts_are_comparable_words_without_changing_ids() -> None:
    assert procfs.parse_mounts(MOUNTS) == {
        "/ / ext4 /dev/vda": 1,
        "/proc / proc proc": 1,
        "/work\\040dir /slots/1/work tmpfs tmpfs": 1,
    }
    assert procfs.parse_mounts(MOUNTS + MOUNTS)["/proc / proc proc"] == 2


@given(st.text())
def test_no_parser_ever_raises(text: str) -> None:
    procfs.parse_status(text)
    procfs.parse_status(STATUS.replace("python", text))
    for kind in ("shm", "sem", "msg"):
        procfs.parse_sysvipc(kind, text)
    for protocol in ("tcp", "udp", "tcp6", "udp6"):
        procfs.parse_sockets(protocol, text)
    procfs.parse_mounts(text)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=60))
def test_descendants_end_on_any_graph_and_never_hold_the_root(edges: list[tuple[int, int]]) -> None:
    seen = [procfs.Process(pid, parent, "S", 1) for pid, parent in edges]
    found = procfs.descendants(1, seen)
    pids = [p.pid for p in found]
    assert 1 not in pids
    assert len(pids) == len(set(pids))
    reached = {1, *pids}
    assert all(p.parent in reached for p in found)
    assert not [p for p in seen if p.parent in reached and p.pid not in reached and p.pid != p.parent]


@pytest.mark.linux
def test_a_child_is_seen_with_its_parent_and_uid() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        seen = procfs.read_process(child.pid)
        assert seen is not None
        assert (seen.parent, seen.uid) == (os.getpid(), os.getuid())
        assert child.pid in [p.pid for p in procfs.descendants(os.getpid(), procfs.processes())]
    finally:
        child.communicate()
    assert procfs.read_process(child.pid) is None
