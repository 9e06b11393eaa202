"""Reaping: the agent is PID 1 or sub-reaper, so every orphan of every attempt becomes its child and must be waited for.

All of it happens in the event loop on SIGCHLD. Helpers of the agent (installers, the zygote) register here as well,
in the same step in which they are started, so that nobody else ever calls `waitpid`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable


class Children:
    """Knows which pid ended how."""

    def __init__(self) -> None:
        #: Callbacks by pid: called once with the wait status.
        self._watched: dict[int, Callable[[int], None]] = {}
        #: Statuses of children that ended before anyone asked for them (a guard that dies while its pid is on the way).
        self._early: dict[int, int] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to reap."""
        loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def watch(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call `ended(status)` once the child is reaped (at once if it was already)."""
        status = self._early.pop(pid, None)
        if status is None:
            self._watched[pid] = ended
        else:
            ended(status)

    def wait(self, pid: int) -> asyncio.Future[int]:
        """The child's wait status."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.watch(pid, lambda status: None if future.done() else future.set_result(status))
        return future

    def reap(self) -> None:
        """Reap every child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                ended = self._watched.pop(pid, None)
                if ended is not None:
                    ended(status)
                else:
                    self._early[pid] = status
                    if len(self._early) > 256:  # orphans of attempts: nobody will ask
                        del self._early[next(iter(self._early))]
