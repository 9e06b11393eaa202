"""What a remote generator yields, as it comes: an iterator and an async iterator over result frames."""

import os
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from firepool_ray import _front
from firepool_ray._calls import Call
from firepool_ray._errors import error_of
from firepool_ray._http import Disconnected, path_of
from firepool_wire.errors import FirepoolError
from firepool_wire.frames import Items, ItemStatus, Kind, Parser

T_co = TypeVar("T_co", covariant=True)

#: A broker that can send results before the job is over says so.
FOLLOW = "results.follow"
#: Pause before a broken stream is taken up again.
_PAUSE_S = 0.1

_END = object()


class JobStream(Generic[T_co]):
    """Values of a remote generator, each as soon as it is there. Iterate once; `cancel` or close it to stop early."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._values = self._read()

    @property
    def job_id(self) -> str | None:
        """The broker's id, once it took the job."""
        return self._call.job_id

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        _front.warn_if_in_loop("iterating over a remote generator", "use `async for`")
        return self._take()

    def _take(self) -> T_co:
        try:
            value: T_co = next(self._values)
        except KeyboardInterrupt:
            self.cancel()
            raise
        return value

    def __aiter__(self) -> "JobStream[T_co]":
        return self

    async def __anext__(self) -> T_co:
        import asyncio

        value: Any = await asyncio.to_thread(next, self._values, _END)
        if value is _END:
            raise StopAsyncIteration
        found: T_co = value
        return found

    def cancel(self) -> None:
        """Ask for the job's end; over already: nothing."""
        self._call.session.cancel(self._call)

    close = cancel

    def __repr__(self) -> str:
        return f"<JobStream {self._call.order.name} {self._call.job_id or self._call.key}>"

    def _read(self) -> Iterator[Any]:
        call = self._call
        call.accepted.wait(None)
        if call.job_id is None or not call.session.can(FOLLOW):
            yield from self._after_the_end(0)
            return
        told, ended = 0, False
        for index, status, payload in self._followed(call.job_id):
            # What a new connection, or a new attempt, tells again is passed over.
            if index != told:
                continue
            if status is ItemStatus.STOP:
                ended = True
                break
            told += 1
            yield self._value(status, payload)
        if not ended:
            yield from self._after_the_end(told)

    def _after_the_end(self, told: int) -> Iterator[Any]:
        """Items from number `told` on, once the job is over; its error where it did not come to its end."""
        call = self._call
        call.completion.wait(None)
        items = call.items()
        while told in items and items[told][0] is not ItemStatus.STOP:
            yield self._value(*items[told])
            told += 1
        if told not in items and call.error is not None:
            raise call.error

    def _value(self, status: ItemStatus, payload: bytes) -> object:
        call = self._call
        found = (
            error_of(payload, call.order.reading.loads, call.job_id, call.order.file)
            if status is ItemStatus.ERROR
            else call.read(payload)
        )
        if isinstance(found, FirepoolError):
            raise found
        return found

    def _followed(self, job_id: str) -> Iterator[tuple[int, ItemStatus, bytes]]:
        """Items as they come; ends when the broker ends the answer. A broken connection is made anew, from the begin."""
        session = self._call.session
        while session.pid == os.getpid() and not session.closed:
            parser, items = Parser(), Items()
            try:
                with session.api.stream(path_of("jobs", job_id, "result") + "?follow=true") as (_, connection, pieces):
                    # A generator may think for as long as it likes.
                    connection.sock.settimeout(None)
                    for piece in pieces:
                        for frame in parser.feed(piece):
                            item = items.feed(frame.payload) if frame.kind is Kind.RESULT else None
                            if item is not None:
                                yield item
                return
            except Disconnected:
                if session.api.closing.wait(_PAUSE_S):
                    return
