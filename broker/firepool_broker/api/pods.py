"""Pods: what each is doing, whose it is, and what became of it (its story)."""

from typing import Annotated

from fastapi import Query, Request, Response
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role, may_see, no_such
from firepool_broker.api.lobby import lobby, who
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.core.views import PodView
from firepool_broker.shell.ports import Identity
from firepool_wire.errors import NotFound
from firepool_wire.words import PodState

api = router()


class PodBody(TypedDict):
    """A pod that is not verified gone. Other callers' pods show their owner, not what they run."""

    name: str
    sku: str
    state: PodState
    template: str
    stale: bool
    single_use: bool
    used: bool
    owner: str | None
    queue: str | None
    tag: str | None
    job: str | None
    cards: list[str]
    isolation: str
    created_at: float
    ready_at: float | None
    released_at: float | None
    #: Seconds until its hold expires; null: not held.
    hold_left_s: float | None
    unreachable: bool


class PodList(TypedDict):
    """Pods by name."""

    pods: list[PodBody]
    #: There are more than `limit`.
    truncated: bool


class Story(TypedDict):
    """What happened, oldest first, each with its cause."""

    story: list[str]


SHAPES = (PodBody, PodList, Story)


@api.get("/v1/pods", **declared(Role.VIEWER, ok={200: json_of("PodList")}))
async def get(
    request: Request,
    sku: str | None = None,
    state: PodState | None = None,
    owner: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Pods, narrowed by pool, state and owner."""
    runner, me = lobby(request).runner, who(request)
    found = [
        view
        for view in runner.engine.pod_views()
        if (sku is None or view.sku == sku)
        and (state is None or view.state is state)
        and (owner is None or view.owner == owner)
    ]
    found.sort(key=lambda view: view.pod)
    now = runner.now()
    body: PodList = {"pods": [_body(view, me, now) for view in found[:limit]], "truncated": len(found) > limit}
    return answer(body)


@api.get("/v1/pods/{pod}/story", **declared(Role.OPERATOR, NotFound, ok={200: json_of("Story")}))
async def story(request: Request, pod: str) -> Response:
    """What happened to a pod, also a while after it is gone."""
    told = lobby(request).runner.engine.story_of(pod)
    if not told:
        raise no_such("pod", pod)
    body: Story = {"story": told}
    return answer(body)


def _body(view: PodView, me: Identity, now: float) -> PodBody:
    mine = view.owner is None or may_see(me, view.owner)
    return {
        "name": view.pod,
        "sku": view.sku,
        "state": view.state,
        "template": view.template,
        "stale": view.stale,
        "single_use": view.single_use,
        "used": view.used,
        "owner": view.owner,
        "queue": view.queue if mine else None,
        "tag": view.tag if mine else None,
        "job": view.job if mine else None,
        "cards": list(view.cards),
        "isolation": view.isolation,
        "created_at": view.created_at,
        "ready_at": view.ready_at,
        "released_at": view.released_at,
        "hold_left_s": max(0.0, view.hold_deadline - now) if view.hold_deadline is not None else None,
        "unreachable": view.unreachable,
    }
