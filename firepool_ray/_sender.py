"""The thread that sends: jobs leave in the order they were made, and whatever gathered while the previous request was in
flight goes as one batch (no timer). A job that brings a large blob takes a side road, so that small ones overtake it.
"""

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from firepool_ray._http import path_of
from firepool_wire.errors import Cancelled, FirepoolError, Internal, TooManyRequests, from_json
from firepool_wire.words import TERMINAL, JobState

if TYPE_CHECKING:
    from firepool_ray._calls import Call
    from firepool_ray._session import Session
    from firepool_ray._source import Blob

#: Jobs and bytes of one batch. Raise: fewer requests; the broker validates a batch in one go, so others wait longer.
BATCH_JOBS, BATCH_BYTES = 256, 4 * 1024 * 1024
#: Blobs up to this size go ahead of their job in the sender's own thread.
SMALL_BLOB = 256 * 1024
#: Threads that upload large blobs.
SIDE_ROADS = 4


class Sender:
    """Takes calls from any thread and gets them to the broker."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._queue: SimpleQueue[tuple[str, Call | None]] = SimpleQueue()
        self._side: SimpleQueue[Call | None] = SimpleQueue()
        self._side_threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        #: Jobs that wait to be sent, and the bytes that each holds.
        self._unsent: dict[Call, int] = {}
        self._unsent_bytes = 0
        #: Blobs that the broker has.
        self._known: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="firepool-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, call: "Call") -> None:
        """Queue a call. Raises: TooManyRequests: the queue is full (see `Settings.when_full`)."""
        size = _size(call)
        settings = self._session.settings
        with self._lock:
            if self._full(size) and not (settings.when_full == "block" and self._wait_for_room(size)):
                raise TooManyRequests(
                    f"{len(self._unsent)} jobs ({self._unsent_bytes >> 20} MiB) wait to be sent; the most is "
                    f"{settings.max_unsent} ({settings.max_unsent_bytes >> 20} MiB): slow down, or "
                    "init(max_unsent=…, when_full='block')",
                    retry_after_s=0.1,
                )
            self._unsent[call] = size
            self._unsent_bytes += size
        self._queue.put(("job", call))

    def _full(self, size: int) -> bool:
        settings = self._session.settings
        over = self._unsent_bytes + size > settings.max_unsent_bytes and bool(self._unsent)
        return len(self._unsent) >= settings.max_unsent or over

    def _wait_for_room(self, size: int) -> bool:
        return self._room.wait_for(lambda: not self._full(size), self._session.settings.patience_s)

    def _leave(self, calls: "list[Call]") -> None:
        """These wait no longer."""
        with self._lock:
            for call in calls:
                self._unsent_bytes -= self._unsent.pop(call, 0)
            self._room.notify_all()

    def cancel(self, call: "Call") -> None:
        """Ask for the end of a call; returns at once."""
        call.cancel_wanted = True
        self._queue.put(("cancel", call))

    def close(self, timeout_s: float) -> None:
        """Send what is queued, then stop; what is left after the time-out is given up."""
        self._queue.put(("close", None))
        self._thread.join(timeout_s)
        for _ in self._side_threads:
            self._side.put(None)

    # -- the thread --

    def _run(self) -> None:
        while True:
            batch, cancels, closing = self._gather()
            if batch:
                self._send([call for call in batch if not self._withdrawn(call)])
            for call in cancels:
                self._cancel(call)
            if closing:
                return

    def _gather(self) -> "tuple[list[Call], list[Call], bool]":
        """What waits, up to the size of a batch; blocks for the first."""
        batch: list[Call] = []
        cancels: list[Call] = []
        size = 0
        kind, call = self._queue.get()
        while True:
            if call is None:
                return batch, cancels, True
            if kind == "cancel":
                cancels.append(call)
            else:
                batch.append(call)
                size += self._unsent.get(call, 0)
            if self._queue.empty() or len(batch) >= BATCH_JOBS or size >= BATCH_BYTES:
                return batch, cancels, False
            kind, call = self._queue.get()

    def _withdrawn(self, call: "Call") -> bool:
        if call.cancel_wanted and not call.completion.done:
            self._lose(call, Cancelled(f"{call.order.name} was cancelled before it was sent"))
        return call.completion.done

    def _lose(self, call: "Call", error: FirepoolError) -> None:
        self._leave([call])
        self._session.lose(call, error)

    def _send(self, calls: "list[Call]") -> None:
        ready: list[Call] = []
        for call in calls:
            if any(b.size > SMALL_BLOB for b in self._unknown(call)):
                self._by_side_road(call)
            elif self._resolved(call):
                ready.append(call)
        if not ready:
            return
        try:
            self._upload({b.digest: b for call in ready for b in self._unknown(call)})
            self._post(ready)
        except FirepoolError as error:
            failed = error
        except Exception as bug:  # noqa: BLE001 - the thread must outlive any bug, and its victims must be told
            failed = Internal(f"the SDK could not send a job: {bug!r}")
        else:
            self._leave([call for call in ready if call.accepted.done])
            return
        for call in ready:
            self._refused(call, failed)

    def _refused(self, call: "Call", error: FirepoolError) -> None:
        """The call's error; but a blob that the broker had once and has no more is sent again, once."""
        missing = set(error.details.get("missing", ())) & {blob.digest for blob in call.order.blobs}
        if not missing or call.resent:
            self._lose(call, error)
            return
        call.resent = True
        self._known -= missing
        self._again(call)

    def _resolved(self, call: "Call") -> bool:
        """Whether the ids of the jobs it depends on are known; they were sent before it. Fills them into the spec."""
        if not call.order.depends:
            return True
        for other in call.order.depends:
            if other.job_id is None:
                if not other.accepted.done:
                    # It takes the side road; so do we, behind it.
                    other.accepted.subscribe(lambda: self._again(call))
                    return False
                cause = other.error or Internal(f"{other.order.name} has no id")
                self._lose(call, _same(cause, f"an argument of {call.order.name} could not be computed: {cause}"))
                return False
        ids = [other.job_id for other in call.order.depends]
        call.order.spec["entrypoint"]["function"]["depends"] = ids
        return True

    def _again(self, call: "Call") -> None:
        self._queue.put(("job", call))

    def _unknown(self, call: "Call") -> "list[Blob]":
        return [blob for blob in call.order.blobs if blob.digest not in self._known]

    def _upload(self, blobs: "Mapping[str, Blob]") -> None:
        """Make sure that the broker has them. One small new blob goes without asking: that saves a round trip."""
        if not blobs:
            return
        missing = list(blobs)
        if len(blobs) > 1 or not all(blob.made and blob.size < SMALL_BLOB for blob in blobs.values()):
            missing = self._session.api.json("POST", "/v1/blobs:missing", {"digests": missing})["missing"]
        for digest in missing:
            self._session.api.raw("PUT", path_of("blobs", digest), blobs[digest].read())
        self._known.update(blobs)

    def _post(self, calls: "list[Call]") -> None:
        api = self._session.api
        if len(calls) == 1:
            self._accepted(calls[0], api.json("POST", "/v1/jobs", calls[0].order.spec))
            return
        answer = api.json("POST", "/v1/jobs:batch", {"jobs": [call.order.spec for call in calls]})
        for call, result in zip(calls, answer["results"], strict=True):
            if "error" in result:
                self._refused(call, from_json(result["error"]))
            else:
                self._accepted(call, result["job"])

    def _accepted(self, call: "Call", body: dict[str, Any]) -> None:
        state = JobState(body["state"])
        self._session.accepted(call, body["id"], state)
        if state in TERMINAL:
            # The key was used before and that job is over: no event will come.
            self._session.finished(call, body, body.get("result"))

    def _cancel(self, call: "Call") -> None:
        if call.completion.done:
            return
        if call.job_id is None:
            call.accepted.subscribe(lambda: self._queue.put(("cancel", call)))
            return
        try:
            self._session.api.json("POST", path_of("jobs", f"{call.job_id}:cancel"))
        except FirepoolError as why:
            self._session.note(f"job {call.job_id} could not be cancelled: {why}")

    # -- large blobs --

    def _by_side_road(self, call: "Call") -> None:
        if len(self._side_threads) < SIDE_ROADS:
            thread = threading.Thread(target=self._carry, name="firepool-upload", daemon=True)
            self._side_threads.append(thread)
            thread.start()
        self._side.put(call)

    def _carry(self) -> None:
        while (call := self._side.get()) is not None:
            try:
                self._upload({blob.digest: blob for blob in self._unknown(call)})
                self._again(call)
            except FirepoolError as error:
                self._lose(call, error)
            except Exception as bug:  # noqa: BLE001 - a file of the package may have gone; the thread must live on
                self._lose(call, Internal(f"the SDK could not upload what {call.order.name} needs: {bug!r}"))


def _size(call: "Call") -> int:
    # Inline arguments dominate; the rest of a spec is about a kilobyte.
    function = call.order.spec.get("entrypoint", {}).get("function", {})
    return 1024 + len(function.get("args", "")) + sum(blob.size for blob in call.order.blobs)


def _same(cause: FirepoolError, message: str) -> FirepoolError:
    body = cause.to_json()
    return from_json({**body, "message": message})
