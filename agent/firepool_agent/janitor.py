"""The pod's helper process: the kill sweep with split uids, and deleting what a reset moved aside.

It is forked once, before the agent has threads or a loop, and stays small, single-threaded and privileged. For a sweep it
takes `setresuid(K, U, K)` for a moment: signals go out as the attempt's uid U, while nothing of U's may signal it, since its
real and saved uid are K's, which owns no process. (One that merely took U is killed first by a job that loops
`kill(-1, SIGKILL)`.) CAP_KILL is given up, or `kill(-1)` would take the agent's own processes along; changing uids keeps the
other capabilities, so no process has to be forked for a sweep.

Deleting never walks a path that the job chose: directories are renamed to the top of the trash and emptied there by
descriptor, so neither depth nor a swapped link matters.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from firepool_agent import procfs, syscalls
from firepool_wire.nursery import PodConfig

_MESSAGE = 65_536
_ALL_CAPABILITIES = (1 << 40) - 1
#: Steps of a deletion, and bytes of one of them, that the janitor itself does. Raise: fewer forks (2 ms of CPU each); a sweep may
#: wait for them.
_STEPS_HERE, _BYTES_HERE = 64, 1 << 20


class Janitor:
    """The agent's handle on its janitor. Calls are synchronous and short; deleting reports back later."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        #: Paths being deleted.
        self._open: set[str] = set()
        #: Paths that could not be deleted, with the reason.
        self.failed: dict[str, str] = {}

    @classmethod
    def start(cls, config: PodConfig) -> "Janitor":
        """Fork the janitor. Call it at boot: single-threaded, before any loop."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _live(config, theirs)
        theirs.close()
        return cls(pid, ours)

    def fileno(self) -> int:
        """Readable when a deletion was reported (then call `collect`)."""
        return self._channel.fileno()

    def sweep(self, uid: int, timeout_s: float = 5.0) -> str:
        """Kill every process of `uid` that is still there and remove its System V objects; "" or what went wrong."""
        self._channel.send(json.dumps({"do": "sweep", "uid": uid}).encode())
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            answer = self._receive(left)
            if answer is not None and answer["is"] == "swept":
                return str(answer["error"])
        return "the janitor did not answer"

    def shred(self, path: str) -> None:
        """Begin to delete a directory that lies in the trash."""
        self._open.add(path)
        self._channel.send(json.dumps({"do": "shred", "path": path}).encode())

    def collect(self) -> bool:
        """Take in what was reported; whether nothing is being deleted any more."""
        while self._receive(0.0) is not None:
            pass
        return not self._open

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is being deleted any more; False when the time is up."""
        until = time.monotonic() + timeout_s
        while self._open:
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._receive(left)
        return True

    def _receive(self, wait_s: float) -> dict[str, Any] | None:
        readable, _, _ = select.select([self._channel], [], [], wait_s)
        if not readable:
            return None
        data = self._channel.recv(_MESSAGE)
        if not data:
            raise ChildProcessError("the janitor is gone")
        answer: dict[str, Any] = json.loads(data)
        if answer["is"] == "shredded":
            self._open.discard(answer["path"])
            if answer["error"]:
                self.failed[answer["path"]] = answer["error"]
        return answer

    def close(self) -> None:
        """End the janitor."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _live(config: PodConfig, channel: socket.socket) -> NoReturn:
    code = 1
    try:
        _settle(config, channel.fileno())
        while data := channel.recv(_MESSAGE):
            ask = json.loads(data)
            if ask["do"] == "sweep":
                channel.send(json.dumps({"is": "swept", "error": _sweep(config, int(ask["uid"]))}).encode())
            else:
                _shred_and_tell(ask["path"], channel)
        code = 0
    except BaseException as e:  # noqa: BLE001  (a fork of the agent must never return into its code)
        os.write(2, f"janitor: {e}\n".encode())
    finally:
        os._exit(code)


def _settle(config: PodConfig, keep: int) -> None:
    os.closerange(3, keep)
    os.closerange(keep + 1, 65_536)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that delete are nobody's business once they told
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        syscalls.set_name("fp-janitor")
        if config.uid_killer:
            syscalls.set_securebits(syscalls.SECBIT_NO_SETUID_FIXUP)
            syscalls.set_capabilities(_held() & ~(1 << syscalls.CAP_KILL))
        syscalls.die_with_parent(signal.SIGKILL)


def _held() -> int:
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("CapPrm:"):
                return int(line.split()[1], 16)
    return _ALL_CAPABILITIES


def _sweep(config: PodConfig, uid: int) -> str:
    """kill(-1) as the attempt, then its System V objects; "" or the reason why it could not be done."""
    killer = config.uid_killer
    if not killer or not uid:
        return ""
    try:
        os.setresuid(killer, uid, killer)
        try:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        finally:
            os.setresuid(0, 0, 0)
            syscalls.die_with_parent(signal.SIGKILL)  # every change of uid clears it
        for found in procfs.sysvipc():
            if found.uid == uid:
                syscalls.remove_ipc(found.kind, found.identifier)
    except OSError as e:
        return str(e)
    return ""


def _shred_and_tell(path: str, channel: socket.socket) -> None:
    """Delete and report. What is more than a few small steps goes on in a fork, so that no sweep has to wait for it; what
    most jobs leave is gone for a tenth of what that fork costs."""
    error, left, forked = "", _STEPS_HERE, False
    try:
        for size in _shredding(path):
            left -= 1
            if not forked and (left < 0 or size > _BYTES_HERE):
                if os.fork():
                    return
                forked = True
    except OSError as e:
        error = str(e)
    channel.send(json.dumps({"is": "shredded", "path": path, "error": error}).encode())
    if forked:
        os._exit(0)


def shred(path: str) -> None:
    """Delete a directory with everything in it. Raises: OSError: something would not go."""
    for _ in _shredding(path):
        pass


def _shredding(path: str) -> Iterator[int]:
    """The same in steps; yields before each how many bytes it may free."""
    top = os.path.dirname(path)
    tag = f"{os.path.basename(path)}.{os.getpid()}"
    waiting, count = [path], 0
    while waiting:
        directory = waiting.pop()
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, 0o700)
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        yield 0
                        count += 1
                        aside = f"{top}/{tag}.{count}"
                        os.chmod(entry.name, 0o700, dir_fd=fd)  # moving a directory needs to write its ".."
                        os.rename(entry.name, aside, src_dir_fd=fd)
                        waiting.append(aside)
                    else:
                        yield entry.stat(follow_symlinks=False).st_blocks * 512
                        os.unlink(entry.name, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(directory)
