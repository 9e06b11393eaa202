"""The items of a map: each runs in its own forked process, so that a crash, an `os._exit` or a leaked global stays its own.

Job side. The parent has unpickled the function once and runs none of it; an item reports over a pipe of its own, since a process
that dies in the middle of a message must not garble the others'.
"""

import atexit
import gc
import os
import select
import signal
import struct
import sys
from collections.abc import Callable

from firepool_agent.outcome import Outcome, flush
from firepool_agent.stackdump import Stacks
from firepool_wire.errors import FirepoolError, NonZeroExit, Signaled
from firepool_wire.frames import ItemStatus

#: Item status, exit code, payload length.
_REPORT = struct.Struct(">BBQ")
#: How long an item that has delivered its result may take to end (atexit hooks), milliseconds.
_LINGER_MS = 2000

Run = Callable[[int], Outcome]
Deliver = Callable[[int, Outcome], None]


def run_all(count: int, run: Run, deliver: Deliver) -> None:
    """Run items one after another, each in its own process, and deliver every outcome as it comes."""
    gc.freeze()
    Forked.arm()
    for index in range(count):
        deliver(index, Forked(index, run).outcome())


class Forked:
    """One item's process, as its parent sees it."""

    #: Pid of the item that runs now; 0 between items.
    current: int = 0

    @classmethod
    def arm(cls) -> None:
        """Have requests for stacks answered by whichever item runs."""
        Stacks.pass_on(lambda: cls.current)

    def __init__(self, index: int, run: Run) -> None:
        self._index = index
        self._report, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._report)
            _child(index, run, report)
        os.close(report)
        Forked.current = self._pid

    def outcome(self) -> Outcome:
        """Wait for the item's report and its end."""
        pidfd = os.pidfd_open(self._pid)
        try:
            data = self._read(pidfd)
            if not _ready(pidfd, _LINGER_MS):
                os.kill(self._pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
            os.close(self._report)
        Forked.current = 0
        _, status = os.waitpid(self._pid, 0)
        return _outcome(data) or _crash(self._index, status)

    def _read(self, pidfd: int) -> bytearray:
        """The report, as far as it was written when the item had ended or was complete."""
        data = bytearray()
        poller = select.poll()
        poller.register(self._report, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        os.set_blocking(self._report, False)
        while not _complete(data):
            ended = pidfd in [fd for fd, _ in poller.poll()]
            # A descendant of the item may hold the pipe open: the item's own end counts, not end of file.
            while not _complete(data):
                try:
                    part = os.read(self._report, 1 << 20)
                except BlockingIOError:
                    break
                if not part:
                    return data
                data += part
            if ended:
                break
        return data


def _ready(fd: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _complete(data: bytearray) -> bool:
    return len(data) >= _REPORT.size and len(data) >= _REPORT.size + _REPORT.unpack_from(data)[2]


def _outcome(data: bytearray) -> Outcome | None:
    if not _complete(data):
        return None
    status, exit_code, length = _REPORT.unpack_from(data)
    return Outcome(ItemStatus(status), bytes(data[_REPORT.size : _REPORT.size + length]), exit_code)


def _crash(index: int, status: int) -> Outcome:
    """What is to say of an item that ended without a report."""
    error: FirepoolError
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        error = Signaled(f"item {index} was ended by signal {number}", signal=number, exit_code=128 + number)
    else:
        code = os.WEXITSTATUS(status)
        error = NonZeroExit(f"item {index} exited with {code} before it returned a value", exit_code=code)
    return Outcome(ItemStatus.ERROR, error_json(error), 1)


def error_json(error: FirepoolError) -> bytes:
    """An error as an item's payload."""
    import json

    return json.dumps(error.to_json()).encode()


def _child(index: int, run: Run, report: int) -> None:
    code = 1
    try:
        gc.unfreeze()
        Stacks.again()
        outcome = run(index)
        flush()
        _send(report, _REPORT.pack(outcome.status, outcome.exit_code, len(outcome.payload)), outcome.payload)
        atexit._run_exitfuncs()
        flush()
        code = outcome.exit_code
    except BaseException:  # noqa: BLE001 - the last frame of the process: say it and end
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _send(fd: int, *parts: bytes) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]
