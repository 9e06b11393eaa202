"""`map`: many calls in few jobs. A thread per map forms chunks while others run, so that their size can follow how long
calls take, and hands calls that failed through no fault of their own in again.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from firepool_ray import _front
from firepool_ray._calls import Call
from firepool_ray._completion import Completion
from firepool_wire.errors import FirepoolError, is_infra

if TYPE_CHECKING:
    from firepool_ray._handle import CallArgs, Handle
    from firepool_ray._remote import OnInfra

R_co = TypeVar("R_co", covariant=True)

#: Work that one job should hold: a job costs some 5 ms, so the loss stays at a few percent. Raise: less overhead, results
#: in larger lumps, worse balance at the end.
TARGET_S = 0.25
#: Calls of one job while nothing is known about how long they take, and at most.
FIRST_CHUNK, MAX_CHUNK = 8, 1024
#: Jobs in flight for each pod that the pool can have: one runs, one waits.
DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a map goes; see `RemoteFunction.map`."""

    order: bool = True
    return_exceptions: bool = False
    concurrency: int | None = None
    chunk: int | Literal["auto"] = "auto"
    on_infra: "OnInfra" = "retry"

    def __post_init__(self) -> None:
        if self.chunk != "auto" and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"chunk={self.chunk!r}: calls a job, at least 1, or 'auto'")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}: jobs in flight, at least 1")
        if self.on_infra not in ("retry", "none", "raise"):
            raise ValueError(f"on_infra={self.on_infra!r}: use 'retry', 'none' or 'raise'")


class MapResults(Generic[R_co]):
    """The results of a map: an iterator, an async iterator, with a length."""

    def __init__(self, handle: "Handle[..., R_co]", calls: "Sequence[CallArgs]", plan: Plan) -> None:
        self._handle, self._calls, self._plan = handle, calls, plan
        #: Items that no job holds.
        self._todo: deque[int] = deque(range(len(calls)))
        self._again: set[int] = set()
        #: Where each finished item's outcome lies.
        self._found: list[Call | FirepoolError | None] = [None] * len(calls)
        self._place: list[int] = [0] * len(calls)
        self._arrived = [Completion() for _ in calls] if plan.order else []
        self._ready: SimpleQueue[int] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Call, list[int]] | None] = SimpleQueue()
        self._in_flight: dict[Call, list[int]] = {}
        self._next = 0
        self._cancelled = False
        self._capacity = 0
        if calls:
            # The first wave leaves in the caller's thread: what cannot be pickled is his to know.
            self._capacity = plan.concurrency or DEPTH * _front.current().capacity(handle.sku)
            self._fill()
            threading.Thread(target=self._run, name="firepool-map", daemon=True).start()

    # -- forming jobs --

    def _run(self) -> None:
        while self._todo or self._in_flight:
            ended = self._ended.get()
            if ended is None:
                break
            try:
                self._settle(*ended)
                self._fill()
            except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to the one who iterates
                self._give_up(error)
        self._calls = ()

    def _fill(self) -> None:
        while self._todo and len(self._in_flight) < self._capacity and not self._cancelled:
            items = [self._todo.popleft() for _ in range(min(self._chunk(), len(self._todo)))]
            call = self._handle.submit_calls([self._calls[n] for n in items], "map")
            self._in_flight[call] = items
            call.completion.subscribe(lambda call=call, items=items: self._ended.put((call, items)))  # type: ignore[misc]

    def _chunk(self) -> int:
        if self._plan.chunk != "auto":
            return self._plan.chunk
        share = math.ceil(len(self._todo) / self._capacity)
        item_s = self._handle.item_s
        wanted = FIRST_CHUNK if item_s is None else int(TARGET_S / max(item_s, 1e-5))
        return max(1, min(share, wanted, MAX_CHUNK))

    def _settle(self, call: Call, items: list[int]) -> None:
        self._in_flight.pop(call, None)
        if call.started_at is not None and call.error is None:
            each = (monotonic() - call.started_at) / len(items)
            old = self._handle.item_s
            self._handle.item_s = each if old is None else (old + each) / 2
        for place, n in enumerate(items):
            if self._plan.on_infra == "retry" and n not in self._again and not self._cancelled and call.is_infra(place):
                self._again.add(n)
                self._todo.append(n)
            else:
                self._arrive(n, call, place)

    def _arrive(self, n: int, found: "Call | FirepoolError", place: int) -> None:
        self._found[n], self._place[n] = found, place
        if self._plan.order:
            self._arrived[n].complete()
        else:
            self._ready.put(n)

    def _give_up(self, error: Exception) -> None:
        from firepool_wire.errors import Internal

        told = error if isinstance(error, FirepoolError) else Internal(f"the map broke off: {error!r}")
        self._todo.clear()
        for n, found in enumerate(self._found):
            if found is None and not any(n in items for items in self._in_flight.values()):
                self._arrive(n, told, 0)

    # -- handing out --

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[R_co]:
        return self

    def __next__(self) -> R_co:
        if self._next >= len(self._found):
            raise StopIteration
        n = self._next
        try:
            if self._plan.order:
                if not self._arrived[n].done:
                    _front.warn_if_in_loop("iterating over map()", "use `async for`")
                self._arrived[n].wait(None)
            else:
                if self._ready.empty():
                    _front.warn_if_in_loop("iterating over map()", "use `async for`")
                n = self._ready.get()
        except KeyboardInterrupt:
            self.cancel()
            raise
        self._next += 1
        value: R_co = self._hand_out(n)
        return value

    def _hand_out(self, n: int) -> Any:
        found = self._found[n]
        self._found[n] = None
        outcome = found.outcome(self._place[n]) if isinstance(found, Call) else found
        if not isinstance(outcome, FirepoolError):
            return outcome
        if is_infra(outcome) and self._plan.on_infra == "none":
            return None
        if self._plan.return_exceptions and not (is_infra(outcome) and self._plan.on_infra == "raise"):
            return outcome
        self.cancel()
        raise outcome

    def __aiter__(self) -> "MapResults[R_co]":
        return self

    async def __anext__(self) -> R_co:
        import asyncio

        if self._next >= len(self._found):
            raise StopAsyncIteration
        try:
            return await asyncio.to_thread(self.__next__)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ask for the end of every job in flight and submit no more; items without a result fail as cancelled."""
        from firepool_wire.errors import Cancelled

        self._cancelled = True
        waiting, self._todo = list(self._todo), deque()
        for call in list(self._in_flight):
            call.session.cancel(call)
        for n in waiting:
            self._arrive(n, Cancelled("the map was cancelled before this call was submitted"), 0)
