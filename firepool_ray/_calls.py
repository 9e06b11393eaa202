"""One submitted function job as the session keeps it: what is sent, where it stands, what came back.

`JobRef`, map results and streams are faces of it. Only the events thread and the sender change it; anybody reads.
"""

import base64
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from firepool_ray._completion import Completion
from firepool_ray._errors import SessionClosed, error_of, job_error
from firepool_ray._source import Blob
from firepool_wire import codec
from firepool_wire.errors import FirepoolError, Internal, is_infra
from firepool_wire.frames import Items, ItemStatus, Kind, Parser
from firepool_wire.words import JobState

if TYPE_CHECKING:
    from firepool_ray._session import Session

Item = tuple[ItemStatus, bytes]


class Reading(NamedTuple):
    """How results are read: `loads` is None where nothing may be unpickled."""

    loads: Callable[[bytes], object] | None
    classes: Callable[[str], type | None] | None = None


class Order(NamedTuple):
    """What a call asks for; made in the caller's thread, sent by the sender."""

    #: Sparse JSON of the job spec.
    spec: dict[str, Any]
    reading: Reading
    name: str
    #: Source file of the function, for tracebacks.
    file: str | None = None
    #: Blobs that the spec names.
    blobs: tuple[Blob, ...] = ()
    #: Calls whose results are arguments; their ids go into the spec once they are known.
    depends: tuple["Call", ...] = ()
    items: int = 1


class Call:
    """A job from `.remote()` to its last byte."""

    __slots__ = (
        "_error",
        "_items",
        "_lock",
        "accepted",
        "body",
        "cancel_wanted",
        "completion",
        "job_id",
        "key",
        "leased",
        "order",
        "resent",
        "session",
        "started_at",
        "state",
    )

    def __init__(self, session: "Session", key: str, order: Order, *, leased: bool) -> None:
        self.session = session
        #: Our session renews its lease.
        self.leased = leased
        #: Idempotency key; the call's name until the broker gave it an id.
        self.key = key
        self.order = order
        self.job_id: str | None = None
        self.state: JobState | None = None
        #: The broker has it (or will never have it).
        self.accepted = Completion()
        #: It is terminal.
        self.completion = Completion()
        self.cancel_wanted = False
        #: It was submitted anew after the broker had lost one of its blobs.
        self.resent = False
        #: `JobBody` once terminal.
        self.body: dict[str, Any] | None = None
        #: When it was seen to run, on the monotonic clock.
        self.started_at: float | None = None
        self._error: FirepoolError | None = None
        #: Result frames by item; None = still with the broker.
        self._items: dict[int, Item] | None = None
        self._lock = threading.Lock()

    # -- what the session's threads say --

    def accept(self, job_id: str) -> None:
        """The broker gave it an id."""
        self.job_id = job_id
        self.accepted.complete()

    def move(self, state: JobState) -> None:
        """Its state changed, short of the end."""
        self.state = state
        if state is JobState.RUNNING:
            self.started_at = monotonic()

    def finish(self, body: dict[str, Any], result: str | None) -> None:
        """It is terminal: its row, and the base64 of its result frames where they were small."""
        if self.completion.done:
            return
        self.body = body
        self.state = JobState(body["state"])
        if body.get("error"):
            self._error = job_error(body["error"], self.job_id, self.order.file)
        if result is not None:
            self._items = read_frames(base64.b64decode(result))
        elif not body.get("result_bytes"):
            self._items = {}
        self._end()

    def fail(self, error: FirepoolError) -> None:
        """It never reached the broker, or nobody can say any more what became of it."""
        if self.completion.done:
            return
        self._error, self._items = error, {}
        self._end()

    def _end(self) -> None:
        # Large arguments need not live as long as the reference.
        self.order = self.order._replace(spec={}, blobs=(), depends=())
        self.accepted.complete()
        self.completion.complete()

    # -- what callers ask --

    @property
    def error(self) -> FirepoolError | None:
        """The job's own error once it is done."""
        return self._error

    @property
    def is_here(self) -> bool:
        """Whether the result is in this process already."""
        return self._items is not None

    def items(self) -> dict[int, Item]:
        """The result frames by item number, fetched from the broker where they were too large for the event.

        Raises:
            FirepoolError: they cannot be fetched.
        """
        with self._lock:
            if self._items is None:
                if self.job_id is None:
                    raise SessionClosed(f"{self.order.name}: its result was never fetched")
                self._items = read_frames(self.session.fetch_result(self.job_id))
            return self._items

    def is_infra(self, item: int) -> bool:
        """Whether a finished item failed through no fault of its own. Reads no value."""
        found = self.items().get(item)
        if found is None:
            return is_infra(self._error or self._missing(item))
        status, payload = found
        return status is ItemStatus.ERROR and is_infra(error_of(payload, None, self.job_id))

    def outcome(self, item: int) -> "object | FirepoolError":
        """The value of a finished item, or its error as a value."""
        found = self.items().get(item)
        if found is None:
            return self._error or self._missing(item)
        status, payload = found
        if status is ItemStatus.ERROR:
            return error_of(payload, self.order.reading.loads, self.job_id, self.order.file)
        if status is ItemStatus.STOP:
            return self._error or self._missing(item)
        return self.read(payload)

    def read(self, payload: bytes) -> object:
        """A value frame as a value, or the reason why it cannot be one here, as a value."""
        try:
            return codec.decode(payload, self.order.reading.loads, self.order.reading.classes)
        except codec.NotSafe as why:
            return self._unreadable(f"the result of an untrusted job is {why}; return plain types from it")
        except Exception as why:  # noqa: BLE001 - unpickling runs the user's classes
            return self._unreadable(f"the result of {self.order.name} cannot be read here: {type(why).__name__}: {why}")

    def _unreadable(self, words: str) -> FirepoolError:
        from firepool_wire.errors import ResultUnpicklable

        return ResultUnpicklable(words, job_id=self.job_id)

    def _missing(self, item: int) -> FirepoolError:
        return Internal(f"job {self.job_id} ended without a result for item {item}", job_id=self.job_id)


def read_frames(data: bytes) -> dict[int, Item]:
    """Items by number out of concatenated RESULT frames."""
    items, parser, found = Items(), Parser(), {}
    for frame in parser.feed(data):
        if frame.kind is Kind.RESULT and (item := items.feed(frame.payload)) is not None:
            found[item[0]] = (item[1], item[2])
    return found
