"""Many jobs in one request and one durable commit: every job of a batch is taken or refused on its own."""

import asyncio

from fastapi import Request, Response

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role
from firepool_broker.api.bodies import error_body, fresh_body, live_body
from firepool_broker.api.jobs import KEY, REFUSALS
from firepool_broker.api.limits import read_body
from firepool_broker.api.lobby import lobby, who
from firepool_broker.api.needs import Accepted
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.schemas import BatchResult, BatchResults
from firepool_broker.api.specs import digest_of, parse_batch, with_key
from firepool_wire.errors import FirepoolError
from firepool_wire.jobspec import JobSpec

#: Jobs prepared or rendered between two turns of the event loop (about 3 ms).
_STEP = 64

api = router()


@api.post(
    "/v1/jobs:batch",
    **declared(Role.SUBMITTER, *REFUSALS, ok={200: json_of("BatchResults")}, body=json_of("BatchBody"), headers=KEY),
)
async def submit_batch(request: Request) -> Response:
    """Submit many jobs. `results` has a job or an error for each, in order; one refused job does not touch the others.

    With the header `Idempotency-Key`, job number n without a key of its own has the key `<header>/<n>`.
    """
    desk, me = lobby(request), who(request)
    body = await read_body(request, desk.settings.batch_bytes, "The batch")
    parsed = parse_batch(body, desk.settings.batch_jobs)
    keyed = _with_keys(parsed, request.headers.get("idempotency-key"))
    with desk.admission.room_for(len(keyed)):
        good: list[tuple[JobSpec, str]] = []
        for n, spec in enumerate(keyed):
            if n and n % _STEP == 0:
                await asyncio.sleep(0)
            if not isinstance(spec, JobSpec):
                continue
            try:
                await desk.references.check(me.caller, spec)
                good.append((spec, digest_of(spec)))
            except FirepoolError as error:
                keyed[n] = error
        taken = iter(await desk.runner.submit_many(me, good) if good else ())
    results: list[BatchResult] = []
    for n, spec in enumerate(keyed):
        if n and n % _STEP == 0:
            await asyncio.sleep(0)
        results.append(await _result(request, spec, next(taken)) if isinstance(spec, JobSpec) else _refused(spec))
    told: BatchResults = {"results": results}
    return answer(told)


def _with_keys(parsed: list[JobSpec | FirepoolError], key: str | None) -> list[JobSpec | FirepoolError]:
    if key is None:
        return parsed
    return [
        with_key(spec, f"{key}/{n}") if isinstance(spec, JobSpec) and spec.idempotency_key is None else spec
        for n, spec in enumerate(parsed)
    ]


async def _result(request: Request, spec: JobSpec, taken: Accepted | FirepoolError) -> BatchResult:
    if isinstance(taken, FirepoolError):
        return _refused(taken)
    runner = lobby(request).runner
    row = await runner.row(taken.job) if taken.replayed else None
    if row is not None:
        return {"job": live_body(runner, row)}
    return {"job": fresh_body(taken, who(request), spec, runner.now())}


def _refused(error: FirepoolError) -> BatchResult:
    return {"error": error_body(error)}
