"""What an attempt leaves behind on one pod, taken from its event log: logs, result, exit record, output files.

All of it is in the broker's store before the attempt's end is told: the pod's release waits for this, and for nothing
slower. Re-reading the log from its begin doubles nothing.
"""

import asyncio
from collections.abc import AsyncIterator

from firepool_broker.core.ids import Caller
from firepool_broker.shell.ports import AgentClient, BlobStore, LogStore
from firepool_broker.shell.runner.desk import LivePod, Run
from firepool_wire.agentapi import ExitRecord
from firepool_wire.frames import Frame, Kind, pack
from firepool_wire.jobspec import INLINE_RESULT_BYTES

#: Result pieces (≤ 1 MiB each) on their way to the blob store. Raise: smoother large results; costs memory.
SPOOL_PIECES = 4
MAX_RESULT_BYTES = 2 * 1024**3
MAX_OUTPUT_BYTES = 4 * 1024**3
MAX_NOTES = 100


class Spool:
    """A result that is too large for the job's row, on its way into the blob store while it still arrives."""

    def __init__(self, blobs: BlobStore, caller: Caller) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(SPOOL_PIECES)
        self._task = asyncio.get_running_loop().create_task(blobs.put(caller, self._drain(), None, MAX_RESULT_BYTES))

    async def _drain(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def add(self, piece: bytes | None) -> None:
        """Pass a piece on (None: that was all), at the store's pace. Raises: what the store raised."""
        put = asyncio.ensure_future(self._pieces.put(piece))
        await asyncio.wait((put, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not put.done():
            put.cancel()
            self._task.result()

    async def digest(self) -> str:
        """The digest of all of it, once stored."""
        await self.add(None)
        return await self._task

    async def cancel(self) -> None:
        """Give up; nothing stays in the store."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Harvest:
    """Takes the frames of one pod's part of an attempt."""

    def __init__(self, run: Run, caller: Caller, logs: LogStore, blobs: BlobStore) -> None:
        self._run = run
        self._caller = caller
        self._logs = logs
        self._blobs = blobs
        #: Log frames up to here were stored before (by an earlier reading): they are skipped.
        self._stored = logs.event_offset(run.attempt, run.rank) if run.read_before else 0
        run.read_before = True
        self._parts: list[bytes] = []
        self._spool: Spool | None = None
        self._record: ExitRecord | None = None
        #: Offset behind the last frame taken: where a broken stream continues.
        self.offset = 0
        #: The END frame was taken: nothing is left to read.
        self.ended = False
        self._bytes = 0
        run.notes.clear()

    async def take(self, frame: Frame) -> None:
        """One frame. Raises: StoreUnavailable, OSError: the stores cannot take it now."""
        if frame.kind is Kind.LOG:
            if frame.end > self._stored:
                run = self._run
                self._logs.append(run.attempt, run.rank, frame.payload[0], frame.payload[1:], frame.end)
        elif frame.kind is Kind.RESULT:
            if self._run.rank == 0:
                await self._result(pack(Kind.RESULT, frame.payload))
        elif frame.kind is Kind.EXIT:
            self._record = ExitRecord.from_json(frame.json())
        elif frame.kind is Kind.NOTE and len(self._run.notes) < MAX_NOTES:
            self._run.notes.append(frame.json())
        self.ended = frame.kind is Kind.END
        self.offset = frame.end

    async def _result(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._spool is None and self._bytes > INLINE_RESULT_BYTES:
            self._spool = Spool(self._blobs, self._caller)
            for part in self._parts:
                await self._spool.add(part)
            self._parts.clear()
        if self._spool is not None:
            await self._spool.add(piece)
        else:
            self._parts.append(piece)

    async def finish(self, agents: AgentClient, pod: LivePod) -> ExitRecord | None:
        """The log was read to its end: store the rest and note it all on the run.

        Returns None when the log ended without an exit record (a prepare that was abandoned).
        """
        run, record = self._run, self._record
        if record is None:
            return None
        if self._spool is not None:
            run.result_blob = await self._spool.digest()
            self._spool = None
        elif self._parts:
            run.result = b"".join(self._parts)
        run.result_bytes = self._bytes
        run.outputs = [await self._output(agents, pod, entry) for entry in record.outputs]
        self._logs.finish(run.attempt, run.rank)
        run.exit = record
        return record

    async def _output(self, agents: AgentClient, pod: LivePod, entry: dict[str, object]) -> dict[str, object]:
        path = str(entry["path"])
        stream = agents.output(pod.address, self._run.attempt, path)
        digest = await self._blobs.put(self._caller, stream, None, MAX_OUTPUT_BYTES)
        return {"path": path, "bytes": entry.get("bytes"), "digest": digest, "rank": self._run.rank}

    async def drop(self) -> None:
        """Give up this reading."""
        if self._spool is not None:
            await self._spool.cancel()
            self._spool = None
