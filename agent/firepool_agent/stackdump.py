"""Stacks of all threads on demand, for `RunTimeout` and `firepool stack`: the agent sends `STACKS_SIGNAL`, the interpreter writes
them to a pipe of the agent's, however busy or stuck its threads are. Job side.
"""

import faulthandler
import os
import signal
from collections.abc import Callable

from firepool_agent.order import STACKS_SIGNAL


class Stacks:
    """The pipe, and who answers the signal."""

    #: Write end of the agent's pipe; -1 until `arm`.
    fd: int = -1

    @classmethod
    def arm(cls, fd: int) -> None:
        """Answer the signal in this process from now on."""
        cls.fd = fd
        signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
        faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)

    @classmethod
    def pass_on(cls, current: Callable[[], int]) -> None:
        """Answer the signal, and pass it on to the process that does the work now (0: none). Processes forked from here on
        answer as well, without a further word: re-arming each would cost it 0.3 ms."""

        def forward(number: int, frame: object) -> None:
            if pid := current():
                os.kill(pid, number)

        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(STACKS_SIGNAL, forward)
        faulthandler.register(STACKS_SIGNAL, file=cls.fd, all_threads=True, chain=True)
