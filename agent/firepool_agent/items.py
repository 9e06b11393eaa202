"""The items of a map: each runs in its own forked process, so that a crash, an `os._exit` or a leaked global stays its own.

Job side. The parent has unpickled the function once and runs none of it; an item reports over a pipe of its own, since a process
that dies in the middle of a message must not garble the others'. After a fork every page that either side writes to is copied
at 2 µs, and that is most of what a short item costs (`decisions/0031`); hence: processes are forked some at a time and wait for their turn, little
Python runs between forks, and results leave in batches.
"""

import gc
import json
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from firepool_agent import quickfork
from firepool_agent.outcome import Outcome, flush
from firepool_agent.stackdump import Stacks
from firepool_wire.errors import FirepoolError, NonZeroExit, Signaled
from firepool_wire.frames import ItemStatus

#: Processes forked in one go. Raise: fewer page copies in the parent; costs waiting processes. They run one after another.
AHEAD = 8
#: How long a finished item's result may wait for company before it is sent.
BATCH_S = 0.004
#: How long an item that has delivered its result may take to end (its own children), milliseconds.
_LINGER_MS = 2000

#: Item status, exit code, payload length.
_REPORT = struct.Struct(">BBQ")
_TURN = struct.Struct(">I")

Run = Callable[[int], Outcome]


class Batch:
    """Results on their way out: `deliver` packs one, `push` sends what has gathered."""

    def __init__(self, deliver: Callable[[int, Outcome], None], push: Callable[[], None]) -> None:
        self._deliver = deliver
        self._push = push
        self._since: float | None = None

    def add(self, index: int, outcome: Outcome) -> None:
        """Take a finished item; sends when the oldest has waited long enough."""
        self._deliver(index, outcome)
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > BATCH_S:
            self.flush()

    def wait_ms(self) -> int | None:
        """How long one may wait for the next item before what is here must go; None = nothing is here."""
        if self._since is None:
            return None
        return max(0, int((self._since + BATCH_S - time.monotonic()) * 1000) + 1)

    def flush(self) -> None:
        """Send what is here."""
        if self._since is not None:
            self._since = None
            self._push()


class Waiting:
    """A forked process that waits for its turn, as its parent sees it."""

    __slots__ = ("pid", "report", "turn")

    def __init__(self, run: Run, quick: bool) -> None:
        self.report, report = os.pipe()
        turn, self.turn = os.pipe()
        self.pid = quickfork.fork(quick)
        if self.pid == 0:
            os.close(self.report)
            os.close(self.turn)
            _child(run, turn, report)
        os.close(report)
        os.close(turn)

    def close(self) -> None:
        """Let go of it: a process whose turn never came ends by itself."""
        os.close(self.report)
        os.close(self.turn)


#: Pid of the item whose turn it is; 0 between items, and in the items themselves.
_current = 0


def run_all(count: int, run: Run, batch: Batch) -> None:
    """Run items one after another, each in its own process, and deliver every outcome as it comes."""
    global _current
    gc.freeze()
    flush()  # what is still in a buffer here would be printed once more by every item
    Stacks.pass_on(lambda: _current)
    waiting: deque[Waiting] = deque()
    for index in range(count):
        if not waiting:
            quick = quickfork.is_quick()
            waiting.extend(Waiting(run, quick) for _ in range(min(AHEAD, count - index)))
        item = waiting.popleft()
        _current = item.pid
        try:
            batch.add(index, _outcome(index, item, batch))
        finally:
            _current = 0
            item.close()
    batch.flush()


def _outcome(index: int, item: Waiting, batch: Batch) -> Outcome:
    """Give the item its turn, wait for its report and its end."""
    pidfd = os.pidfd_open(item.pid)
    try:
        try:
            os.write(item.turn, _TURN.pack(index))
        except BrokenPipeError:
            data = bytearray()  # something killed it while it waited
        else:
            data = _report(item.report, pidfd, batch)
        if not _readable(pidfd, _LINGER_MS):
            os.kill(item.pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    status = os.waitpid(item.pid, 0)[1]
    if _complete(data):
        told, exit_code, length = _REPORT.unpack_from(data)
        return Outcome(ItemStatus(told), bytes(data[_REPORT.size : _REPORT.size + length]), exit_code)
    return _crash(index, status)


def _report(fd: int, pidfd: int, batch: Batch) -> bytearray:
    """The report, as far as it was written when the item had ended or was complete."""
    data = bytearray()
    os.set_blocking(fd, False)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    while True:
        ready = poller.poll(batch.wait_ms())
        if not ready:
            batch.flush()
            continue
        # A descendant of the item may hold the pipe open: the item's own end counts, not end of file.
        ended = any(found == pidfd for found, _ in ready)
        while True:
            try:
                part = os.read(fd, 1 << 20)
            except BlockingIOError:
                break
            data += part
            if not part or _complete(data):
                return data
        if ended:
            return data


def _readable(fd: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _complete(data: bytearray) -> bool:
    return len(data) >= _REPORT.size and len(data) >= _REPORT.size + _REPORT.unpack_from(data)[2]


def _crash(index: int, status: int) -> Outcome:
    """What is to say of an item that ended without a report."""
    error: FirepoolError
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        error = Signaled(f"item {index} was ended by signal {number}", signal=number, exit_code=128 + number)
    else:
        code = os.WEXITSTATUS(status)
        error = NonZeroExit(f"item {index} exited with {code} before it returned a value", exit_code=code)
    return Outcome(ItemStatus.ERROR, json.dumps(error.to_json()).encode(), 1)


def _child(run: Run, turn: int, report: int) -> NoReturn:
    code = 1
    try:
        told = os.read(turn, _TURN.size)
        if not told:
            os._exit(0)  # the parent is gone, or has no further items
        os.close(turn)
        outcome = run(_TURN.unpack(told)[0])
        flush()
        data = _REPORT.pack(outcome.status, outcome.exit_code, len(outcome.payload)) + outcome.payload
        sent = os.write(report, data)
        while sent < len(data):
            sent += os.write(report, memoryview(data)[sent:])
        code = outcome.exit_code
        # As in `multiprocessing`: what the parent registered for its own end is not run at the end of each of its forks.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util._exit_function()
            flush()
    except BaseException:  # noqa: BLE001 - the last frame of the process: say it and end
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
