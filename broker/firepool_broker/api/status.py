"""The broker about itself: version and capabilities, who the token is, whether it lives and is ready, its metrics."""

from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role
from firepool_broker.api.lobby import lobby, who
from firepool_broker.api.routes import declared, json_of, router
from firepool_wire.jobspec import INLINE_ARGS_BYTES, INLINE_RESULT_BYTES, JobSpec
from firepool_wire.version import FIREPOOL, PROTOCOL

#: What a client may count on; a newer SDK asks here before it uses what an older broker lacks.
CAPABILITIES = (
    "jobs",
    "jobs.batch",
    "jobs.wait",
    "jobs.outputs",
    "jobs.gang",
    "events.resume",
    "logs.follow",
    "results.follow",
    "blobs",
    "functions.call",
    "functions.map",
    "functions.generator",
    "functions.depends",
    "requirements.layer",
    "requirements.in_place",
    "topology.single",
    "runs",
    "usage",
    "explain",
    "pools.apply",
    "tokens",
)

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

api = router()


class InterpreterBody(TypedDict):
    """The Python that functions meet in a pool."""

    sku: str
    python: str
    version: str
    pickle: int


class VersionBody(TypedDict):
    """What this broker is and can do."""

    version: str
    protocol: int
    capabilities: list[str]
    #: Fields of the job spec that later versions have.
    later_fields: list[str]
    interpreters: list[InterpreterBody]
    #: Bytes and counts that this broker takes at most.
    limits: dict[str, int]


class WhoBody(TypedDict):
    """Who a token speaks for."""

    caller: str
    person: str
    role: str
    expires_at: float | None


class HealthBody(TypedDict):
    """Whether the broker takes jobs, and why not."""

    status: str
    problems: list[str]


SHAPES = (VersionBody, WhoBody, HealthBody)


@api.get("/v1/version", **declared(Role.VIEWER, ok={200: json_of("VersionBody")}))
async def version(request: Request) -> Response:
    """Version, protocol, capabilities, the pools' job interpreters, and how much the broker takes at once."""
    desk = lobby(request)
    limits = desk.settings
    body: VersionBody = {
        "version": FIREPOOL,
        "protocol": PROTOCOL,
        "capabilities": list(CAPABILITIES),
        "later_fields": list(JobSpec.LATER),
        "interpreters": [
            {"sku": i["sku"], "python": i["python"], "version": i["version"], "pickle": i["pickle"]}
            for i in desk.runner.interpreters()
        ],
        "limits": {
            "job_bytes": limits.job_bytes,
            "batch_bytes": limits.batch_bytes,
            "batch_jobs": limits.batch_jobs,
            "blob_bytes": limits.blob_bytes,
            "inline_args_bytes": INLINE_ARGS_BYTES,
            "inline_result_bytes": INLINE_RESULT_BYTES,
        },
    }
    return answer(body)


@api.get("/v1/whoami", **declared(Role.VIEWER, ok={200: json_of("WhoBody")}))
async def whoami(request: Request) -> Response:
    """Who the token speaks for."""
    me = who(request)
    body: WhoBody = {"caller": me.caller, "person": me.person, "role": me.role, "expires_at": me.expires_at}
    return answer(body)


@api.get("/healthz", **declared(Role.PUBLIC, ok={200: json_of("HealthBody")}))
async def healthz(request: Request) -> Response:
    """200 while the broker's event loop turns."""
    body: HealthBody = {"status": "alive", "problems": []}
    return JSONResponse(body)


@api.get("/readyz", **declared(Role.PUBLIC, ok={200: json_of("HealthBody"), 503: json_of("HealthBody")}))
async def readyz(request: Request) -> Response:
    """200 when the broker takes jobs; 503 with the reasons while it recovers, stops, or its store is down."""
    desk = lobby(request)
    problems = list(desk.runner.problems())
    if desk.closing.is_set():
        problems.append("the broker stops")
    body: HealthBody = {"status": "ready" if not problems else "not ready", "problems": problems}
    return JSONResponse(body, 503 if problems else 200)


@api.get(
    "/metrics",
    **declared(Role.VIEWER, ok={200: {"application/openmetrics-text": {"schema": {"type": "string"}}}}),
)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus (its scrape configuration takes the bearer token)."""
    return PlainTextResponse(lobby(request).runner.render_metrics(), media_type=_OPENMETRICS)
