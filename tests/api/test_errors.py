"""Errors as callers see them: one shape, the table's status, nothing that should stay inside."""

import structlog

from firepool_broker.shell.ports import StoreDown
from firepool_wire.errors import TABLE, from_json
from tests.api.world import World, spec


async def test_every_error_of_the_table_travels_with_its_status_and_comes_back_as_itself(api: World) -> None:
    for code, cls in TABLE.items():
        api.runner.broken = cls("what happened", job_id="j1", retry_after_s=1.5, limit=3)
        reply = await api.call("POST", "/v1/jobs", json=spec())
        body = reply.json()
        assert reply.status == body["status"] == cls.status, code
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["retry-after"] == "2"
        assert body["type"] == f"urn:firepool:error:{code}"
        assert body["title"]
        assert body["detail"] == "what happened"
        rebuilt = from_json(body)
        assert type(rebuilt) is cls
        assert (rebuilt.message, rebuilt.job_id, rebuilt.retry_after_s) == ("what happened", "j1", 1.5)
        assert rebuilt.details == {"limit": 3}
        assert (body["fault"], body["retryable"]) == (cls.fault.value, cls.retryable)


async def test_an_unforeseen_exception_tells_the_client_an_incident_and_the_log_the_story(api: World) -> None:
    secret = "password=hunter2"
    api.runner.broken = RuntimeError(secret)
    with structlog.testing.capture_logs() as logged:
        reply = await api.call("POST", "/v1/jobs", json=spec())
    assert (reply.status, reply.code) == (500, "Internal")
    assert secret.encode() not in reply.body
    incident = reply.json()["details"]["incident"]
    (entry,) = [e for e in logged if e.get("incident") == incident]
    assert secret in str(entry["exc_info"])
    assert api.tokens["ann"] not in str(logged)


async def test_a_store_that_is_down_is_an_infrastructure_fault_worth_a_retry(api: World) -> None:
    api.runner.broken = StoreDown("disk full")
    body = (await api.call("POST", "/v1/jobs", json=spec())).json()
    assert (body["code"], body["fault"], body["retryable"]) == ("StoreUnavailable", "infra", True)


async def test_the_broker_goes_on_after_a_bug(api: World) -> None:
    api.runner.broken = ZeroDivisionError()
    with structlog.testing.capture_logs():
        assert (await api.call("POST", "/v1/jobs", json=spec())).status == 500
    api.runner.broken = None
    assert (await api.call("POST", "/v1/jobs", json=spec())).status == 201
