"""Callers, limits and tokens."""

import pytest

from firepool_broker.core.pools import CallerLimits
from tests.api.world import World


async def test_a_token_works_for_whom_it_was_made(api: World) -> None:
    asked = {"name": "ci", "caller": "team-c", "person": "robot", "role": "viewer"}
    made = await api.call("POST", "/v1/tokens", "operator", json=asked)
    assert made.status == 201
    api.tokens["ci"] = made.json()["token"]
    who = (await api.call("GET", "/v1/whoami", "ci")).json()
    assert who == {"caller": "team-c", "person": "robot", "role": "viewer", "expires_at": None}


async def test_a_token_name_is_taken_once(api: World) -> None:
    assert (await api.call("POST", "/v1/tokens", "admin", json={"name": "x"})).status == 201
    assert (await api.call("POST", "/v1/tokens", "admin", json={"name": "x"})).code == "Conflict"


@pytest.mark.parametrize("asked", [{"name": "x", "caller": "team-b"}, {"name": "x", "role": "operator"}])
async def test_a_teams_admin_gives_neither_other_teams_nor_higher_roles(api: World, asked: dict[str, str]) -> None:
    assert (await api.call("POST", "/v1/tokens", "admin", json=asked)).code == "Forbidden"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"name": ""},
        {"name": "a b"},
        {"name": "x", "role": "king"},
        {"name": "x", "ttl_s": 0},
        {"name": "x", "q": 1},
    ],
)
async def test_a_token_that_makes_no_sense_is_refused(api: World, asked: dict[str, object]) -> None:
    assert (await api.call("POST", "/v1/tokens", "operator", json=asked)).status == 422


async def test_a_teams_admin_revokes_only_the_own_teams_tokens(api: World) -> None:
    assert (await api.call("DELETE", "/v1/tokens/bob?caller=team-b", "admin")).code == "Forbidden"
    assert (await api.call("DELETE", "/v1/tokens/nobody", "admin")).code == "NotFound"
    assert (await api.call("DELETE", "/v1/tokens/viewer", "admin")).status == 204


async def test_an_operator_sets_a_callers_limits(api: World) -> None:
    limits = {"max_pods": 3, "tag_boundary": "hint"}
    reply = await api.call("POST", "/v1/callers", "operator", json={"caller": "team-a", "limits": limits})
    assert reply.status == 200
    assert api.runner.limits["team-a"] == CallerLimits(max_pods=3, tag_boundary="hint")
    reply = await api.call("PUT", "/v1/callers/team-a/limits", "operator", json={"max_processors": 8})
    assert reply.json()["limits"]["max_processors"] == 8
    assert (await api.call("PUT", "/v1/callers/team-a/limits", "operator", json={"max_pods": -1})).code == "BadRequest"
