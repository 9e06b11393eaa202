"""Who wants to hear of changes: subscriptions of callers (event streams) and waiters for one job's end.

Fed by `Notify` effects, in the order of the engine; rows of finished jobs come along, so that a stream needs no read
of the store. A subscriber that does not keep up loses its queue and is told to re-read (`overflowed`).
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from firepool_broker.shell.metrics import Metrics
from firepool_broker.shell.ports import JobRow
from firepool_wire.words import JobState

#: Changes that wait for one subscriber. Raise: slower readers keep up; costs memory per open event stream.
MAX_BEHIND = 20_000


@dataclass(frozen=True, slots=True)
class Change:
    """A job of the caller changed visibly. `row` and its `seq` come with terminal states; else `seq` is the job's last."""

    job: str
    state: JobState
    seq: int
    row: JobRow | None


class Subscription:
    """The changes of one caller's jobs from its entering on; ends with the broker.

    Bounded: a reader that is too far behind loses the oldest changes, is told so by `overflowed`, and re-reads.
    """

    def __init__(self, watch: "Watch", caller: str, max_behind: int = MAX_BEHIND) -> None:
        self._watch = watch
        self.caller = caller
        self._overflowed = False
        self._changes: deque[Change] = deque(maxlen=max_behind)
        self._waiting: asyncio.Future[None] | None = None
        #: The broker stops: nothing follows.
        self.ended = False

    async def __aenter__(self) -> Self:
        self._watch.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.remove(self)

    async def take(self, timeout_s: float) -> Sequence[Change]:
        """Every change that has gathered, or those that come first within `timeout_s` (none: empty)."""
        if not self._changes and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def overflowed(self) -> bool:
        """Whether changes were lost since this was last asked."""
        lost, self._overflowed = self._overflowed, False
        return lost

    def put(self, change: Change) -> bool:
        """Add a change; False: the oldest one was lost for it."""
        kept = len(self._changes) != self._changes.maxlen
        self._overflowed |= not kept
        self._changes.append(change)
        self._wake()
        return kept

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Watch:
    """All subscriptions and waiters of a broker."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._waiters: dict[str, set[asyncio.Future[JobRow | None]]] = {}
        self._ended = False

    def add(self, subscription: Subscription) -> None:
        """Begin to feed a subscription."""
        self._subscriptions.setdefault(subscription.caller, set()).add(subscription)
        if self._ended:
            subscription.end()

    def remove(self, subscription: Subscription) -> None:
        """Stop feeding a subscription."""
        group = self._subscriptions.get(subscription.caller, set())
        group.discard(subscription)
        if not group:
            self._subscriptions.pop(subscription.caller, None)

    def told(self, caller: str, change: Change) -> None:
        """Pass a change on to the caller's subscribers; a row also ends the job's waiters."""
        for subscription in self._subscriptions.get(caller, ()):
            if not subscription.put(change):
                self._metrics.watch_overflows.inc()
        if change.row is not None:
            self.finish(change.job, change.row)

    def finish(self, job: str, row: JobRow | None) -> None:
        """End the waiters of a job; None: it will never have a row (refused)."""
        for waiter in self._waiters.pop(job, ()):
            if not waiter.done():
                waiter.set_result(row)

    async def terminal(self, job: str, timeout_s: float) -> JobRow | None:
        """The job's terminal row once it has one, or None after `timeout_s`."""
        waiter: asyncio.Future[JobRow | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(job, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            group = self._waiters.get(job)
            if group is not None:
                group.discard(waiter)
                if not group:
                    del self._waiters[job]

    def end(self) -> None:
        """The broker stops: streams end, waiters get None."""
        self._ended = True
        for group in self._subscriptions.values():
            for subscription in group:
                subscription.end()
        for job in list(self._waiters):
            self.finish(job, None)
