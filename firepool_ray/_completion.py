"""A one-shot signal that threads, event loops and futures can wait for, at a tenth of the price of a `Future`.

Thousands of jobs are in flight at once and most are waited for by nobody in particular, so nothing is made until
somebody waits.
"""

import threading
from collections.abc import Callable, Sequence


class Completion:
    """Becomes done once; whoever subscribed is called in the thread that completes it."""

    __slots__ = ("_lock", "_waiters", "done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], object]] | None = None
        self.done = False

    def complete(self) -> None:
        """Mark as done and call the subscribers. Twice is once."""
        with self._lock:
            if self.done:
                return
            self.done = True
            waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter()

    def subscribe(self, waiter: Callable[[], object]) -> None:
        """Call `waiter` when done, at once if that is now. It must not block or raise."""
        with self._lock:
            if not self.done:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(waiter)
                return
        waiter()

    def forget(self, waiter: Callable[[], object]) -> None:
        """Undo `subscribe`, so that repeated waits with a time-out leave nothing behind."""
        with self._lock:
            if self._waiters is not None and waiter in self._waiters:
                self._waiters.remove(waiter)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until done or the time is over. Ctrl-C gets through."""
        if self.done:
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        gate = threading.Lock()
        gate.acquire()
        release = gate.release
        self.subscribe(release)
        try:
            return gate.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            if not self.done:
                self.forget(release)


def wait_for(completions: Sequence[Completion], enough: int, timeout_s: float | None) -> None:
    """Block until `enough` of them are done, or the time is over."""
    waiting = [c for c in completions if not c.done]
    missing = enough - (len(completions) - len(waiting))
    if missing <= 0 or (timeout_s is not None and timeout_s <= 0):
        return
    lock, gate = threading.Lock(), threading.Lock()
    gate.acquire()

    def ring() -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing == 0:
                gate.release()

    for completion in waiting:
        completion.subscribe(ring)
    try:
        gate.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
    finally:
        for completion in waiting:
            if not completion.done:
                completion.forget(ring)
