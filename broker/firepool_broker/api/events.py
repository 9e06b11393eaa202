"""The event stream: every change of a caller's jobs as one line of JSON, resumable by `seq`, never in the broker's way.

What a reader relies on: every job that ends after `from` gets its terminal line exactly once per connection, in the order of
`seq`; a line is only written when the reader took the one before (the runner's window in between is bounded). When the
window overflowed, the stream says `resync` and reads the ended jobs again from the store. States in between are told
when they happen and not repeated.
"""

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from firepool_broker.api.auth import Role
from firepool_broker.api.bodies import row_body
from firepool_broker.api.lobby import Lobby, lobby, who
from firepool_broker.api.needs import Change, Subscription
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.schemas import EventLine
from firepool_broker.shell.ports import JobRow
from firepool_wire.words import TERMINAL

NDJSON = "application/x-ndjson"

#: Rows that one read of the store brings while a stream catches up.
_PAGE = 256

api = router()


@api.get(
    "/v1/events",
    **declared(Role.VIEWER, ok={200: {NDJSON: json_of("EventLine")["application/json"]}}),
)
async def events(
    request: Request,
    start: Annotated[
        int | None,
        Query(alias="from", ge=0, lt=1 << 63, description="`seq` of the last line seen; absent: from now on"),
    ] = None,
    client: Annotated[str, Query(max_length=256, description="name of the client, for the broker's log")] = "",
) -> Response:
    """Changes of the caller's jobs as they happen (newline-delimited JSON), after those that ended behind `from`."""
    desk = lobby(request)
    stream = Stream(desk, who(request).caller, start)
    return StreamingResponse(stream.pieces(), 200, {"Cache-Control": "no-store"}, NDJSON)


class Stream:
    """One reader's stream."""

    def __init__(self, desk: Lobby, caller: str, start: int | None) -> None:
        self._runner = desk.runner
        self._heartbeat_s = desk.settings.heartbeat_s
        self._caller = caller
        #: The reader's place, told with every line; None until it is known where "now" is.
        self._seq = start
        #: Ended jobs up to here were read from the store: the window's news of them is old.
        self._read_to = start or 0

    async def pieces(self) -> AsyncIterator[bytes]:
        """The stream's bytes; they end only with the broker."""
        async with self._runner.watch(self._caller) as window:
            if self._seq is None:
                self._seq = await self._runner.store.newest_seq(self._caller)
            yield _lines([self._mark("heartbeat")])
            async for piece in self._missed():
                yield piece
            while not window.ended:
                async for piece in self._live(window):
                    yield piece

    async def _live(self, window: Subscription) -> AsyncIterator[bytes]:
        changes = await window.take(self._heartbeat_s)
        if window.overflowed():
            # What gathered is dropped too: the store has it all, in order.
            yield _lines([self._mark("resync")])
            async for piece in self._missed():
                yield piece
        elif changes:
            lines = await self._told(changes)
            if lines:
                yield _lines(lines)
        elif not window.ended:
            yield _lines([self._mark("heartbeat")])

    async def _missed(self) -> AsyncIterator[bytes]:
        """Jobs that ended behind `seq`, from the store."""
        while rows := await self._runner.store.ended_since(self._caller, self._seq or 0, _PAGE):
            self._seq = self._read_to = rows[-1].seq
            yield _lines([_ended(row) for row in rows])

    async def _told(self, changes: Sequence[Change]) -> list[EventLine]:
        lines: list[EventLine] = []
        for change in changes:
            if change.state not in TERMINAL:
                lines.append(
                    {"seq": change.seq, "job": change.job, "state": change.state, "terminal": False},
                )
                continue
            row = change.row or await self._runner.store.get(change.job)
            if row is not None and row.seq > self._read_to:
                self._seq = max(self._seq or 0, row.seq)
                lines.append(_ended(row))
        return lines

    def _mark(self, kind: str) -> EventLine:
        seq = self._seq or 0
        return {"seq": seq, "resync": True} if kind == "resync" else {"seq": seq, "heartbeat": True}


def _ended(row: JobRow) -> EventLine:
    line: EventLine = {
        "seq": row.seq,
        "job": row.job,
        "state": row.state,
        "terminal": True,
        "idempotency_key": row.spec.idempotency_key,
        "body": row_body(row),
    }
    if row.result is not None:
        line["result"] = b64encode(row.result).decode()
    return line


def _lines(lines: Sequence[EventLine]) -> bytes:
    return b"".join(to_json(line, inf_nan_mode="null") + b"\n" for line in lines)
