"""From the bytes of a request to a `JobSpec` (or several), straight through the wire dataclass; and its canonical digest.

Unknown fields are refused with their path and the nearest valid name; values that no job can have are refused all at once.
Nothing is created here.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from firepool_broker.api.rules import Problem, bad_values, refusal
from firepool_wire.errors import BadRequest, FirepoolError, UnknownField
from firepool_wire.jobspec import JobSpec, sparse
from firepool_wire.version import FIREPOOL

T = TypeVar("T")

SPEC: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


@dataclass(frozen=True, slots=True)
class BatchBody:
    """Body of `POST /v1/jobs:batch`."""

    jobs: list[JobSpec]


_BATCH: TypeAdapter[BatchBody] = TypeAdapter(BatchBody)

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})


def parse_spec(body: bytes) -> JobSpec:
    """One job spec from JSON.

    Raises:
        UnknownField: with `details` path and nearest.
        BadRequest: not JSON, a wrong type, or a value that no job can have; `details["problems"]` has all of them.
        ImageNotAllowed: the image is not on the allowlist.
    """
    try:
        spec = SPEC.validate_json(body, strict=True, extra="forbid")
    except ValidationError as error:
        raise refused(error.errors(include_url=False, include_input=False), JobSpec) from None
    wrong = refusal(spec, may_hold_nul=b"\\u0000" in body)
    if wrong is not None:
        raise wrong
    return spec


def parse_batch(body: bytes, most: int) -> list[JobSpec | FirepoolError]:
    """The specs of a batch, each or its own refusal, in order.

    Raises:
        UnknownField, BadRequest: the envelope itself is wrong, or it holds more than `most` jobs.
    """
    try:
        specs: Sequence[JobSpec | FirepoolError] = _BATCH.validate_json(body, strict=True, extra="forbid").jobs
    except ValidationError as error:
        specs = _one_by_one(body, error.errors(include_url=False, include_input=False))
    if len(specs) > most:
        raise BadRequest(f"a batch has at most {most} jobs, this one has {len(specs)}", field="jobs", limit=most)
    nul = b"\\u0000" in body
    return [s if isinstance(s, FirepoolError) else refusal(s, may_hold_nul=nul) or s for s in specs]


def parse_as(adapter: TypeAdapter[T], model: type[T], body: bytes) -> T:
    """Any smaller body. Raises: UnknownField, BadRequest."""
    try:
        return adapter.validate_json(body, strict=True, extra="forbid")
    except ValidationError as error:
        raise refused(error.errors(include_url=False, include_input=False), model) from None


def _one_by_one(body: bytes, errors: list[ErrorDetails]) -> list[JobSpec | FirepoolError]:
    """Some item is wrong: the others are still good. Raises where the envelope is what is wrong."""
    wrong: dict[int, list[ErrorDetails]] = {}
    for error in errors:
        place = error["loc"]
        if len(place) < 2 or not isinstance(place[1], int):
            raise refused(errors, BatchBody)
        wrong.setdefault(place[1], []).append({**error, "loc": place[2:]})
    try:
        jobs = from_json(body)["jobs"]
    except ValueError as error:  # a number that only a lazy reader could pass over
        raise BadRequest(f"the body is not JSON: {error}", field="") from None
    return [
        refused(wrong[n], JobSpec)
        if n in wrong
        else SPEC.validate_json(json.dumps(job).encode(), strict=True, extra="forbid")
        for n, job in enumerate(jobs)
    ]


def with_key(spec: JobSpec, key: str | None) -> JobSpec:
    """The spec with the idempotency key of the request's header.

    Raises:
        BadRequest: header and field name different keys.
    """
    if key is None or key == spec.idempotency_key:
        return spec
    if spec.idempotency_key is not None:
        raise BadRequest("the header Idempotency-Key and the field idempotency_key differ", field="idempotency_key")
    if not 0 < len(key) <= 256:
        raise BadRequest("an Idempotency-Key has 1 to 256 characters", field="Idempotency-Key")
    return replace(spec, idempotency_key=key)


def digest_of(spec: JobSpec) -> str:
    """Digest of what was asked for: the validated spec without its key, defaults left out, names sorted. So an honest
    retry matches however its client writes JSON (audit 2.18a)."""
    body = sparse(spec)
    body.pop("idempotency_key", None)
    return hashlib.sha256(_CANONICAL(body).encode()).hexdigest()


# -- words for what pydantic found --------------------------------------------------------------------------------


def refused(errors: Iterable[ErrorDetails], model: Any) -> FirepoolError:
    """One error of the table for everything that a validation found: unknown fields first, for they explain the rest."""
    errors = list(errors)
    unknown = [e for e in errors if e["type"] in _UNKNOWN]
    if unknown:
        return _unknown([e["loc"] for e in unknown], model)
    return bad_values([Problem(path_of(e["loc"]), _words(e)) for e in errors])


def all_refused(errors: Iterable[ErrorDetails], model: Any, root: str) -> FirepoolError:
    """Like `refused`, for an operator's configuration below `root`: nothing is left out for being of another kind."""
    placed: list[ErrorDetails] = [{**e, "loc": (root, *e["loc"])} for e in errors]
    unknown = [e for e in placed if e["type"] in _UNKNOWN]
    if len(unknown) == len(placed):
        return _unknown([e["loc"] for e in unknown], model, skip=1)
    return bad_values(
        [Problem(path_of(e["loc"]), "is no field" if e["type"] in _UNKNOWN else _words(e)) for e in placed]
    )


def _unknown(places: list[tuple[int | str, ...]], model: Any, skip: int = 0) -> UnknownField:
    known = [(path_of(place), str(place[-1])[:80], _names_at(model, place[skip:-1])) for place in places[:20]]
    path, name, names = known[0]
    later = model is JobSpec and len(places[0]) == 1 and name in JobSpec.LATER
    if later:
        words = f"{path} is not in this version of the broker ({FIREPOOL}); GET /v1/version lists what is"
    else:
        near = nearest(name, names)
        words = f"{path} is no field" + (
            f"; did you mean {near}?" if near else f"; known are {', '.join(sorted(names))}"
        )
    others = [{"path": p, "nearest": nearest(n, ns)} for p, n, ns in known]
    return UnknownField(
        words,
        path=path,
        nearest=None if later else nearest(name, names),
        not_in_this_version=True if later else None,
        fields=others if len(others) > 1 else None,
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return close[0] if close else None


def _names_at(model: Any, place: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the dataclass at a place inside `model` (empty: not a dataclass)."""
    for step in place:
        if isinstance(step, int):
            model = next(iter(get_args(model)), None)
        else:
            model = _hints(model).get(step)
        if get_origin(model) in (Union, UnionType):
            model = next((a for a in get_args(model) if a is not NoneType), None)
    return list(_hints(model))


def _hints(model: Any) -> dict[str, Any]:
    return {f.name: f.type for f in fields(model)} if is_dataclass(model) else {}


def path_of(place: Sequence[int | str]) -> str:
    """`entrypoint.function.depends[2]` for a pydantic location."""
    out = ""
    for step in place:
        if isinstance(step, int):
            out += f"[{step}]"
        else:
            out += f".{step[:80]}" if out else step[:80]
    return out


def _words(error: ErrorDetails) -> str:
    """pydantic's message as the end of a sentence that begins with the field's path."""
    message = error["msg"]
    if error["type"] == "missing":
        return "is required"
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}"
    lowered = message[:1].lower() + message[1:]
    return lowered.replace("input should be", "must be")
