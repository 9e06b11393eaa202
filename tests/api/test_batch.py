"""Many jobs in one request."""

import hashlib

from tests.api.world import World, spec


async def test_every_job_of_a_batch_is_taken_or_refused_on_its_own_in_order(api: World) -> None:
    jobs = [spec("print"), spec("print", pods=0), spec("print", sku="nope"), {**spec(), "quue": 1}, spec("wait")]
    reply = await api.call("POST", "/v1/jobs:batch", json={"jobs": jobs})
    assert reply.status == 200
    first, bad, nowhere, unknown, last = reply.json()["results"]
    assert [r["error"]["code"] for r in (bad, nowhere, unknown)] == ["BadRequest", "UnknownSku", "UnknownField"]
    listed = (await api.call("GET", "/v1/jobs")).json()["jobs"]
    assert [j["id"] for j in listed] == [last["job"]["id"], first["job"]["id"]]


async def test_an_empty_batch_is_an_empty_answer(api: World) -> None:
    assert (await api.call("POST", "/v1/jobs:batch", json={"jobs": []})).json() == {"results": []}


async def test_a_batch_that_is_sent_again_under_its_key_creates_nothing_new(api: World) -> None:
    key = {"Idempotency-Key": "wave-1"}
    jobs = {"jobs": [spec("print", str(n)) for n in range(3)] + [spec("print", idempotency_key="own")]}
    first = (await api.call("POST", "/v1/jobs:batch", json=jobs, headers=key)).json()["results"]
    again = (await api.call("POST", "/v1/jobs:batch", json=jobs, headers=key)).json()["results"]
    assert [r["job"]["id"] for r in first] == [r["job"]["id"] for r in again]
    assert [r["job"]["idempotency_key"] for r in first] == ["wave-1/0", "wave-1/1", "wave-1/2", "own"]
    assert [r["job"]["state"] for r in again] == ["SUCCEEDED"] * 4


async def test_a_batch_with_an_unknown_field_beside_its_jobs_creates_nothing(api: World) -> None:
    reply = await api.call("POST", "/v1/jobs:batch", json={"jobs": [spec()], "job": []})
    assert (reply.status, reply.code) == (422, "UnknownField")
    assert reply.json()["details"] == {"path": "job", "nearest": "jobs"}
    assert (await api.call("GET", "/v1/jobs")).json()["jobs"] == []


async def test_a_job_whose_blobs_are_not_stored_is_refused_with_their_digests_and_taken_once_they_are(
    api: World,
) -> None:
    data = b"a package"
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    wants = spec("print", package=digest)
    single = await api.call("POST", "/v1/jobs", json=wants)
    assert (single.status, single.json()["details"]["missing"]) == (422, [digest])
    batch = (await api.call("POST", "/v1/jobs:batch", json={"jobs": [spec(), wants, spec()]})).json()["results"]
    assert ["error" in r for r in batch] == [False, True, False]
    assert batch[1]["error"]["details"]["missing"] == [digest]
    await api.call("PUT", f"/v1/blobs/{digest}", data=data)
    assert (await api.call("POST", "/v1/jobs", json=wants)).status == 201
    assert (await api.call("POST", "/v1/jobs", "bob", json=wants)).status == 422
