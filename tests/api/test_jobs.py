"""Jobs one at a time: submit, key, get, list, cancel, wait, result, outputs, lease."""

import asyncio
from base64 import b64encode

import pytest

from firepool_wire.frames import ItemStatus, Kind, pack, pack_item
from tests.api.world import World, spec


def frames(value: bytes) -> bytes:
    return b"".join(pack(Kind.RESULT, part) for part in pack_item(0, ItemStatus.VALUE, value))


async def test_a_job_that_was_taken_can_be_read_back(api: World) -> None:
    reply = await api.call("POST", "/v1/jobs", json=spec("wait", labels={"k": "v"}, run="r1"))
    assert reply.status == 201
    job = reply.json()
    assert reply.headers["location"] == f"/v1/jobs/{job['id']}"
    read = (await api.call("GET", f"/v1/jobs/{job['id']}")).json()
    same = ("id", "caller", "person", "name", "sku", "queue", "labels", "run")
    assert {k: read[k] for k in same} == {k: job[k] for k in same}
    assert read["state"] == "RUNNING"


async def test_an_unknown_field_is_refused_with_its_path_and_nearest_name_and_creates_nothing(api: World) -> None:
    body = spec("print")
    body["entrypoint"]["argvs"] = ["x"]
    reply = await api.call("POST", "/v1/jobs", json=body)
    assert (reply.status, reply.code) == (422, "UnknownField")
    assert reply.json()["details"] == {"path": "entrypoint.argvs", "nearest": "argv"}
    assert (await api.call("GET", "/v1/jobs")).json()["jobs"] == []


async def test_a_field_of_a_later_version_is_refused_by_name(api: World) -> None:
    reply = await api.call("POST", "/v1/jobs", json=spec("print", secrets=["key"]))
    assert reply.code == "UnknownField"
    assert "secrets is not in this version" in reply.json()["detail"]


async def test_an_unknown_sku_lists_the_known_ones(api: World) -> None:
    reply = await api.call("POST", "/v1/jobs", json=spec("print", sku="b300"))
    assert (reply.status, reply.code) == (404, "UnknownSku")
    assert reply.json()["details"]["known"] == ["cpu", "h200"]


async def test_the_same_key_and_body_is_the_same_job_however_its_json_is_written(api: World) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await api.call("POST", "/v1/jobs", json=spec("print", pods=1), headers=key)
    again = await api.call("POST", "/v1/jobs", json=spec("print", idempotency_key="k1"))
    assert (first.status, again.status) == (201, 200)
    assert first.json()["id"] == again.json()["id"]


async def test_the_same_key_with_another_body_is_a_conflict_that_names_the_first_job(api: World) -> None:
    first = await api.call("POST", "/v1/jobs", json=spec("print", idempotency_key="k1"))
    other = await api.call("POST", "/v1/jobs", json=spec("print", "x", idempotency_key="k1"))
    assert (other.status, other.code) == (409, "Conflict")
    assert other.json()["job_id"] == first.json()["id"]


async def test_the_same_key_of_another_caller_is_another_job(api: World) -> None:
    mine = await api.call("POST", "/v1/jobs", json=spec("print", idempotency_key="k1"))
    theirs = await api.call("POST", "/v1/jobs", "bob", json=spec("print", idempotency_key="k1"))
    assert (mine.status, theirs.status) == (201, 201)


async def test_header_and_field_with_different_keys_are_refused(api: World) -> None:
    reply = await api.call(
        "POST", "/v1/jobs", json=spec("print", idempotency_key="a"), headers={"Idempotency-Key": "b"}
    )
    assert reply.code == "BadRequest"


async def test_a_foreign_job_is_indistinguishable_from_none(api: World) -> None:
    job = await api.submit("wait")
    for method, tail in (
        ("GET", ""),
        ("GET", "/wait"),
        ("GET", "/result"),
        ("GET", "/logs"),
        ("GET", "/outputs"),
        ("GET", "/outputs/x"),
        ("GET", "/explain"),
        ("POST", ":cancel"),
    ):
        foreign = await api.call(method, f"/v1/jobs/{job}{tail}", "bob")
        nowhere = await api.call(method, f"/v1/jobs/nojob{tail}", "bob")
        assert foreign.status == nowhere.status == 404, tail
        assert foreign.body.replace(job.encode(), b"nojob") == nowhere.body, tail
    assert (await api.call("GET", f"/v1/jobs/{job}")).json()["state"] == "RUNNING"


async def test_an_operator_sees_and_ends_anybodys_job(api: World) -> None:
    job = await api.submit("wait")
    assert (await api.call("GET", f"/v1/jobs/{job}", "operator")).status == 200
    assert (await api.call("POST", f"/v1/jobs/{job}:cancel", "operator")).status == 202


async def test_a_list_shows_only_the_own_jobs_page_by_page_newest_first(api: World) -> None:
    mine = [await api.submit("print") for _ in range(5)]
    await api.submit("print", who="bob")
    seen, cursor = [], ""
    while True:
        page = (await api.call("GET", f"/v1/jobs?limit=2{cursor}")).json()
        seen += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == mine[::-1]


async def test_filters_of_a_list_narrow_it(api: World) -> None:
    waits = await api.submit("wait", labels={"team": "x"}, queue="q1", run="r1")
    other = await api.submit("print", labels={"team": "y"})
    for query, expected in (
        ("state=RUNNING", [waits]),
        ("state=RUNNING,SUCCEEDED", [other, waits]),
        ("state=RUNNING&state=SUCCEEDED", [other, waits]),
        ("label.team=y", [other]),
        ("queue=q1", [waits]),
        ("run=r1", [waits]),
        ("sku=h200", []),
    ):
        page = (await api.call("GET", f"/v1/jobs?{query}")).json()
        assert [job["id"] for job in page["jobs"]] == expected, query


@pytest.mark.parametrize("query", ["stat=RUNNING", "state=WALKING", "limit=0", "limit=x", "cursor=zzz"])
async def test_a_list_refuses_what_it_does_not_know_instead_of_showing_everything(api: World, query: str) -> None:
    reply = await api.call("GET", f"/v1/jobs?{query}")
    assert reply.status == 422
    assert reply.code in ("UnknownField", "BadRequest")


async def test_only_an_operator_lists_other_callers_jobs(api: World) -> None:
    job = await api.submit("print")
    assert (await api.call("GET", "/v1/jobs?caller=team-a", "bob")).code == "Forbidden"
    everyone = (await api.call("GET", "/v1/jobs", "operator")).json()["jobs"]
    assert [j["id"] for j in everyone] == [job]
    assert (await api.call("GET", "/v1/jobs?caller=team-b", "operator")).json()["jobs"] == []


async def test_a_cancelled_job_ends_and_cancelling_it_again_changes_nothing(api: World) -> None:
    job = await api.submit("wait")
    assert (await api.call("POST", f"/v1/jobs/{job}:cancel")).status == 202
    body = (await api.call("GET", f"/v1/jobs/{job}/wait?timeout_s=5")).json()
    assert (body["state"], body["error"]["code"]) == ("CANCELLED", "Cancelled")
    assert (await api.call("POST", f"/v1/jobs/{job}:cancel")).json()["state"] == "CANCELLED"


async def test_a_wait_answers_as_soon_as_the_job_ends(api: World) -> None:
    job = await api.submit("wait")
    waiting = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/wait?timeout_s=30"))
    await asyncio.sleep(0)
    await api.runner.finish(job)
    async with asyncio.timeout(5):
        body = (await waiting).json()
    assert body["state"] == "SUCCEEDED"
    assert body["times"]["submit_to_first_s"] >= 0


async def test_a_wait_that_runs_out_answers_the_job_as_it_is(api: World) -> None:
    job = await api.submit("wait")
    body = (await api.call("GET", f"/v1/jobs/{job}/wait?timeout_s=0.05")).json()
    assert (body["state"], body["error"], body["ended_at"]) == ("RUNNING", None, None)


async def test_a_failed_job_carries_its_error_and_exit_code(api: World) -> None:
    body = (await api.call("GET", f"/v1/jobs/{await api.submit('exit', '3')}")).json()
    assert (body["state"], body["exit_code"], body["error"]["code"]) == ("FAILED", 3, "NonZeroExit")
    assert body["error"]["fault"] == "user"
    assert body["usage"]["cpu_s"] == 0.5


async def test_a_result_is_the_frames_as_the_job_made_them(api: World) -> None:
    made = frames(b"value")
    reply = await api.call("GET", f"/v1/jobs/{await api.submit('result', b64encode(made).decode())}/result")
    assert (reply.status, reply.body) == (200, made)
    assert reply.headers["firepool-job-state"] == "SUCCEEDED"


async def test_a_large_result_is_streamed_from_the_blob_store(api: World) -> None:
    job = await api.submit("wait")
    made = frames(b"x" * 900_000)
    await api.runner.finish(job, result_blob=await api.runner.blobs.put_bytes("team-a", made))
    reply = await api.call("GET", f"/v1/jobs/{job}/result")
    assert reply.body == made
    assert reply.headers["content-length"] == str(len(made))


async def test_a_job_that_runs_has_no_result_yet(api: World) -> None:
    job = await api.submit("wait")
    reply = await api.call("GET", f"/v1/jobs/{job}/result")
    assert (reply.status, reply.code) == (409, "Conflict")


async def test_a_followed_result_ends_with_the_job(api: World) -> None:
    job = await api.submit("wait")
    following = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/result?follow=true"))
    await asyncio.sleep(0)
    await api.runner.finish(job, result=frames(b"late"))
    assert (await following).body == frames(b"late")


async def test_outputs_are_listed_and_fetched(api: World) -> None:
    job = await api.submit("write", "out/a.txt", "hello")
    listed = (await api.call("GET", f"/v1/jobs/{job}/outputs")).json()["outputs"]
    assert [(o["path"], o["bytes"]) for o in listed] == [("out/a.txt", 5)]
    assert (await api.call("GET", f"/v1/jobs/{job}/outputs/out/a.txt")).body == b"hello"


@pytest.mark.parametrize(
    "path", ["%2e%2e/secret", "out/%2e%2e/%2e%2e/x", "%2fetc/passwd", "a%00b", "..%5cx", "other.txt"]
)
async def test_no_path_leaves_a_jobs_outputs(api: World, path: str) -> None:
    job = await api.submit("write", "out/a.txt", "hello")
    from yarl import URL

    async with api.session.get(
        URL(f"{api.base}/v1/jobs/{job}/outputs/{path}", encoded=True), headers=api.headers("ann")
    ) as reply:
        assert reply.status in (404, 422)
        assert (await reply.json(content_type=None))["code"] in ("NotFound", "BadRequest")


async def test_a_client_renews_the_lease_of_its_jobs(api: World) -> None:
    job = await api.submit("wait")
    reply = await api.call("POST", "/v1/clients/c1:renew", json={"jobs": [job]})
    assert (reply.status, reply.json()) == (200, {"jobs": 1})
    assert api.runner.renewed == [[job]]
