"""A write on its way to the writer's thread: checked and turned into column values on the caller's side.

What cannot be written (facts that are no JSON, text that is no Unicode) is refused here, to the one who asked, and never
spoils the group that others share. The thread then does little else than SQLite calls, which run without the GIL.
"""

import json
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from sqlite3 import Connection
from typing import Any, assert_never

from firepool_broker.shell.rows import EndAttempt, InsertJob, Lost, MoveJob, StartAttempt, Won, Write
from firepool_broker.shell.store.statements import Row
from firepool_wire.errors import BadRequest
from firepool_wire.jobspec import sparse
from firepool_wire.words import JobState

#: One encoder for all: `json.dumps` with separators makes a new one at every call, twice the cost of a small document.
_dump = json.JSONEncoder(separators=(",", ":")).encode


class Kind(IntEnum):
    """Which statement a write belongs to; also the order of statements within a layer of a group."""

    INSERT = 0
    START = 1
    END = 2
    REQUEUE = 3
    MOVE = 4


@dataclass(slots=True)
class Entry:
    """One write on a job. Its `row` lacks only the place in the order of changes, which the thread appends."""

    kind: Kind
    job: str
    #: The version that the row must have; None where it does not matter.
    version: int | None
    row: Row
    future: "Future[Won | Lost]"
    bindings: tuple[Row, ...] = ()
    #: (caller, key), to name the job that has a taken key.
    key: tuple[str, str | None] = ("", None)


@dataclass(slots=True)
class Task:
    """Any other writing work (tokens, limits, pools): runs in a transaction of its own, fenced like the others."""

    work: Callable[[Connection], Any]
    future: "Future[Any]" = field(repr=False)


def entry(write: Write, future: "Future[Won | Lost]") -> Entry:
    """The write as column values.

    Raises:
        BadRequest: a text is not valid Unicode.
        TypeError: facts are not JSON-able.
    """
    row: Row
    match write:
        case InsertJob():
            return _insert(write, future)
        case StartAttempt():
            row = (write.job, write.version, *_started(write), write.at)
            _must_be_unicode(write.token, write.path, write.why_not_warmer)
            return Entry(Kind.START, write.job, write.version, row, future, _bindings(write))
        case EndAttempt():
            row = (
                write.job,
                write.version,
                write.state.value,
                write.retry_count,
                write.infra_retries,
                _dump(write.facts),
                write.at,
                write.result,
                write.result_blob,
            )
            kind = Kind.REQUEUE if write.state is JobState.QUEUED else Kind.END
            return Entry(kind, write.job, write.version, row, future)
        case MoveJob():
            state = None if write.state is None else write.state.value
            row = (write.job, write.version, state, write.cancel_requested)
            return Entry(Kind.MOVE, write.job, write.version, row, future)
    assert_never(write)


def _insert(write: InsertJob, future: "Future[Won | Lost]") -> Entry:
    spec = write.spec
    _must_be_unicode(write.job, write.caller, write.person, spec.sku, spec.queue, spec.run, spec.idempotency_key)
    start = write.start
    attempt, token, path, why, pods, retire_after = (
        (None, None, None, "", "[]", "[]") if start is None else _started(start)
    )
    row = (
        write.job,
        write.caller,
        write.person,
        write.state.value,
        0,
        0,
        0,
        write.submitted_at,
        write.submitted_at if start is None else start.at,
        spec.sku,
        spec.queue,
        spec.run,
        spec.idempotency_key,
        write.body_digest,
        attempt,
        token,
        path,
        why,
        pods,
        retire_after,
        _dump(spec.labels) if spec.labels else "{}",
        _dump(sparse(spec)),
    )
    bindings = () if start is None else _bindings(start)
    return Entry(Kind.INSERT, write.job, None, row, future, bindings, (write.caller, spec.idempotency_key))


def placed(item: Entry, seq: int) -> Row:
    """The parameters of the entry's statement, with its place in the order of changes."""
    if item.kind is not Kind.INSERT:
        return (*item.row, seq)
    job, caller, person, state, *middle, spec = item.row
    return (seq, job, caller, person, state, 1, seq, *middle, None, spec, "{}", None)


def _started(start: StartAttempt) -> tuple[str, str, str, str, str, str]:
    return (
        start.attempt,
        start.token,
        start.path,
        start.why_not_warmer,
        _dump(start.pods),
        _dump(start.retire_after),
    )


def _bindings(start: StartAttempt) -> tuple[Row, ...]:
    _must_be_unicode(start.attempt, start.caller, start.queue, start.tag, *start.pods)
    return tuple(
        (pod, start.attempt, start.job, rank, start.caller, start.queue, start.tag, retire)
        for rank, (pod, retire) in enumerate(zip(start.pods, start.retire_after, strict=True))
    )


def _must_be_unicode(*texts: str | None) -> None:
    """JSON can carry half a surrogate pair, SQLite cannot."""
    try:
        "".join([t for t in texts if t is not None]).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"A text of the job is not valid Unicode: {error.reason} in {error.object!r}") from None
