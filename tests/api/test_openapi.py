"""The OpenAPI document is true: requests made from it, good and bad, meet no bug and no answer that it does not name.

Property-based; every example is drawn from a fixed seed, so a failure repeats.
"""

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
    tokens = None


DOCUMENT = create_app(_Nothing()).openapi()  # type: ignore[arg-type]
# An event stream never ends; `test_events` reads it.
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT).exclude(path="/v1/events")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with elsewhere(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def no_bug(context: Any, response: Any, case: Any) -> None:
    """503 and 501 are answers of the table; 500 is a bug of ours."""
    assert response.status_code != 500, response.text
    if response.status_code not in (501, 503):
        not_a_server_error(context, response, case)


@SCHEMA.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_requests_made_from_the_document_meet_no_bug_and_no_surprise(case: Any, broker: Elsewhere) -> None:
    if case.path == "/v1/pools" and isinstance(case.body, dict):
        case.body["dry_run"] = True
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
