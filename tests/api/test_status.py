"""The broker about itself."""

from firepool_wire.version import FIREPOOL, PROTOCOL
from tests.api.world import World


async def test_a_client_learns_version_capabilities_interpreters_and_limits(api: World) -> None:
    body = (await api.call("GET", "/v1/version")).json()
    assert (body["version"], body["protocol"]) == (FIREPOOL, PROTOCOL)
    assert {"jobs.batch", "events.resume", "logs.follow"} <= set(body["capabilities"])
    assert body["interpreters"][0]["version"] == "3.11"
    assert body["limits"]["job_bytes"] == 1 << 20
    assert "secrets" in body["later_fields"]


async def test_a_broker_that_cannot_take_jobs_is_alive_but_not_ready(api: World) -> None:
    assert (await api.call("GET", "/readyz", None)).status == 200
    api.runner.trouble.append("the store is down")
    reply = await api.call("GET", "/readyz", None)
    assert (reply.status, reply.json()["problems"]) == (503, ["the store is down"])
    assert (await api.call("GET", "/healthz", None)).status == 200


async def test_metrics_are_for_those_with_a_token(api: World) -> None:
    assert (await api.call("GET", "/metrics", None)).status == 401
    reply = await api.call("GET", "/metrics", "viewer")
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
