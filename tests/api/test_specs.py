"""From JSON to a job spec: what is refused, with which words, and what two spellings of one job have in common."""

import json
from typing import Any

import pytest

from firepool_broker.api.specs import digest_of, parse_batch, parse_spec, with_key
from firepool_wire.errors import BadRequest, FirepoolError, ImageNotAllowed, UnknownField
from firepool_wire.jobspec import JobSpec, sparse

ARGV: dict[str, Any] = {"entrypoint": {"argv": ["true"]}}
DIGEST = "sha256:" + "a" * 64


def function(**fields: Any) -> dict[str, Any]:
    return {"entrypoint": {"function": {"payload": DIGEST, "args": "QUJD", **fields}}}


def parse(body: object) -> JobSpec:
    return parse_spec(json.dumps(body).encode())


def problems(body: object) -> list[str]:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    return [p["field"] for p in caught.value.details["problems"]]


@pytest.mark.parametrize(
    ("body", "path", "nearest"),
    [
        ({**ARGV, "quue": "x"}, "quue", "queue"),
        ({**ARGV, "retries": 3}, "retries", "max_retries"),
        (function(itemz=3), "entrypoint.function.itemz", "items"),
        ({**ARGV, "requirements": {"text": "a", "mod": "layer"}}, "requirements.mod", "mode"),
        ({**ARGV, "zzz": 1}, "zzz", None),
    ],
)
def test_an_unknown_field_names_its_path_and_the_nearest_field(body: object, path: str, nearest: str | None) -> None:
    with pytest.raises(UnknownField) as caught:
        parse(body)
    assert caught.value.details["path"] == path
    assert caught.value.details.get("nearest") == nearest


@pytest.mark.parametrize("name", JobSpec.LATER)
def test_every_field_of_later_versions_is_refused_as_such(name: str) -> None:
    with pytest.raises(UnknownField, match="not in this version"):
        parse({**ARGV, name: None})


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"pods": 0}, "pods"),
        ({"pods": "3"}, "pods"),
        ({"pods": True}, "pods"),
        ({"run_timeout_s": -1}, "run_timeout_s"),
        ({"run_timeout_s": float("nan")}, "run_timeout_s"),
        ({"run_timeout_s": float("inf")}, "run_timeout_s"),
        ({"package": "sha256:abc"}, "package"),
        ({"package": DIGEST + "\n"}, "package"),
        ({"isolation": "magic"}, "isolation"),
        ({"topology": "ray"}, "topology"),
        ({"topology": "ring"}, "topology"),
        ({"retry_on": ["Boredom"]}, "retry_on[0]"),
        ({"outputs": ["../x"]}, "outputs[0]"),
        ({"outputs": ["/etc/passwd"]}, "outputs[0]"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A": "x\0y"}}, "env.A"),
        ({"labels": {"": "x"}}, "labels."),
        ({"queue": ""}, "queue"),
        ({"queue": "a\nb"}, "queue"),
        ({"priority": 10**30}, "priority"),
        ({"idempotency_key": "k" * 300}, "idempotency_key"),
    ],
)
def test_a_value_that_no_job_can_have_is_refused_by_its_field(fields: dict[str, Any], wrong: str) -> None:
    assert problems({**ARGV, **fields}) == [wrong]


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"entrypoint": {}}, "entrypoint"),
        ({"entrypoint": {"argv": []}}, "entrypoint.argv"),
        ({"entrypoint": {"argv": ["a\0b"]}}, "entrypoint.argv[0]"),
        ({"entrypoint": {**ARGV["entrypoint"], **function()["entrypoint"]}}, "entrypoint"),
        (function(import_path="m:f"), "entrypoint.function"),
        (function(args_blob=DIGEST), "entrypoint.function"),
        (function(args="not base64!"), "entrypoint.function.args"),
        (function(args="QUJD" * 30_000), "entrypoint.function.args"),
        (function(items=2), "entrypoint.function.items"),
        (function(kind="loop"), "entrypoint.function.kind"),
        ({}, "entrypoint"),
    ],
)
def test_an_entrypoint_that_cannot_run_is_refused(body: dict[str, Any], wrong: str) -> None:
    assert problems(body) == [wrong]


def test_every_wrong_value_is_named_at_once() -> None:
    assert problems({**ARGV, "pods": 0, "grace_s": -1, "max_retries": -1}) == ["pods", "max_retries", "grace_s"]


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b"null", b"3", b"\xff\xfe", b"{" * 5000, b'{"entrypoint": "x"}'])
def test_what_is_not_a_job_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_spec(body)


def test_an_image_is_refused_while_no_allowlist_exists() -> None:
    with pytest.raises(ImageNotAllowed):
        parse({**ARGV, "image": "python:3.12"})


def test_a_hostile_value_does_not_come_back_in_full() -> None:
    with pytest.raises(FirepoolError) as caught:
        parse({**ARGV, "isolation": "x" * 100_000, "y" * 100_000: 1})
    assert len(json.dumps(caught.value.to_json())) < 5_000


def test_two_spellings_of_one_job_have_one_digest_and_the_key_is_not_part_of_it() -> None:
    plain = parse({**ARGV, "env": {"A": "1", "B": "2"}})
    spelled = parse({"pods": 1, "queue": "default", "env": {"B": "2", "A": "1"}, **ARGV, "idempotency_key": "k"})
    assert digest_of(plain) == digest_of(spelled) == digest_of(with_key(plain, "other"))
    assert digest_of(plain) != digest_of(parse({**ARGV, "env": {"A": "1"}}))


def test_a_full_spec_survives_the_wire() -> None:
    full = {**function(kind="map", items=3, depends=["a", "b"]), "outputs": ["*.txt"], "labels": {"a": "b"}, "pods": 2}
    assert sparse(parse(full)) == full


def test_one_wrong_job_of_a_batch_leaves_the_others_good() -> None:
    body = {"jobs": [ARGV, {**ARGV, "podz": 1}, {**ARGV, "pods": 0}, 7, {**ARGV, "queue": "q"}]}
    first, unknown, bad, none, last = parse_batch(json.dumps(body).encode(), 10)
    assert isinstance(first, JobSpec)
    assert isinstance(unknown, UnknownField)
    assert unknown.details["path"] == "podz"
    assert isinstance(bad, BadRequest)
    assert isinstance(none, BadRequest)
    assert isinstance(last, JobSpec)
    assert last.queue == "q"


@pytest.mark.parametrize("body", [{}, {"jobs": {}}, {"jobs": [], "x": 1}, [], {"jobs": [ARGV] * 11}])
def test_a_batch_whose_envelope_is_wrong_is_refused_as_a_whole(body: object) -> None:
    with pytest.raises(FirepoolError):
        parse_batch(json.dumps(body).encode(), 10)


def test_a_number_that_python_cannot_read_is_bad_input_not_a_bug() -> None:
    with pytest.raises(FirepoolError):
        parse_spec(b'{"entrypoint":{"argv":["a"]},"priority":' + b"9" * 6000 + b"}")
    huge = b'{"jobs":[{"entrypoint":{"argv":["a"]},"priority":' + b"9" * 6000 + b'},{"bad":1}]}'
    assert all(isinstance(r, FirepoolError) for r in _batch_or_error(huge))


def _batch_or_error(body: bytes) -> list[JobSpec | FirepoolError]:
    try:
        return parse_batch(body, 10)
    except BadRequest as error:
        return [error]
