"""Requests that make no sense or come from somebody else: refused at the door with words that help, and nothing is created."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.venue import Venue, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]

TRUE: dict[str, Any] = {"entrypoint": {"argv": ["/bin/true"]}}


@pytest.fixture(autouse=True)
def nothing_is_created(venue: Venue) -> Iterator[None]:
    before = ids(venue)
    yield
    assert ids(venue) == before
    assert venue.command("/bin/echo", "and the broker goes on", labels={"by": "fixture"})["state"] == "SUCCEEDED"


def ids(venue: Venue) -> set[str]:
    """All jobs there are but this fixture's own."""
    jobs = venue.broker.json("GET", "/v1/jobs?limit=500")["jobs"]
    return {job["id"] for job in jobs if job["labels"].get("by") != "fixture"}


def test_an_unknown_field_is_named_with_its_path_and_the_nearest_one(venue: Venue) -> None:
    spec = {"entrypoint": {"argv": ["/bin/true"], "functoin": None}}
    problem = venue.refused("POST", "/v1/jobs", spec)
    details = wrong(problem, "UnknownField", "user")
    assert (problem["http"], details["path"], details["nearest"]) == (422, "entrypoint.functoin", "function")
    details = wrong(venue.refused("POST", "/v1/jobs", {**TRUE, "run_timout_s": 5}), "UnknownField", "user")
    assert (details["path"], details["nearest"]) == ("run_timout_s", "run_timeout_s")


def test_an_unknown_pool_is_answered_with_those_there_are(venue: Venue) -> None:
    problem = venue.refused("POST", "/v1/jobs", {**TRUE, "sku": "h900"})
    details = wrong(problem, "UnknownSku", "user")
    assert problem["http"] == 404
    assert {"cpu", "untrusted", "tight"} <= set(details["known"].split(", "))


def test_more_than_a_pool_can_ever_give_is_refused_with_the_limit(venue: Venue) -> None:
    problem = venue.refused("POST", "/v1/jobs", {**TRUE, "pods": 4})
    assert problem["http"] == 503
    assert wrong(problem, "CapacityUnavailable", "limit", retryable=True)["limit"] == "max_count"


def test_an_image_that_is_not_on_the_allowlist_is_refused(venue: Venue) -> None:
    wrong(venue.refused("POST", "/v1/jobs", {**TRUE, "image": "docker.io/evil:latest"}), "ImageNotAllowed", "user")


def test_one_key_for_two_different_jobs_is_a_conflict(venue: Venue) -> None:
    first = venue.command("/bin/true", idempotency_key="one", labels={"by": "fixture"})
    again = venue.broker.submit({**TRUE, "idempotency_key": "one", "labels": {"by": "fixture"}})
    assert again == first["id"]
    problem = venue.refused("POST", "/v1/jobs", {**TRUE, "idempotency_key": "one", "priority": 1})
    wrong(problem, "Conflict", "user")
    assert problem["http"] == 409


# -- who asks ---------------------------------------------------------------------------------------------------------


def asked_with(venue: Venue, header: str | None, method: str = "GET", path: str = "/v1/jobs", body: Any = None) -> Any:
    """(status, answer) of a request with this `Authorization`."""
    connection = http.client.HTTPConnection(urlsplit(venue.broker.address).netloc, timeout=30)
    try:
        headers = {} if header is None else {"Authorization": header}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


def token_of(venue: Venue, name: str, **asked: Any) -> str:
    return str(venue.broker.json("POST", "/v1/tokens", {"name": name, **asked})["token"])


@pytest.mark.parametrize("header", [None, "Bearer not-a-token", "Basic bG9jYWw6bG9jYWw="])
def test_without_a_good_token_nothing_is_answered(venue: Venue, header: str | None) -> None:
    for method, body in (("GET", None), ("POST", TRUE)):
        status, problem = asked_with(venue, header, method, body=body)
        assert status == 401
        wrong(problem, "Unauthenticated", "user")


def test_an_expired_token_is_none(venue: Venue) -> None:
    header = f"Bearer {token_of(venue, 'brief', ttl_s=0.5)}"
    assert asked_with(venue, header)[0] == 200
    problem = venue.broker.until(
        lambda: (found := asked_with(venue, header))[0] == 401 and found[1], "the end of the token"
    )
    wrong(problem, "Unauthenticated", "user")


def test_a_revoked_token_ends_at_once(venue: Venue) -> None:
    header = f"Bearer {token_of(venue, 'gone')}"
    assert asked_with(venue, header)[0] == 200
    assert venue.broker.call("DELETE", "/v1/tokens/gone")[0] == 204
    assert asked_with(venue, header)[0] == 401


def test_other_peoples_jobs_logs_and_blobs_do_not_exist(venue: Venue) -> None:
    mine = venue.command("/bin/echo", "secret", labels={"by": "fixture"})["id"]
    blob = venue.store(b"a secret too")
    header = f"Bearer {token_of(venue, 'mallory', caller='mallory', person='mallory')}"
    for path in (f"/v1/jobs/{mine}", f"/v1/jobs/{mine}/logs", f"/v1/jobs/{mine}/result", f"/v1/blobs/{blob}"):
        status, problem = asked_with(venue, header, path=path)
        assert status == 404, path
        wrong(problem, "NotFound", "user")
    assert asked_with(venue, header, "POST", f"/v1/jobs/{mine}:cancel")[0] == 404
    assert asked_with(venue, header)[1]["jobs"] == []
    spec = {**TRUE, "package": blob}
    wrong(asked_with(venue, header, "POST", body=spec)[1], "BadRequest", "user")
    status, problem = asked_with(venue, header, "PUT", "/v1/pools", {"pools": []})
    assert status == 403
    wrong(problem, "Forbidden", "user")


# -- how much ---------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused_with_the_limit(venue: Venue) -> None:
    spec = {**TRUE, "env": {"BIG": "x" * (2 << 20)}}
    problem = venue.refused("POST", "/v1/jobs", spec)
    details = wrong(problem, "PayloadTooLarge", "user")
    assert (problem["http"], details["limit_bytes"]) == (413, 1 << 20)


def test_a_package_of_600_mib_is_refused_and_nothing_of_it_stays(venue: Venue, tmp_path: Path) -> None:
    def blobs() -> set[str]:
        return {str(f) for f in (venue.broker.home / "blobs").rglob("*") if f.is_file()}

    before, big = blobs(), tmp_path / "package.zip"
    with big.open("wb") as file:
        file.truncate(600 << 20)  # sparse: no bytes are written
    connection = http.client.HTTPConnection(urlsplit(venue.broker.address).netloc, timeout=60)
    token = (venue.broker.home / "token").read_text()
    headers = {"Authorization": f"Bearer {token}", "Content-Length": str(600 << 20)}
    with big.open("rb") as file:
        connection.request("POST", "/v1/blobs", file, headers)
        answer = connection.getresponse()
        problem = json.loads(answer.read())
    connection.close()
    assert answer.status == 413
    assert wrong(problem, "PayloadTooLarge", "user")["limit_bytes"] == 512 << 20
    assert blobs() == before


def test_a_pools_definition_with_an_unknown_knob_changes_nothing(venue: Venue) -> None:
    before = venue.broker.json("GET", "/v1/pools")
    problem = venue.refused("PUT", "/v1/pools", {"pools": [{"sku": "cpu", "max_cuont": 3}]})
    assert wrong(problem, "UnknownField", "user")["nearest"] == "max_count"
    assert [p["pool"] for p in venue.broker.json("GET", "/v1/pools")["pools"]] == [p["pool"] for p in before["pools"]]
