"""Puts the rooms of the API together into one ASGI application. Builds nothing else: the runner comes from `main`."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from firepool_broker.api import admin, batch, blobs, events, explain, jobs, logs, pods, pools, runs, status, usage
from firepool_broker.api.answers import problem
from firepool_broker.api.auth import Gate
from firepool_broker.api.door import Door, http_problem
from firepool_broker.api.limits import Admission, ApiSettings
from firepool_broker.api.lobby import Lobby, Stamp
from firepool_broker.api.needs import Broker
from firepool_broker.api.references import References
from firepool_broker.api.routes import Guarded
from firepool_broker.api.rules import Problem, bad_values
from firepool_broker.api.schemas import describe
from firepool_broker.api.specs import path_of
from firepool_wire.version import FIREPOOL

_ROOMS = (jobs, batch, status, events, logs, explain, blobs, pools, pods, runs, usage, admin)


def create_app(runner: Broker, settings: ApiSettings | None = None, stamp: Stamp = list) -> FastAPI:
    """The broker's HTTP application over a runner that is (or will be) started by the caller.

    Args:
        runner: the broker behind the API.
        settings: how much it takes at once.
        stamp: gives pools that an operator configures their template digests (default: as they are).
    """
    knobs = settings or ApiSettings()
    app = FastAPI(
        title="Firepool broker",
        version=FIREPOOL,
        # Pages with scripts from elsewhere have no place in a broker; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    app.router.route_class = Guarded
    app.state.lobby = Lobby(
        runner=runner,
        settings=knobs,
        gate=Gate(runner.tokens, knobs.token_cache_s),
        references=References(runner.blobs),
        stamp=stamp,
        admission=Admission(knobs.inflight_jobs, knobs.retry_after_s),
    )
    for room in _ROOMS:
        # One flat table, submissions first: it is searched from top to bottom, and nested routers cost every request.
        app.router.routes.extend(room.api.routes)
    app.add_middleware(Door)
    app.add_exception_handler(HTTPException, http_problem)
    app.add_exception_handler(RequestValidationError, _bad_parameters)
    app.openapi = _described_once(app)  # type: ignore[method-assign]
    return app


def close_streams(app: FastAPI) -> None:
    """The broker is about to stop: open log streams break off (their clients come back), readiness turns false."""
    lobby: Lobby = app.state.lobby
    lobby.closing.set()


async def _bad_parameters(request: Request, error: Exception) -> Any:
    assert isinstance(error, RequestValidationError)
    found = [Problem(path_of(e["loc"][1:]), str(e["msg"])) for e in error.errors()]
    return problem(bad_values(found))


def _described_once(app: FastAPI) -> Any:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe(app, *(shape for room in _ROOMS for shape in getattr(room, "SHAPES", ())))
            pools.publish(document["components"]["schemas"])
            app.openapi_schema = document
        return app.openapi_schema

    return openapi
