"""The items of a map: each runs in its own forked process, so that a crash, an `os._exit` or a leaked global stays its own.

Job side. The parent has unpickled the function once and runs none of it; an item reports over a pipe of its own, since a process
that dies in the middle of a message must not garble the others'. After a fork every page that either side writes to is copied
at 2 µs, and that is most of what a short item costs (`decisions/0031`); hence: processes are forked some at a time and wait for their turn, little
Python runs between forks, and results leave in batches.
"""

import contextlib
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


class Item:
    """A forked process, as its parent sees it: it waits for its turn, runs one call, reports, ends."""

    __slots__ = ("pid", "pidfd", "report", "turn")

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
        self.pidfd = os.pidfd_open(self.pid)

    def begin(self, index: int) -> None:
        """It is its turn. Something may have killed it while it waited: then its end says so."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.turn, _TURN.pack(index))

    def outcome(self, index: int, batch: Batch) -> Outcome | None:
        """What it reports; None when it ended without a whole report."""
        data = _report(self.report, self.pidfd, batch)
        if not _complete(data):
            return None
        told, exit_code, length = _REPORT.unpack_from(data)
        return Outcome(ItemStatus(told), bytes(data[_REPORT.size : _REPORT.size + length]), exit_code)

    def end(self) -> int:
        """Wait for its end, as long as its own children may take; its wait status. A turn that never came ends it too."""
        os.close(self.report)
        os.close(self.turn)
        if not _readable(self.pidfd, _LINGER_MS):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pidfd)
        return os.waitpid(self.pid, 0)[1]


#: Pid of the item whose turn it is; 0 between items, and in the items themselves.
_current = 0


def run_all(count: int, run: Run, batch: Batch) -> None:
    """Run items one after another, each in its own process, and deliver every outcome as it comes.

    The next call begins when the one before has reported: an item's end (its pages are given back) overlaps with it.
    """
    global _current
    gc.freeze()
    flush()  # what is still in a buffer here would be printed once more by every item
    Stacks.pass_on(lambda: _current)
    waiting: deque[Item] = deque()
    ending: Item | None = None
    for index in range(count):
        if not waiting:
            quick = quickfork.is_quick()
            waiting.extend(Item(run, quick) for _ in range(min(AHEAD, count - index)))
        item = waiting.popleft()
        _current = item.pid
        item.begin(index)
        if ending is not None:
            ending.end()
        outcome = item.outcome(index, batch)
        _current = 0
        ending = item
        if outcome is None:
            outcome, ending = _crash(index, item.end()), None
        batch.add(index, outcome)
    if ending is not None:
        ending.end()
    batch.flush()


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
