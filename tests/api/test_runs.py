"""Runs and usage: figures over many jobs."""

from pathlib import Path

import pytest

from firepool_broker.api.limits import ApiSettings
from firepool_broker.api.scan import percentile
from firepool_wire.errors import HostLost, RunTimeout
from tests.api.world import World, world


async def test_a_run_counts_its_jobs_by_state_class_and_fault(api: World) -> None:
    for argv in (("print",), ("print",), ("exit", "1"), ("exit", "2"), ("queue",)):
        await api.submit(*argv, run="r/1")
    await api.runner.finish(await api.submit("wait", run="r/1"), HostLost("gone"))
    await api.submit("print", run="other")
    run = (await api.call("GET", "/v1/runs/r/1")).json()
    assert run["jobs"] == 6
    assert run["by_state"] == {"SUCCEEDED": 2, "FAILED": 3, "QUEUED": 1}
    assert run["by_class"] == {"NonZeroExit": 2, "HostLost": 1}
    assert run["by_fault"] == {"user": 2, "infra": 1}
    assert run["submit_to_first_s"]["count"] == 5
    assert not run["truncated"]


async def test_a_run_belongs_to_its_caller(api: World) -> None:
    await api.submit("print", run="r1")
    assert (await api.call("GET", "/v1/runs/r1", "bob")).code == "NotFound"
    assert (await api.call("GET", "/v1/runs/r1", "operator")).json()["jobs"] == 1
    assert (await api.call("POST", "/v1/runs/r1:cancel", "bob")).code == "NotFound"


async def test_cancelling_a_run_ends_what_is_left_of_it(api: World) -> None:
    waits = [await api.submit("wait", run="r/1") for _ in range(3)]
    other = await api.submit("wait", run="r2")
    await api.submit("print", run="r/1")
    assert (await api.call("POST", "/v1/runs/r/1:cancel")).json() == {"cancelling": 3}
    states = [(await api.call("GET", f"/v1/jobs/{job}/wait?timeout_s=5")).json()["state"] for job in waits]
    assert states == ["CANCELLED"] * 3
    assert (await api.call("GET", f"/v1/jobs/{other}")).json()["state"] == "RUNNING"


async def test_usage_is_told_by_caller_person_and_sku_and_only_of_the_own_caller(api: World) -> None:
    await api.submit("print")
    await api.submit("exit", "1")
    await api.submit("print", sku="h200")
    await api.runner.finish(await api.submit("wait", who="bob"), RunTimeout("too long"))
    mine = (await api.call("GET", "/v1/usage")).json()["usage"]
    assert {(u["caller"], u["person"], u["sku"]): (u["jobs"], u["succeeded"], u["failed"]) for u in mine} == {
        ("team-a", "ann", "cpu"): (2, 1, 1),
        ("team-a", "ann", "h200"): (1, 1, 0),
    }
    (cpu,) = [u for u in mine if u["sku"] == "cpu"]
    assert (cpu["cpu_s"], cpu["attempts"], cpu["peak_rss_bytes"]) == (1.0, 2, 1000)
    assert cpu["pod_s"] == pytest.approx(4, abs=0.1)
    everyone = (await api.call("GET", "/v1/usage", "operator")).json()["usage"]
    assert {u["caller"] for u in everyone} == {"team-a", "team-b"}
    assert (await api.call("GET", "/v1/usage?since=99999999999")).json()["usage"] == []


async def test_an_answer_that_did_not_look_at_everything_says_so(tmp_path: Path) -> None:
    async with world(tmp_path, ApiSettings(scan_rows=2)) as api:
        for _ in range(3):
            await api.submit("print", run="r")
        usage = (await api.call("GET", "/v1/usage")).json()
        assert (usage["truncated"], usage["usage"][0]["jobs"]) == (True, 2)
        run = (await api.call("GET", "/v1/runs/r")).json()
        assert (run["jobs"], run["truncated"]) == (3, True)


@pytest.mark.parametrize(
    ("values", "q", "expected"), [([], 0.5, None), ([3.0], 0.9, 3.0), ([1.0, 2.0], 0.5, 1.5), ([0.0, 10.0], 0.9, 9.0)]
)
def test_percentiles_are_interpolated(values: list[float], q: float, expected: float | None) -> None:
    assert percentile(values, q) == expected
