"""Pools: what there is with its knobs and what it holds now; apply a whole configuration, with a diff before or after.

Pools are replaced as a whole. A configuration with any problem changes nothing, and every problem is named at once.
"""

from collections.abc import Sequence
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
from firepool_wire.errors import BadRequest, PayloadTooLarge

api = router()


class PoolBody(TypedDict):
    """A pool: its knobs as they were applied, and what it holds now."""

    sku: str
    #: The definition, as `PUT /v1/pools` takes it.
    pool: dict[str, Any]
    template: str
    #: Pods by scaler category, `physical` (all of them), and queued jobs.
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
    diff = differences(running(desk), pools)
    if not asked.dry_run:
        await desk.runner.configure(pools)
    told: Applied = {"applied": not asked.dry_run, "diff": diff}
    return answer(told)


def running(desk: Lobby) -> Sequence[Pool]:
    """The pools as they are configured now."""
    return [view.pool for view in desk.runner.engine.pool_views() if view.configured]


def shown(desk: Lobby) -> list[PoolBody]:
    """Every pool as the API shows it."""
    interpreters: dict[str, list[InterpreterBody]] = {}
    for i in desk.runner.interpreters():
        told: InterpreterBody = {"sku": i["sku"], "python": i["python"], "version": i["version"], "pickle": i["pickle"]}
        interpreters.setdefault(i["sku"], []).append(told)
    return [
        {
            "sku": view.pool.sku,
            "pool": written(view.pool),
            "template": view.pool.template,
            "counts": dict(view.counts),
            "interpreters": interpreters.get(view.pool.sku, []),
            "labels": labels_of(view.pool, draining=not view.configured),
        }
        for view in sorted(desk.runner.engine.pool_views(), key=lambda v: str(v.pool.sku))
    ]


def labels_of(pool: Pool, *, draining: bool = False) -> list[str]:
    """Words to a pool."""
    labels = []
    if pool.shape.simulated:
        labels.append("simulated cards")
    if pool.simulated_start_s > 0:
        labels.append(f"simulated start {pool.simulated_start_s:g} s")
    if pool.untrusted:
        labels.append("untrusted")
    if not pool.enabled:
        labels.append("disabled")
    if draining:
        labels.append("draining")
    return labels
