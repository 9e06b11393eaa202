"""Pools: shown as they are, applied as a whole or not at all."""

from typing import Any

import pytest

from firepool_broker.api.poolsfile import differences, read_pools, written
from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape
from firepool_wire.errors import BadRequest, UnknownField
from tests.api.world import World


async def test_every_pool_shows_its_knobs_what_it_holds_and_what_is_made_up_about_it(api: World) -> None:
    cpu, h200 = (await api.call("GET", "/v1/pools", "viewer")).json()["pools"]
    assert (cpu["sku"], cpu["pool"]["max_count"], cpu["labels"]) == ("cpu", 4, [])
    assert cpu["counts"]["physical"] == 0
    assert cpu["interpreters"] == [{"sku": "cpu", "python": "/usr/bin/python3", "version": "3.11", "pickle": 5}]
    assert (h200["sku"], h200["labels"]) == ("h200", ["simulated cards", "untrusted"])


async def _definitions(api: World) -> list[dict[str, Any]]:
    return [p["pool"] for p in (await api.call("GET", "/v1/pools")).json()["pools"]]


async def test_what_is_shown_can_be_applied_again_and_changes_nothing(api: World) -> None:
    reply = await api.call("PUT", "/v1/pools", "operator", json={"pools": await _definitions(api)})
    assert reply.json() == {"applied": True, "diff": []}


async def test_a_dry_run_tells_the_difference_and_changes_nothing(api: World) -> None:
    before = await _definitions(api)
    wanted = [{**before[0], "max_count": 8, "settings": {"python": "/x"}}, {"sku": "new"}]
    reply = await api.call("PUT", "/v1/pools", "operator", json={"pools": wanted, "dry_run": True})
    found = [(d["kind"], d["sku"], d["knob"], d["before"], d["after"]) for d in reply.json()["diff"]]
    assert ("changed", "cpu", "max_count", 4, 8) in found
    assert ("changed", "cpu", "settings.python", None, "/x") in found
    assert [(k, s) for k, s, *_ in found if k != "changed"] == [("removed", "h200"), ("added", "new")]
    assert not reply.json()["applied"]
    assert await _definitions(api) == before


async def test_a_configuration_is_applied_as_a_whole(api: World) -> None:
    wanted = [{"sku": "cpu", "max_count": 2}, {"sku": "big", "shape": {"cpus": 4}}]
    assert (await api.call("PUT", "/v1/pools", "operator", json={"pools": wanted})).json()["applied"]
    assert {p.sku for p in api.runner.pools} == {"cpu", "big"}


async def test_every_problem_of_a_configuration_is_named_and_the_running_one_stays(api: World) -> None:
    before = await _definitions(api)
    for wanted in (
        [{"sku": "a", "min_count": 9, "max_count": 1}, {"sku": "b", "min_count": 9, "max_count": 1}],
        [{"sku": "a", "max_count": "many"}, {"sku": "b", "shape": {"cpus": "x"}}],
        [{"sku": "a", "max_counts": 1}, {"min_count": 1}],
    ):
        reply = await api.call("PUT", "/v1/pools", "operator", json={"pools": wanted})
        assert (reply.status, reply.code) == (422, "BadRequest")
        assert len(reply.json()["details"]["problems"]) == 2, reply.body
    assert await _definitions(api) == before


async def test_an_unknown_knob_is_refused_with_its_nearest(api: World) -> None:
    reply = await api.call("PUT", "/v1/pools", "operator", json={"pools": [{"sku": "a", "max_counts": 1}]})
    assert reply.code == "UnknownField"
    assert reply.json()["details"] == {"path": "pools[0].max_counts", "nearest": "max_count"}


async def test_only_operators_apply_pools(api: World) -> None:
    assert (await api.call("PUT", "/v1/pools", "admin", json={"pools": []})).code == "Forbidden"


def test_a_definition_survives_being_written_and_read() -> None:
    pool = Pool(
        sku=Sku("x"), shape=Shape(accelerator="h100", gpus=2), settings=(("index_url", "u"),), preload=("numpy",)
    )
    assert read_pools([written(pool)]) == [pool]


def test_a_template_digest_is_not_for_people_to_write() -> None:
    with pytest.raises(BadRequest, match="made by the broker"):
        read_pools([{"sku": "x", "template": "mine"}])


@pytest.mark.parametrize("definitions", ["x", {"sku": "x"}, [3], [None], [{"sku": "x", "settings": {"a": 1}}]])
def test_what_is_no_list_of_definitions_is_refused(definitions: object) -> None:
    with pytest.raises((BadRequest, UnknownField)):
        read_pools(definitions)


def test_equal_configurations_have_no_difference() -> None:
    pools = [Pool(sku=Sku("a")), Pool(sku=Sku("b"))]
    assert differences(pools, pools[::-1]) == []
