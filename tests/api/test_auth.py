"""Nobody gets past the gate: negative tests for every route, made from the application's own table of routes."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from firepool_broker.api.app import create_app
from firepool_broker.api.auth import ROLES, Role
from firepool_broker.api.limits import ApiSettings
from firepool_broker.api.routes import ROLE, Guarded, router
from firepool_broker.shell.ports import Identity
from tests.api.world import PEOPLE, World, world

#: What may be asked without a token, by intent. A new public route must be added here on purpose.
PUBLIC = {"/healthz", "/readyz", "/openapi.json"}


class _Nothing:
    tokens = blobs = None


def _routes() -> list[APIRoute]:
    app = create_app(_Nothing())  # type: ignore[arg-type]
    found: list[APIRoute] = []

    def walk(routes: Sequence[Any]) -> None:
        for route in routes:
            if isinstance(route, APIRoute):
                found.append(route)
            elif (inner := getattr(route, "original_router", None)) is not None:
                walk(inner.routes)

    walk(app.routes)
    return found


def _every() -> list[tuple[str, str, Role]]:
    every = []
    for path, methods in create_app(_Nothing()).openapi()["paths"].items():  # type: ignore[arg-type]
        for method, operation in methods.items():
            every.append((method.upper(), path, Role[operation[ROLE]]))
    return every


EVERY = _every()
GUARDED = [(m, p, r) for m, p, r in EVERY if p not in PUBLIC]
DIGEST = "sha256:" + "0" * 64


def url(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: DIGEST if m[1] == "digest" else "x", path)


def test_the_table_of_routes_is_really_read() -> None:
    assert len(EVERY) > 25
    assert {"/v1/jobs", "/v1/blobs/{digest}", "/v1/pools", "/v1/tokens"} <= {p for _, p, _ in EVERY}


def test_only_what_is_meant_to_be_public_is_public() -> None:
    assert {p for _, p, r in EVERY if r is Role.PUBLIC} == PUBLIC - {"/openapi.json"}


@pytest.mark.parametrize("who", [None, "unknown", "expired", "revoked"])
async def test_no_route_answers_without_a_good_token(api: World, who: str | None) -> None:
    for method, path, _ in GUARDED:
        reply = await api.call(method, url(path), who)
        assert reply.status == 401, (method, path)
        assert "www-authenticate" in reply.headers
        assert method == "HEAD" or reply.code == "Unauthenticated", (method, path)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic YTpi", "bearer\tx", "Bearer \u00e9\u00e9", "Bearer " + "x" * 4000]
)
async def test_a_malformed_authorization_header_is_no_token(api: World, header: str) -> None:
    reply = await api.call("GET", "/v1/jobs", None, headers={"Authorization": header})
    assert (reply.status, reply.code) == (401, "Unauthenticated")


@pytest.mark.parametrize("name", ["viewer", "ann", "admin"])
async def test_no_route_serves_a_role_below_its_own(api: World, name: str) -> None:
    role = ROLES[PEOPLE[name].role]
    for method, path, needs in GUARDED:
        if needs > role:
            reply = await api.call(method, url(path), name)
            assert (reply.status, reply.code) == (403, "Forbidden"), (method, path)


async def test_an_unknown_path_is_not_found_and_a_wrong_method_says_which_are_right(api: World) -> None:
    nowhere = await api.call("GET", "/v1/nothing", None)
    assert (nowhere.status, nowhere.code) == (404, "NotFound")
    wrong = await api.call("DELETE", "/v1/jobs", None)
    assert wrong.status == 405
    assert "allow" in wrong.headers


def test_a_route_that_names_no_role_cannot_be_registered() -> None:
    async def endpoint() -> None: ...

    with pytest.raises(TypeError, match="names no role"):
        router().add_api_route("/v1/open", endpoint)
    app: FastAPI = create_app(_Nothing())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names no role"):
        app.add_api_route("/v1/open", endpoint)


def test_every_route_is_of_the_guarded_class() -> None:
    routes = _routes()
    assert len(routes) == len(EVERY)
    assert all(isinstance(route, Guarded) for route in routes)


class _CountingTokens:
    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, 0

    async def identify(self, token: str) -> Identity | None:
        self.asked += 1
        return await self.inner.identify(token)  # type: ignore[no-any-return]


async def test_a_token_is_verified_once_and_then_believed_for_a_while(api: World) -> None:
    gate = api.app.state.lobby.gate
    gate._tokens = counting = _CountingTokens(gate._tokens)
    for _ in range(5):
        assert (await api.call("GET", "/v1/whoami")).json()["person"] == "ann"
    assert counting.asked == 1


async def test_a_believed_token_ends_at_its_expiry(tmp_path: Any) -> None:
    async with world(tmp_path, ApiSettings(token_cache_s=60)) as api:
        made = await api.call("POST", "/v1/tokens", "operator", json={"name": "short", "ttl_s": 0.2})
        api.tokens["short"] = made.json()["token"]
        assert (await api.call("GET", "/v1/whoami", "short")).status == 200
        async with asyncio.timeout(5):
            while (await api.call("GET", "/v1/whoami", "short")).status == 200:
                await asyncio.sleep(0.02)
        assert (await api.call("GET", "/v1/whoami", "short")).code == "Unauthenticated"


async def test_a_revoked_token_stops_working_at_once_although_it_was_believed(api: World) -> None:
    assert (await api.call("GET", "/v1/whoami")).status == 200
    assert (await api.call("DELETE", "/v1/tokens/ann?caller=team-a", "operator")).status == 204
    assert (await api.call("GET", "/v1/whoami")).status == 401
