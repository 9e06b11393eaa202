"""Jobs one at a time: submit, get, list, cancel, wait, result, outputs; and the lease that a client keeps on its jobs."""

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role, may_see, no_such
from firepool_broker.api.bodies import fresh_body, listed_bodies, live_body, outputs_of
from firepool_broker.api.door import StreamCut
from firepool_broker.api.limits import read_body
from firepool_broker.api.lobby import Lobby, caller_asked_for, lobby, visible_row, who
from firepool_broker.api.routes import bytes_of, declared, json_of, router
from firepool_broker.api.schemas import JobIds, JobList
from firepool_broker.api.specs import digest_of, parse_as, parse_spec, with_key
from firepool_broker.shell.ports import JobFilter, JobRow
from firepool_wire.errors import (
    BadRequest,
    CapacityUnavailable,
    Conflict,
    FirepoolError,
    ImageNotAllowed,
    IsolationUnavailable,
    NotFound,
    PayloadTooLarge,
    QuotaExceeded,
    TooManyRequests,
    UnknownSku,
)
from firepool_wire.words import TERMINAL, JobState

#: What a submission may be refused with, beyond what every call may answer.
REFUSALS: tuple[type[FirepoolError], ...] = (
    NotFound,
    UnknownSku,
    Conflict,
    PayloadTooLarge,
    ImageNotAllowed,
    QuotaExceeded,
    CapacityUnavailable,
    IsolationUnavailable,
    TooManyRequests,
)

#: The header that makes a submission safe to repeat.
KEY = {"Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 256}}

_JOB = json_of("JobBody")
_IDS: TypeAdapter[JobIds] = TypeAdapter(JobIds)

api = router()


@api.post(
    "/v1/jobs",
    **declared(Role.SUBMITTER, *REFUSALS, ok={201: _JOB, 200: _JOB}, body=json_of("JobSpec"), headers=KEY),
)
async def submit(request: Request) -> Response:
    """Submit one job. 201: it is durable. 200: its idempotency key was used before with the same body; that job.

    The header `Idempotency-Key` stands for the field `idempotency_key`.
    """
    desk, me = lobby(request), who(request)
    with desk.admission.room_for(1):
        spec = parse_spec(await read_body(request, desk.settings.job_bytes, "The job"))
        spec = with_key(spec, request.headers.get("idempotency-key"))
        await desk.references.check(me.caller, spec)
        taken = await desk.runner.submit(me, spec, digest_of(spec))
    if taken.replayed:
        row = await desk.runner.row(taken.job)
        if row is not None:
            return answer(live_body(desk.runner, row), 200)
    return answer(fresh_body(taken, me, spec, desk.runner.now()), 201, {"Location": f"/v1/jobs/{taken.job}"})


@api.get("/v1/jobs/{job}", **declared(Role.VIEWER, NotFound, ok={200: _JOB}))
async def get(request: Request, job: str) -> Response:
    """One job: its state, and while it waits what it waits for."""
    return answer(live_body(lobby(request).runner, await visible_row(request, job)))


@api.get("/v1/jobs", **declared(Role.VIEWER, ok={200: json_of("JobList")}, families=("label.",)))
async def page(
    request: Request,
    state: Annotated[
        list[str] | None, Query(description="one of these states; repeated or separated by commas")
    ] = None,
    sku: str | None = None,
    queue: str | None = None,
    *,
    run: str | None = None,
    caller: Annotated[str | None, Query(description="operators only; absent: every caller")] = None,
    cursor: Annotated[str | None, Query(description="`cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Jobs of the caller, newest first. `label.<key>=<value>` narrows further."""
    runner = lobby(request).runner
    labels = {k.removeprefix("label."): v for k, v in request.query_params.items() if k.startswith("label.")}
    where = JobFilter(
        caller=caller_asked_for(request, caller),
        states=_states(state or []),
        sku=sku,
        queue=queue,
        run=run,
        labels=labels,
        cursor=cursor,
        limit=limit,
    )
    rows, following = await runner.store.page(where)
    listed: JobList = {"jobs": listed_bodies(runner, rows), "cursor": following}
    return answer(listed)


def _states(asked: list[str]) -> tuple[JobState, ...] | None:
    words = [word.strip().upper() for text in asked for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in JobState.__members__]
    if unknown:
        raise BadRequest(f"state {unknown[0][:80]!r} is none of {', '.join(JobState)}", field="state")
    return tuple(JobState(word) for word in words) or None


@api.post("/v1/jobs/{job}:cancel", **declared(Role.SUBMITTER, NotFound, Conflict, ok={202: _JOB}))
async def cancel(request: Request, job: str) -> Response:
    """Ask for the job's end. It is CANCELLED once its process tree is verified gone; a job that is over stays as it is."""
    runner = lobby(request).runner
    row = await visible_row(request, job)
    if row.state not in TERMINAL:
        await runner.cancel(who(request), job)
        row = await visible_row(request, job)
    return answer(live_body(runner, row), 202)


@api.get("/v1/jobs/{job}/wait", **declared(Role.VIEWER, NotFound, ok={200: _JOB}))
async def wait(request: Request, job: str, timeout_s: Annotated[float, Query(ge=0, le=3600)] = 30.0) -> Response:
    """Long poll: the job once it is terminal, or as it is after `timeout_s` (the broker may answer earlier)."""
    desk = lobby(request)
    row = await visible_row(request, job)
    if row.state not in TERMINAL:
        ended = await desk.runner.wait_terminal(job, min(timeout_s, desk.settings.wait_s))
        row = ended or await visible_row(request, job)
    return answer(live_body(desk.runner, row))


@api.get("/v1/jobs/{job}/result", **declared(Role.VIEWER, NotFound, Conflict, ok={200: bytes_of()}))
async def result(request: Request, job: str, follow: bool = False) -> Response:
    """RESULT frames of a job that is over, one after the other; a job that failed may have none.

    With `follow` they come as the job makes them, until its end (generators, maps).
    The headers `Firepool-Job-State` and `Firepool-Result-Bytes` say what to expect of a job that is over.
    """
    row = await visible_row(request, job)
    if row.state not in TERMINAL and follow:
        return StreamingResponse(_following(lobby(request), row), 200, media_type="application/octet-stream")
    if row.state not in TERMINAL:
        raise Conflict(f"job {job} is {row.state}: it has no result yet", job_id=job, state=row.state.value)
    headers = {"Firepool-Job-State": row.state.value}
    if row.result_blob is None:
        data = row.result or b""
        return Response(data, 200, {**headers, "Firepool-Result-Bytes": str(len(data))}, "application/octet-stream")
    return await blob_answer(request, row, row.result_blob, headers)


async def _following(desk: Lobby, row: JobRow) -> AsyncIterator[bytes]:
    async for piece in desk.runner.result_pieces(row):
        yield piece
    if desk.closing.is_set():
        raise StreamCut  # the pieces ended with the broker, maybe not with the job


@api.get("/v1/jobs/{job}/outputs", **declared(Role.VIEWER, NotFound, ok={200: json_of("OutputList")}))
async def outputs(request: Request, job: str) -> Response:
    """Output files that were stored when the job ended."""
    return answer({"outputs": outputs_of(await visible_row(request, job))})


@api.get("/v1/jobs/{job}/outputs/{path:path}", **declared(Role.VIEWER, NotFound, ok={200: bytes_of()}))
async def output(request: Request, job: str, path: str) -> Response:
    """One output file. Only paths that `outputs` lists exist; nothing is looked up on a disk by this name."""
    row = await visible_row(request, job)
    if path.startswith("/") or re.search(r"(^|[/\\])\.\.([/\\]|$)|[\x00\\]", path):
        raise BadRequest(f"{path[:200]!r} is not a path inside the job's outputs", field="path")
    for entry in outputs_of(row):
        if entry["path"] == path:
            return await blob_answer(request, row, entry["digest"], {})
    raise no_such("output", path)


@api.post(
    "/v1/clients/{client}:renew",
    **declared(Role.SUBMITTER, PayloadTooLarge, ok={200: json_of("Renewed")}, body=json_of("JobIds")),
)
async def renew(request: Request, client: str) -> Response:
    """Renew the lease of a client's jobs. Jobs that are over, or not the caller's, are passed over."""
    desk = lobby(request)
    named = parse_as(_IDS, JobIds, await read_body(request, desk.settings.small_bytes))
    await desk.runner.renew(who(request), named.jobs)
    return answer({"jobs": len(named.jobs)})


async def blob_answer(request: Request, row: JobRow, digest: str, headers: dict[str, str]) -> Response:
    """A blob of the job's caller as a stream.

    Raises:
        NotFound: it is past its retention.
    """
    blobs = lobby(request).runner.blobs
    if not may_see(who(request), row.caller):
        raise no_such("job", row.job)
    size = await blobs.size(row.caller, digest)

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in blobs.stream(row.caller, digest):
            yield piece

    sized = {**headers, "Content-Length": str(size), "Firepool-Result-Bytes": str(size)}
    return StreamingResponse(pieces(), 200, sized, "application/octet-stream")
