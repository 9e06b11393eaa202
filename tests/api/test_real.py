"""The API on the real runner, engine, store and blobs; agents are fakes that do what their argv says."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.api.real import real_world
from tests.api.test_events import stream
from tests.api.world import World, spec


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[World]:
    async with real_world(tmp_path) as running:
        yield running


async def ended(api: World, job: str) -> dict[str, object]:
    body = (await api.call("GET", f"/v1/jobs/{job}/wait?timeout_s=20")).json()
    assert body["state"] in ("SUCCEEDED", "FAILED", "CANCELLED"), body
    return dict(body)


async def test_a_job_runs_and_everything_it_made_can_be_fetched(broker: World) -> None:
    async with stream(broker) as lines:
        job = await broker.submit("print", "hello")
        told = await lines.until(job=job, terminal=True)
    body = await ended(broker, job)
    assert (body["state"], body["exit_code"], body["error"]) == ("SUCCEEDED", 0, None)
    assert told["body"]["id"] == job
    assert body["path"] in ("warm", "new")
    times = body["times"]
    assert isinstance(times, dict)
    assert times["submit_to_first_s"] >= times["queue_wait_s"] >= 0
    assert (await broker.call("GET", f"/v1/jobs/{job}/logs?follow=true")).body == b"hello\n"


async def test_results_outputs_and_exit_codes_come_back(broker: World) -> None:
    made = await broker.submit("result", b64encode(b"value").decode())
    wrote = await broker.submit("write", "out/a.txt", "hello")
    failed = await broker.submit("exit", "3")
    assert b"value" in (await broker.call("GET", f"/v1/jobs/{made}/result?follow=true")).body
    await ended(broker, wrote)
    assert (await broker.call("GET", f"/v1/jobs/{wrote}/outputs/out/a.txt")).body == b"hello"
    body = await ended(broker, failed)
    assert (body["exit_code"], body["error"]["code"]) == (3, "NonZeroExit")  # type: ignore[index]


async def test_a_second_job_is_warm_and_says_so(broker: World) -> None:
    await ended(broker, await broker.submit("print"))
    second = await broker.submit("print")
    await ended(broker, second)
    told = (await broker.call("GET", f"/v1/jobs/{second}/explain")).json()
    assert told["path"] == "warm"
    assert "warm" in told["text"]
    assert told["times"]["submit_to_first_s"] > 0


async def test_a_job_that_waits_shows_its_place_the_limit_and_who_holds_what(broker: World) -> None:
    running = [await broker.submit("wait") for _ in range(2)]
    async with asyncio.timeout(20):
        while [(await broker.call("GET", f"/v1/jobs/{j}")).json()["state"] for j in running] != ["RUNNING"] * 2:
            await asyncio.sleep(0.01)
    waits = await broker.submit("print", who="bob")
    waiting = (await broker.call("GET", f"/v1/jobs/{waits}", "bob")).json()["waiting"]
    assert (waiting["position"], waiting["blocked_by"]) == (1, "pool_at_ceiling")
    assert waiting["holders"] == [{"caller": "team-a", "running": 2, "held": 0}]
    told = (await broker.call("GET", f"/v1/jobs/{waits}/explain", "bob")).json()
    assert "Number 1 in the queue" in told["text"]
    assert "team-a runs on 2" in told["text"]
    (listed,) = (await broker.call("GET", "/v1/jobs", "bob")).json()["jobs"]
    assert listed["waiting"]["position"] == 1
    pods = (await broker.call("GET", "/v1/pods?state=running", "bob")).json()["pods"]
    assert [(p["owner"], p["job"], p["tag"]) for p in pods] == [("team-a", None, None)] * 2
    mine = (await broker.call("GET", "/v1/pods?state=running")).json()["pods"]
    assert sorted(p["job"] for p in mine) == sorted(running)
    (pool,) = (await broker.call("GET", "/v1/pools")).json()["pools"]
    assert (pool["counts"]["running"], pool["counts"]["queued"], pool["counts"]["physical"]) == (2, 1, 2)
    for job in running:
        assert (await broker.call("POST", f"/v1/jobs/{job}:cancel")).status == 202
        assert (await ended(broker, job))["state"] == "CANCELLED"


async def test_a_running_job_tells_when_it_started_and_has_not_ended(broker: World) -> None:
    async with stream(broker) as lines:
        job = await broker.submit("wait")
        await lines.until(job=job, state="RUNNING")
        while not (body := (await broker.call("GET", f"/v1/jobs/{job}")).json())["times"].get("first_instruction"):
            await asyncio.sleep(0.01)
    assert body["state"] == "RUNNING"
    assert body["started_at"] == body["times"]["first_instruction"] >= body["submitted_at"]
    assert body["times"]["submit_to_first_s"] >= 0
    assert body["ended_at"] is None and "ended" not in body["times"]
    await broker.call("POST", f"/v1/jobs/{job}:cancel")
    await ended(broker, job)


async def test_a_batch_is_taken_and_every_job_of_it_ends(broker: World) -> None:
    jobs = {"jobs": [spec("print", str(n), run="wave") for n in range(20)]}
    async with stream(broker) as lines:
        reply = await broker.call("POST", "/v1/jobs:batch", json=jobs, headers={"Idempotency-Key": "w"})
        wanted = {r["job"]["id"] for r in reply.json()["results"]}
        assert len(wanted) == 20
        again = await broker.call("POST", "/v1/jobs:batch", json=jobs, headers={"Idempotency-Key": "w"})
        assert {r["job"]["id"] for r in again.json()["results"]} == wanted
        seen = set()
        while seen != wanted:
            seen.add((await lines.until(terminal=True))["job"])
    run = (await broker.call("GET", "/v1/runs/wave")).json()
    assert (run["jobs"], run["by_state"]) == (20, {"SUCCEEDED": 20})
    usage = (await broker.call("GET", "/v1/usage")).json()["usage"]
    assert [(u["caller"], u["person"], u["jobs"]) for u in usage] == [("team-a", "ann", 20)]


async def test_the_same_key_in_flight_joins_the_first_request(broker: World) -> None:
    body = spec("print", idempotency_key="once")
    replies = await asyncio.gather(*(broker.call("POST", "/v1/jobs", json=body) for _ in range(8)))
    assert sorted(r.status for r in replies) == [200] * 7 + [201]
    assert len({r.json()["id"] for r in replies}) == 1


async def test_what_can_never_run_is_refused_at_once_with_the_limit_named(broker: World) -> None:
    reply = await broker.call("POST", "/v1/jobs", json=spec("print", pods=3))
    assert (reply.status, reply.code) == (503, "CapacityUnavailable")
    limited = await broker.call("PUT", "/v1/callers/team-b/limits", "operator", json={"max_pods": 1})
    assert limited.status == 200
    reply = await broker.call("POST", "/v1/jobs", "bob", json=spec("print", pods=2))
    assert (reply.status, reply.code) == (403, "QuotaExceeded")


async def test_pools_are_checked_and_applied_by_the_runner(broker: World) -> None:
    wrong = [{"sku": "cpu", "max_count": 1, "min_count": 5}, {"sku": "x", "provider": "moon"}]
    reply = await broker.call("PUT", "/v1/pools", "operator", json={"pools": wrong, "dry_run": True})
    assert (reply.status, reply.code) == (422, "BadRequest")
    assert len(reply.json()["details"]["problems"]) >= 2
    good = [{"sku": "cpu", "max_count": 3}, {"sku": "x", "max_count": 1}]
    reply = await broker.call("PUT", "/v1/pools", "operator", json={"pools": good})
    assert reply.status == 200, reply.body
    assert [p["sku"] for p in (await broker.call("GET", "/v1/pools")).json()["pools"]] == ["cpu", "x"]
    await ended(broker, await broker.submit("print", sku="x"))


async def test_a_stopping_broker_breaks_streams_off_and_ends(tmp_path: Path) -> None:
    async with real_world(tmp_path) as api:
        job = await api.submit("wait")
        following = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/logs?follow=true"))
        listening = asyncio.create_task(api.call("GET", "/v1/events"))
        async with asyncio.timeout(20):
            while (await api.call("GET", f"/v1/jobs/{job}")).json()["state"] != "RUNNING":
                await asyncio.sleep(0.01)
    with pytest.raises(aiohttp.ClientError):
        await following
    assert all(json.loads(line) for line in (await listening).body.splitlines())


async def test_metrics_and_readiness_are_the_runners(broker: World) -> None:
    await ended(broker, await broker.submit("print"))
    text = (await broker.call("GET", "/metrics")).body.decode()
    assert 'firepool_jobs_submitted_total{sku="cpu"} 1.0' in text
    assert (await broker.call("GET", "/readyz", None)).json() == {"status": "ready", "problems": []}
    (interpreter,) = (await broker.call("GET", "/v1/version")).json()["interpreters"]
    assert interpreter["version"] == "3.11"
