"""The OpenAPI document is true: requests made from it, good and bad, meet no bug and no answer that it does not name.

Property-based; every example is drawn from a fixed seed, so a failure repeats.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from firepool_broker.api.app import create_app
from tests.api.real import Elsewhere, elsewhere


class _Nothing:
    tokens = blobs = None


DOCUMENT = create_app(_Nothing()).openapi()  # type: ignore[arg-type]
# An event stream never ends; `test_events` reads it.
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT).exclude(path="/v1/events")
SCHEMA.config.phases.coverage.unexpected_methods = {"DELETE"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with elsewhere(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.fixture(scope="module")
def finished_job(broker: Elsewhere) -> str:
    submitting = asyncio.run_coroutine_threadsafe(broker.world.submit("print", "x", who="operator"), broker.loop)
    return submitting.result(20)


def no_bug(context: Any, response: Any, case: Any) -> None:
    """503 and 501 are answers of the table; 500 is a bug of ours."""
    assert response.status_code != 500, response.text
    if response.status_code not in (501, 503):
        not_a_server_error(context, response, case)


def _made_to_matter(case: Any, job: str) -> None:
    """Half of the requests about a job are about one that exists, and half of the jobs name a pool that exists: else
    everything would end at `NotFound`. Pools are only checked, not applied."""
    if case.path == "/v1/pools" and isinstance(case.body, dict):
        case.body["dry_run"] = True
    if "job" in (case.path_parameters or {}) and len(str(case.path_parameters["job"])) % 2:
        case.path_parameters["job"] = job
    bodies = case.body.get("jobs") if case.path.endswith(":batch") and isinstance(case.body, dict) else [case.body]
    for body in bodies if case.path.startswith("/v1/jobs") and isinstance(bodies, list) else ():
        if isinstance(body, dict) and isinstance(body.get("sku"), str) and len(body["sku"]) % 2:
            body["sku"] = "cpu"


@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_requests_made_from_the_document_meet_no_bug_and_no_surprise(
    case: Any, broker: Elsewhere, finished_job: str
) -> None:
    _made_to_matter(case, finished_job)
    case.call_and_validate(
        base_url=broker.world.base,
        headers=broker.world.headers("operator"),
        checks=[no_bug, status_code_conformance, content_type_conformance, response_schema_conformance],
        timeout=10,
    )


def test_every_operation_says_what_it_is_for_and_what_goes_wrong() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
            if "security" not in operation:
                assert {"401", "403", "422"} <= set(operation["responses"]), (method, path)


def test_the_job_spec_is_published_with_its_rules() -> None:
    spec = DOCUMENT["components"]["schemas"]["JobSpec"]
    assert spec["additionalProperties"] is False
    assert spec["properties"]["pods"]["minimum"] == 1
    assert spec["required"] == ["entrypoint"]
    (number,) = [p for p in spec["properties"]["run_timeout_s"]["anyOf"] if p["type"] != "null"]
    assert number["exclusiveMinimum"] == 0
