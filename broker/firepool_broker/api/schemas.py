"""The shapes of answers, and the OpenAPI document: one place where what is published and what is checked come together.

Shapes are TypedDicts, so building one costs a dict and the type checker compares it with what is published. The job spec's
schema is the wire dataclass's, with the value rules of `rules` laid over it.
"""

from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from firepool_broker.api.rules import RULES
from firepool_broker.api.specs import BatchBody
from firepool_wire.version import FIREPOOL
from firepool_wire.words import Fault, JobState

_REF = "#/components/schemas/{model}"


class ErrorBody(TypedDict):
    """An error of the table, as `FirepoolError.to_json` writes it."""

    code: str
    fault: Fault
    retryable: bool
    message: str
    job_id: NotRequired[str]
    retry_after_s: NotRequired[float]
    details: NotRequired[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DigestList:
    """Digests to look for."""

    digests: list[str]


@dataclass(frozen=True, slots=True)
class JobIds:
    """Ids of jobs."""

    jobs: list[str]


class Problem(ErrorBody):
    """Body of every answer that is an error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


class UsageBody(TypedDict):
    """What an attempt used at most."""

    peak_rss_bytes: int | None
    cpu_s: float | None
    peak_device_bytes: int | None


class OutputBody(TypedDict):
    """One stored output file."""

    path: str
    bytes: int
    digest: str


class HolderBody(TypedDict):
    """What one caller has of a pool, in pods."""

    caller: str
    running: int
    held: int


class WaitingBody(TypedDict):
    """Why a job does not run."""

    #: Place in its pool's queue, from 1; null: it does not wait for pods.
    position: int | None
    #: Name of the limit that blocks it, and the same in words.
    blocked_by: str | None
    sentence: str
    waiting_s: float
    #: Who has the pool's pods, most first.
    holders: list[HolderBody]


class JobBody(TypedDict):
    """A job. Times are epoch seconds."""

    id: str
    state: JobState
    caller: str
    person: str
    name: str
    sku: str
    queue: str
    lease_tag: str | None
    labels: dict[str, str]
    run: str | None
    idempotency_key: str | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    retry_count: int
    cancel_requested: bool
    path: str | None
    why_not_warmer: str | None
    exit_code: int | None
    signal: int | None
    error: ErrorBody | None
    #: Milestones (epoch seconds) and the spans between them (`…_s`: seconds).
    times: dict[str, float]
    usage: UsageBody
    dropped_env: list[str]
    outputs: list[OutputBody]
    discarded_bytes: int
    waiting: WaitingBody | None
    pods: list[str]
    result_bytes: int
    log_bytes: int
    #: Place in the caller's order of changes; events resume behind it.
    seq: int


class JobList(TypedDict):
    """A page of jobs, newest first."""

    jobs: list[JobBody]
    #: Where the next page begins; null: that was all.
    cursor: str | None


class BatchResult(TypedDict):
    """One job of a batch: taken or refused."""

    job: NotRequired[JobBody]
    error: NotRequired[ErrorBody]


class BatchResults(TypedDict):
    """Answers in the order of the batch's jobs."""

    results: list[BatchResult]


class OutputList(TypedDict):
    """Output files of a job."""

    outputs: list[OutputBody]


class DigestBody(TypedDict):
    """A stored blob."""

    digest: str


class MissingList(TypedDict):
    """Those of the digests that the caller has not stored."""

    missing: list[str]


class Renewed(TypedDict):
    """The jobs that were named; the lease of each that lives lasts `client_lease_s` from now."""

    jobs: int


class EventLine(TypedDict):
    """One line of the event stream: a change of a job, or one of the marks `heartbeat` and `resync`."""

    seq: int
    job: NotRequired[str]
    state: NotRequired[JobState]
    terminal: NotRequired[bool]
    idempotency_key: NotRequired[str | None]
    body: NotRequired[JobBody]
    #: base64 of the RESULT frames, where they are small.
    result: NotRequired[str]
    heartbeat: NotRequired[bool]
    #: Changes were lost; finished jobs follow again from `seq` on, other states must be asked for.
    resync: NotRequired[bool]


SHAPES: tuple[type[Any], ...] = (
    Problem,
    JobBody,
    JobList,
    BatchBody,
    BatchResults,
    OutputList,
    DigestBody,
    DigestList,
    MissingList,
    JobIds,
    Renewed,
    EventLine,
)


def components(*more: type[Any]) -> dict[str, Any]:
    """JSON Schemas of all shapes by name."""
    inputs: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
        (shape.__name__, "validation", TypeAdapter(shape)) for shape in (*SHAPES, *more)
    ]
    _, document = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    schemas: dict[str, Any] = document["$defs"]
    for name, rules in RULES.items():
        schema = schemas[name]
        for field, rule in rules.items():
            _lay_over(schema["properties"][field], rule)
    # What clients send is closed: an unknown field is refused.
    sent = {shape.__name__ for shape in (*SHAPES, *more) if is_dataclass(shape)}
    for name in sent.union(RULES):
        schemas[name]["additionalProperties"] = False
    return schemas


def _lay_over(schema: dict[str, Any], rule: dict[str, Any]) -> None:
    """Put a rule on the part of a field's schema that is not null."""
    for part in schema.get("anyOf", [schema]):
        if part.get("type") != "null":
            part.update(rule)


def describe(app: FastAPI, *more: type[Any]) -> dict[str, Any]:
    """The application's OpenAPI document."""
    document = get_openapi(
        title="Firepool broker",
        version=FIREPOOL,
        description="Warm pods, bound late. Errors are application/problem+json with a stable `code`.",
        routes=app.routes,
    )
    parts = document.setdefault("components", {})
    parts.setdefault("schemas", {}).update(components(*more))
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    return document
