"""The text of /proc as values: pure functions over what was read, and the few reads that the agent needs.

A parser never raises on text that the kernel (or a hostile process, which picks its own name) could write; what it
cannot read is skipped. Any room of the agent may call this one.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: States in which a process is dead for our purpose: zombie (its parent has not looked yet) and dead.
DEAD = frozenset("ZXx")


class Process(NamedTuple):
    """One process as /proc/<pid>/status shows it."""

    pid: int
    parent: int
    state: str
    #: Real uid. (The owner of /proc/<pid> would not do: it is root's for a process that made itself undumpable.)
    uid: int


def read_text(path: str) -> str:
    """A small file of the kernel's, whole. `open` would cost three times as much: four calls more, a buffer and a decoder.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65_536):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "surrogateescape")


def parse_status(text: str) -> Process | None:
    """/proc/<pid>/status. A process cannot forge a line by its name: the kernel escapes newlines in it."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        key, colon, value = line.partition(":\t")
        if colon and key not in found:
            found[key] = value
            if key == "Uid":
                break
    try:
        return Process(int(found["Pid"]), int(found["PPid"]), found["State"][0], int(found["Uid"].split()[0]))
    except (KeyError, ValueError, IndexError):
        return None


def read_process(pid: int) -> Process | None:
    """One process, or None when it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        return parse_status(os.read(fd, 4096).decode("utf-8", "surrogateescape"))
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def pids() -> list[int]:
    """Every pid in this PID namespace. Raises: OSError where there is no /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def processes() -> Iterator[Process]:
    """Every process in this PID namespace that could be read."""
    for pid in pids():
        process = read_process(pid)
        if process is not None:
            yield process


def descendants(root: int, seen: Iterable[Process]) -> list[Process]:
    """Processes below `root` (itself not included), parents before children."""
    children: dict[int, list[Process]] = {}
    for process in seen:
        if process.pid != process.parent:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    visited = {root}
    edge = [root]
    while edge:
        for process in children.get(edge.pop(), ()):
            if process.pid not in visited:
                visited.add(process.pid)
                found.append(process)
                edge.append(process.pid)
    return found


class IpcObject(NamedTuple):
    """A System V object: kind `shm`, `sem` or `msg`, its id and its owner."""

    kind: str
    identifier: int
    uid: int


#: Heading of the column that holds the ids.
_ID_HEADINGS = {"shm": "shmid", "sem": "semid", "msg": "msqid"}


def parse_sysvipc(kind: str, text: str) -> list[IpcObject]:
    """The table of /proc/sysvipc/<kind>; columns are found by their heading."""
    lines = text.splitlines()
    if not lines:
        return []
    heads = lines[0].split()
    try:
        id_column, uid_column = heads.index(_ID_HEADINGS[kind]), heads.index("uid")
    except ValueError:
        return []
    found = []
    for line in lines[1:]:
        words = line.split()
        if len(words) > max(id_column, uid_column) and words[id_column].isdecimal() and words[uid_column].isdecimal():
            found.append(IpcObject(kind, int(words[id_column]), int(words[uid_column])))
    return found


def sysvipc() -> list[IpcObject]:
    """Every System V object in this IPC namespace (nothing where the kernel has none)."""
    found: list[IpcObject] = []
    for kind in ("shm", "sem", "msg"):
        try:
            found += parse_sysvipc(kind, read_text(f"/proc/sysvipc/{kind}"))
        except OSError:
            continue
    return found


class Listener(NamedTuple):
    """A socket that waits for peers: protocol, port and the uid that made it."""

    protocol: str
    port: int
    uid: int


#: TCP_LISTEN, and the state of an unconnected UDP socket.
_WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


def parse_sockets(protocol: str, text: str) -> set[Listener]:
    """Listeners out of the table of /proc/net/<protocol>."""
    found = set()
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or words[3] != _WAITING[protocol]:
            continue
        _address, colon, port = words[1].rpartition(":")
        if not colon:
            continue
        try:
            found.add(Listener(protocol, int(port, 16), int(words[7])))
        except ValueError:
            continue
    return found


def listeners() -> set[Listener]:
    """Every waiting socket in this network namespace."""
    found: set[Listener] = set()
    for protocol in _WAITING:
        try:
            with open(f"/proc/net/{protocol}") as f:
                found |= parse_sockets(protocol, f.read())
        except OSError:
            continue
    return found


def parse_mounts(text: str) -> Counter[str]:
    """Mounts out of /proc/self/mountinfo as comparable words: place, root, type and source (ids change, these do not).

    Counted, since a mount over another of its own kind differs from it in nothing.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        head, dash, tail = line.partition(" - ")
        words, after = head.split(), tail.split()
        if dash and len(words) >= 6 and len(after) >= 2:
            found[f"{words[4]} {words[3]} {after[0]} {after[1]}"] += 1
    return found


def mounts() -> Counter[str]:
    """Mounts of this mount namespace (empty where /proc is not there)."""
    try:
        return parse_mounts(read_text("/proc/self/mountinfo"))
    except OSError:
        return Counter()
