"""Pools: what there is with its knobs and what it holds now; apply a whole configuration, with a diff before or after.

Pools are replaced as a whole. A configuration with any problem changes nothing, and every problem is named at once.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role
from firepool_broker.api.limits import read_body
from firepool_broker.api.lobby import Lobby, lobby
from firepool_broker.api.poolsfile import Difference, differences, read_pools, written
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.specs import parse_as
from firepool_broker.api.status import InterpreterBody
from firepool_broker.core.pools import Pool
from firepool_broker.core.views import PoolView
from firepool_wire.errors import BadRequest, PayloadTooLarge

api = router()


class PoolBody(TypedDict):
    """A pool: its knobs as they were applied, and what it holds now."""

    sku: str
    #: The definition, as `PUT /v1/pools` takes it.
    pool: dict[str, Any]
    template: str
    #: Pods by scaler category and `physical` (all of them); floor and ceiling in pods; `queued` jobs and their pods.
    counts: dict[str, int]
    interpreters: list[InterpreterBody]
    #: What people should know at a glance: simulated, untrusted, disabled, draining.
    labels: list[str]


class PoolList(TypedDict):
    """All pools, by SKU."""

    pools: list[PoolBody]


class Applied(TypedDict):
    """What a configuration changed, or would change."""

    applied: bool
    diff: list[Difference]


@dataclass(frozen=True, slots=True)
class PoolsBody:
    """A whole configuration."""

    #: Definitions: fields of a pool; `settings` as an object.
    pools: list[dict[str, Any]]
    #: Only check, and answer the difference.
    dry_run: bool = False


_BODY: TypeAdapter[PoolsBody] = TypeAdapter(PoolsBody)
SHAPES = (PoolBody, PoolList, Applied, PoolsBody, Pool)


@api.get("/v1/pools", **declared(Role.VIEWER, ok={200: json_of("PoolList")}))
async def get(request: Request) -> Response:
    """Every pool."""
    return answer({"pools": shown(lobby(request))})


@api.put(
    "/v1/pools",
    **declared(Role.OPERATOR, PayloadTooLarge, ok={200: json_of("Applied")}, body=json_of("PoolsBody")),
)
async def put(request: Request) -> Response:
    """Replace all pools. A pool that is not named any more drains. With `dry_run` nothing happens but the checks."""
    desk = lobby(request)
    asked = parse_as(_BODY, PoolsBody, await read_body(request, desk.settings.small_bytes))
    pools = desk.stamp(read_pools(asked.pools))
    problems = list(desk.runner.pool_problems(pools))
    if problems:
        raise BadRequest("the pools cannot be used: " + "; ".join(problems), field="pools", problems=problems)
    diff = differences(desk.runner.pools, pools)
    if not asked.dry_run:
        await desk.runner.configure(pools)
    told: Applied = {"applied": not asked.dry_run, "diff": diff}
    return answer(told)


def publish(schemas: dict[str, Any]) -> None:
    """Say in the OpenAPI document what a definition is: the core's pool, as `poolsfile` reads and writes it."""
    definition = schemas["Pool"]
    definition["description"] = "Definition of a pool."
    definition["properties"].pop("template")
    definition["properties"]["settings"] = {"type": "object", "additionalProperties": {"type": "string"}}
    for name in ("Pool", "Shape"):
        schemas[name]["additionalProperties"] = False
    one = {"$ref": "#/components/schemas/Pool"}
    schemas["PoolsBody"]["properties"]["pools"]["items"] = one
    schemas["PoolBody"]["properties"]["pool"] = one


def shown(desk: Lobby) -> list[PoolBody]:
    """Every pool as the API shows it, by SKU."""
    interpreters: dict[str, list[InterpreterBody]] = {}
    for i in desk.runner.interpreters():
        told: InterpreterBody = {"sku": i["sku"], "python": i["python"], "version": i["version"], "pickle": i["pickle"]}
        interpreters.setdefault(i["sku"], []).append(told)
    configured = {pool.sku: pool for pool in desk.runner.pools}
    views = sorted(desk.runner.engine.pool_views(), key=lambda v: v.sku)
    return [_body(view, configured.get(view.sku), interpreters.get(view.sku, [])) for view in views]


def _body(view: PoolView, pool: Pool | None, interpreters: list[InterpreterBody]) -> PoolBody:
    # A pool that is not configured any more drains: nothing may be made, nothing is kept.
    effective = pool or Pool(sku=view.sku, template=view.template, enabled=False, max_count=0)
    return {
        "sku": view.sku,
        "pool": written(effective),
        "template": effective.template,
        "counts": {
            "starting": view.starting,
            "idle": view.idle,
            "assigned": view.assigned,
            "running": view.running,
            "held": view.held,
            "stale": view.stale,
            "single_use": view.single_use,
            "terminating": view.terminating,
            "physical": view.physical,
            "floor": view.floor,
            "ceiling": view.ceiling,
            "queued": view.queued_jobs,
            "queued_pods": view.queued_pods,
            "create_failures": view.create_failures,
        },
        "interpreters": interpreters,
        "labels": labels_of(effective, draining=pool is None),
    }


def labels_of(pool: Pool, *, draining: bool = False) -> list[str]:
    """Words to a pool."""
    labels = []
    if pool.shape.simulated:
        labels.append("simulated cards")
    if pool.simulated_start_s > 0:
        labels.append(f"simulated start {pool.simulated_start_s:g} s")
    if pool.untrusted:
        labels.append("untrusted")
    if draining:
        labels.append("draining")
    elif not pool.enabled:
        labels.append("disabled")
    return labels
