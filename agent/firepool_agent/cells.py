"""The agent's side of the zygote: starts it, asks it for waiting attempts, and holds each one's ends.

A `Cell` is one waiting process with its pipes. Who runs in it, and when, is `attempts`' business.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firepool_agent import procfs
from firepool_agent.order import WAITING
from firepool_agent.scratch import Slot
from firepool_wire.errors import Internal
from firepool_wire.nursery import PodConfig

_BOOT = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from firepool_agent import zygote; zygote.main(int(sys.argv[1]), sys.argv[2])"
)
_CREDENTIALS = struct.Struct("3i")
#: How long a new interpreter may take to import its preload list (torch and ray: 1.5 s when quiet).
START_TIMEOUT_S = 120.0
#: How long a fork may take before the zygote counts as stuck.
FORK_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Cell:
    """A waiting process: our ends of its pipes. The descriptors are closed by `close`."""

    slot: Slot
    #: Pid of the zygote that forked it.
    zygote: int
    #: Guard and attempt process, as this process sees them.
    guard: int
    pid: int
    job: socket.socket
    out: int
    err: int
    stacks: int
    status: int
    closed: bool = field(default=False)

    def alive(self) -> bool:
        """Whether it still waits: neither it nor its guard says anything before the launch but by dying."""
        poller = select.poll()
        poller.register(self.job, select.POLLIN)
        poller.register(self.status, select.POLLIN)
        return not poller.poll(0)

    def orphaned(self) -> bool:
        """Whether the zygote that forked it is gone: its guard, and with it the attempt, died of that."""
        seen = procfs.read_process(self.zygote)
        return seen is None or seen.state in procfs.DEAD

    def kill(self) -> None:
        """SIGKILL the guard, and with it everything in the attempt's PID namespace; elsewhere at least these two."""
        for pid in (self.guard, self.pid):
            if pid:  # 0 = not told yet; to `kill` it would mean our own process group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def discard(self) -> None:
        """End a process that was never given anything to run, and close every descriptor of it."""
        if self.closed:
            return
        self.kill()
        os.close(self.out)
        os.close(self.err)
        self.close()

    def close(self) -> None:
        """Close what the attempt's followers have not closed already (`out` and `err` belong to their readers)."""
        if not self.closed:
            self.closed = True
            self.job.close()
            os.close(self.stacks)
            os.close(self.status)


class Zygote:
    """The preloaded job interpreter of this pod."""

    def __init__(self, config: PodConfig) -> None:
        self._config = config
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        #: What the interpreter told of itself (`zygote.describe`); empty until it is up.
        self.about: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Pid of the interpreter; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def loaded(self) -> frozenset[str]:
        """Top-level modules that a forked attempt already has, and could not get anew."""
        return frozenset(self.about.get("modules", ()))

    async def start(self) -> None:
        """Start the interpreter and wait until it has imported its list. Raises: Internal."""
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        settings = {"config": self._config.to_json(), "cloudpickle_dir": _cloudpickle_dir()}
        ours.send(json.dumps(settings).encode())
        house = str(Path(__file__).parent.parent)
        command = [self._config.python, "-I", "-S", "-c", _BOOT, str(theirs.fileno()), house]
        try:
            # No user variables: whatever the agent's environment holds must not reach an attempt.
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env={"LANG": "C.UTF-8"},
            )
        except OSError as why:
            ours.close()
            raise Internal(f"the job interpreter {self._config.python} cannot be started: {why}") from None
        finally:
            theirs.close()
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)
        self.about = await self._answer(START_TIMEOUT_S, "start")

    async def cell(self, slot: Slot) -> Cell:
        """Fork a waiting attempt. Raises: Internal: the zygote could not."""
        if self._sock is None:
            await self.start()
        assert self._sock is not None
        status_r, status_w = os.pipe()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        stacks_r, stacks_w = os.pipe()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        given = (status_w, theirs.fileno(), out_w, err_w, stacks_w)
        made = Cell(slot, self.pid, 0, 0, ours, out_r, err_r, stacks_r, status_r)
        try:
            try:
                socket.send_fds(self._sock, [json.dumps(asdict(slot)).encode()], given)
            finally:
                # Now, not later: whoever waits at our ends hears of the process's death only if nobody else holds these.
                theirs.close()
                for fd in (status_w, out_w, err_w, stacks_w):
                    os.close(fd)
            answer = await self._answer(FORK_TIMEOUT_S, "fork")
            if "error" in answer:
                raise Internal(f"the zygote could not fork: {answer['error']}")
            made.guard = int(answer["guard"])
            made.pid = await asyncio.wait_for(_waiting(ours), FORK_TIMEOUT_S)
        except (OSError, TimeoutError, Internal) as why:
            made.discard()
            raise why if isinstance(why, Internal) else Internal(f"no waiting process came: {why!r}") from None
        return made

    async def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self.stop()
            raise Internal(f"the zygote did not answer ({what}) within {timeout_s:.0f} s") from None

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost("it closed its socket")  # it holds the only other end: it is ending
        elif self._answers:
            waiting = self._answers.popleft()
            if not waiting.done():
                waiting.set_result(json.loads(data))

    def _lost(self, why: str) -> None:
        """Fail who waits and reap it; the next cell starts a new interpreter."""
        while self._answers:
            waiting = self._answers.popleft()
            if not waiting.done():
                waiting.set_exception(Internal(f"the zygote is gone: {why}"))
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it; its guards, and their attempts, end with it."""
        self._lost("it was stopped")


async def _waiting(sock: socket.socket) -> int:
    """Pid of the process at the other end, from the credentials that the kernel puts on its first message."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[int] = loop.create_future()

    def readable() -> None:
        try:
            data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:  # it died with something of ours unread
            data, ancillary = b"", []
        if came.done():
            return
        if data != WAITING or not ancillary:
            came.set_exception(Internal("the attempt's process ended before it was ready"))
        else:
            came.set_result(_CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0])

    loop.add_reader(sock.fileno(), readable)
    try:
        return await came
    finally:
        loop.remove_reader(sock.fileno())


def _cloudpickle_dir() -> str | None:
    """Where our own cloudpickle lies, for job interpreters that have none."""
    found = importlib.util.find_spec("cloudpickle")
    return None if found is None or found.origin is None else str(Path(found.origin).parent.parent)
