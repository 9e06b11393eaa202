"""`log_to_driver`: what jobs write, line by line with a prefix on this program's standard error, at a bounded rate."""

import sys
import threading
from collections import deque
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from firepool_ray._http import Disconnected, path_of
from firepool_wire.errors import FirepoolError

if TYPE_CHECKING:
    from firepool_ray._calls import Call
    from firepool_ray._session import Session

#: Jobs whose output is followed at the same time; others are printed when they end.
FOLLOWERS = 8
#: Lines a second. Raise: a terminal that cannot keep up slows the program down.
LINES_PER_S = 1000


class Printer:
    """Follows the logs of this session's jobs."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        #: Jobs that are or were followed; bounded, oldest forgotten.
        self._seen: deque[str] = deque(maxlen=50_000)
        self._known: set[str] = set()
        self._second, self._printed, self._dropped = 0.0, 0, 0

    def follow(self, call: "Call") -> None:
        """Print what a job writes; called when it starts and when it ends."""
        with self._lock:
            if call.job_id is None or call.job_id in self._known:
                return
            if len(self._seen) == self._seen.maxlen:
                self._known.discard(self._seen[0])
            self._seen.append(call.job_id)
            self._known.add(call.job_id)
            if len(self._threads) < FOLLOWERS:
                thread = threading.Thread(target=self._run, name="firepool-logs", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(call)

    def close(self) -> None:
        """Stop following."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            prefix = f"({call.order.name} {call.job_id})"
            rest = b""
            try:
                path = f"{path_of('jobs', call.job_id or '', 'logs')}?follow=true"
                with self._session.api.stream(path) as (_, connection, pieces):
                    connection.sock.settimeout(None)
                    for piece in pieces:
                        *lines, rest = (rest + piece).split(b"\n")
                        self._print(prefix, lines)
            except (Disconnected, FirepoolError) as why:
                self._session.note(f"the output of job {call.job_id} broke off: {why}")
            if rest:
                self._print(prefix, [rest])

    def _print(self, prefix: str, lines: list[bytes]) -> None:
        with self._lock:
            now = monotonic()
            if now - self._second >= 1.0:
                if self._dropped:
                    sys.stderr.write(f"(firepool) {self._dropped} lines left out, {LINES_PER_S} a second are shown\n")
                self._second, self._printed, self._dropped = now, 0, 0
            room = max(0, LINES_PER_S - self._printed)
            shown = lines[:room]
            self._printed += len(shown)
            self._dropped += len(lines) - len(shown)
            sys.stderr.write("".join(f"{prefix} {line.decode('utf-8', 'replace')}\n" for line in shown))
            sys.stderr.flush()
