"""A job's log by byte offset, with follow and an end that means something.

The log of a job is the logs of its attempts one after the other, so offsets stay good over retries. A response that was
cut short can be continued at the offset reached; a response that follows ends only when nothing can come any more.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse

from firepool_broker.api.auth import Role
from firepool_broker.api.door import StreamCut
from firepool_broker.api.lobby import lobby, visible_row
from firepool_broker.api.needs import Broker
from firepool_broker.api.routes import bytes_of, declared, router
from firepool_broker.core.ids import JobId, attempt_id
from firepool_broker.shell.ports import JobRow
from firepool_wire.errors import BadRequest, NotFound
from firepool_wire.words import TERMINAL

_PIECE = 64 * 1024

#: How long a follower sleeps at most before it looks at the job's row again: only a job that is re-queued without its
#: log having ended is found by this.
_LOOK_AGAIN_S = 2.0

api = router()


@api.get("/v1/jobs/{job}/logs", **declared(Role.VIEWER, NotFound, ok={200: bytes_of()}))
async def logs(
    request: Request,
    job: str,
    offset: Annotated[int, Query(ge=-(1 << 62), lt=1 << 62, description="first byte; negative: from the end")] = 0,
    follow: bool = False,
    rank: Annotated[int, Query(ge=0, le=1 << 20)] = 0,
) -> Response:
    """What the job wrote (stdout and stderr as they came), from byte `offset` on.

    `Firepool-Log-Offset` is the offset of the first byte of the body. Without `follow`, `Firepool-Log-Complete: true` says
    that nothing will come behind it. With `follow` the answer ends only when the log has ended.
    """
    desk = lobby(request)
    row = await visible_row(request, job)
    if rank >= row.spec.pods:
        raise BadRequest(f"job {job} has {row.spec.pods} ranks, counted from 0", field="rank")
    reader = Reader(desk.runner, row, rank, desk.closing)
    if offset < 0:
        offset = max(0, reader.size() + offset)
    headers = {"Firepool-Log-Offset": str(offset), "Cache-Control": "no-store"}
    if not follow:
        headers["Firepool-Log-Complete"] = "true" if row.state in TERMINAL else "false"
    return StreamingResponse(reader.pieces(offset, follow=follow), 200, headers, "application/octet-stream")


@dataclass(slots=True)
class Reader:
    """One reading of one rank's log."""

    runner: Broker
    row: JobRow
    rank: int
    #: Set when the broker is about to stop.
    closing: asyncio.Event

    def size(self) -> int:
        """Bytes that the job's log has now."""
        return sum(self.runner.logs.size(self._log(n), self.rank) for n in range(self.row.retry_count + 1))

    async def pieces(self, offset: int, *, follow: bool) -> AsyncIterator[bytes]:
        """Bytes from `offset` on."""
        attempt, begins = 0, 0
        while True:
            log = self._log(attempt)
            # Asked before the bytes are read: whatever was written before the end was known is read below.
            over = attempt < self.row.retry_count or self.row.state in TERMINAL
            data = self._read(log, offset - begins)
            if data:
                offset += len(data)
                yield data
                continue
            if over:
                begins += self.runner.logs.size(log, self.rank)
                if attempt == self.row.retry_count:
                    return
                attempt += 1
            elif not follow:
                return
            else:
                await self._more(log, max(0, offset - begins))

    def _log(self, attempt: int) -> str:
        return attempt_id(JobId(self.row.job), attempt)

    def _read(self, log: str, offset: int) -> bytes:
        if offset >= self.runner.logs.size(log, self.rank):
            return b""
        return self.runner.logs.read(log, self.rank, offset, _PIECE)

    async def _more(self, log: str, offset: int) -> None:
        """Return when the log may have grown or the job may have gone on.

        Raises:
            StreamCut: the broker stops; an end of this answer would say that the log is complete.
        """
        if self.closing.is_set():
            raise StreamCut
        waits: set[asyncio.Task[object]] = {
            asyncio.create_task(self.runner.wait_terminal(self.row.job, _LOOK_AGAIN_S)),
            asyncio.create_task(self.closing.wait()),
        }
        if not self.runner.logs.finished(log, self.rank):
            waits.add(asyncio.create_task(self.runner.logs.more(log, self.rank, offset)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self.row = await self.runner.row(self.row.job) or self.row
