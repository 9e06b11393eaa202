"""Jobs one at a time."""

from tests.api.world import World, spec


async def test_a_job_that_was_taken_can_be_read_back(api: World) -> None:
    reply = await api.call("POST", "/v1/jobs", json=spec("wait", labels={"k": "v"}, run="r1"))
    assert reply.status == 201
    job = reply.json()
    assert reply.headers["location"] == f"/v1/jobs/{job['id']}"
    read = (await api.call("GET", f"/v1/jobs/{job['id']}")).json()
    same = ("id", "caller", "person", "name", "sku", "queue", "labels", "run")
    assert {k: read[k] for k in same} == {k: job[k] for k in same}
    assert read["state"] == "RUNNING"
