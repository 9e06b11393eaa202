"""Result frames of a job as they come: from the agent's own event log while it runs, from the store once it ended.

The agent keeps the log until the end is durable, so a reader that falls behind the end goes on in the store's copy at
the same byte.
"""

import asyncio
from collections.abc import AsyncIterator

from firepool_broker.core.ids import JobId
from firepool_broker.shell.ports import AgentUnreachable, JobRow
from firepool_broker.shell.runner.desk import Desk, LivePod
from firepool_broker.shell.runner.watch import Watch
from firepool_wire.errors import FirepoolError
from firepool_wire.frames import Kind, pack
from firepool_wire.words import TERMINAL

#: How long a reader of a waiting job sleeps before it looks whether it started; a change wakes it sooner.
LOOK_AGAIN_S = 0.05


async def result_pieces(desk: Desk, watch: Watch, row: JobRow) -> AsyncIterator[bytes]:
    """Yields the concatenation of the job's RESULT frames, in pieces, until the job's end."""
    sent = 0
    attempt = ""
    while row.state not in TERMINAL:
        pod, current = _running(desk, row.job)
        if pod is not None:
            if current != attempt:
                attempt, sent = current, 0
            try:
                async for frame_bytes in _live(desk, pod, attempt, sent):
                    sent += len(frame_bytes)
                    yield frame_bytes
            except (AgentUnreachable, FirepoolError) as error:
                desk.log.info("result stream broke off", job=row.job, cause=str(error))
        finished = await watch.terminal(row.job, LOOK_AGAIN_S) if JobId(row.job) in desk.jobs else None
        row = finished or await desk.parts.store.get(row.job) or row
    if row.result is not None:
        yield row.result[sent:]
    elif row.result_blob is not None:
        async for piece in desk.parts.blobs.stream(row.caller, row.result_blob, sent):
            yield piece


def _running(desk: Desk, job: str) -> tuple[LivePod | None, str]:
    live = desk.jobs.get(JobId(job))
    for attempt, runs in desk.runs.items():
        if live is None or attempt.rpartition(":")[0] != job:
            continue
        for run in runs.values():
            if run.rank == 0 and run.launched:
                return desk.pods.get(run.pod), attempt
    return None, ""


async def _live(desk: Desk, pod: LivePod, attempt: str, skip: int) -> AsyncIterator[bytes]:
    passed = 0
    async for frame in desk.parts.agents.events(pod.address, attempt, 0):
        if frame.kind is not Kind.RESULT:
            continue
        piece = pack(Kind.RESULT, frame.payload)
        passed += len(piece)
        if passed > skip:
            yield piece[-(passed - skip) :] if passed - skip < len(piece) else piece
        await asyncio.sleep(0)
