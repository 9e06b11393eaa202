"""The tie between a program and a broker: what is in flight, the threads that send, listen and keep alive.

One session is the program's current one (`_front`); a forked child makes its own. Nothing here waits for the network
except `Session.open` and what says so.
"""

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firepool_ray._api import Api
from firepool_ray._calls import Call, Order
from firepool_ray._config import Settings, Target
from firepool_ray._errors import SessionClosed
from firepool_ray._events import Events
from firepool_ray._http import path_of
from firepool_ray._keeper import Keeper
from firepool_ray._sender import Sender
from firepool_wire.errors import BrokerUnavailable, Conflict, FirepoolError, SerializationMismatch
from firepool_wire.version import PROTOCOL
from firepool_wire.words import JobState

if TYPE_CHECKING:
    from firepool_ray._embedded import Child

#: How long `init` waits for the event stream.
_LISTEN_S = 15.0
#: `shutdown` cancels at most this many jobs one by one; the lease ends the rest.
_CANCEL_AT_MOST = 200
#: Events of unknown jobs that are kept; those of other programs of the same caller are among them.
_EARLY_AT_MOST = 2048


class Session:
    """A program's connection to one broker."""

    def __init__(self, settings: Settings, target: Target, child: "Child | None" = None) -> None:
        self.settings = settings
        self.api = Api(target, request_timeout_s=settings.request_timeout_s, patience_s=settings.patience_s)
        #: Name of this client in leases, and stem of its idempotency keys.
        self.client = os.urandom(12).hex()
        #: Process that opened it; after a fork it is somebody else's.
        self.pid = os.getpid()
        self.closed = False
        self.shortest_lease_s = settings.client_lease_s or 120.0
        #: `GET /v1/version`.
        self.version: dict[str, Any] = {}
        #: Pool definitions by SKU, where the broker shows them.
        self.pools: dict[str, dict[str, Any]] = {}
        self._child = child
        self._count = 0
        self._lock = threading.Lock()
        self._by_key: dict[str, Call] = {}
        self._by_id: dict[str, Call] = {}
        #: Last states of jobs that are not known (yet): an event may be faster than the answer to its submission.
        self._early: dict[str, JobState] = {}
        self._noted: set[str] = set()
        self._sender = Sender(self)
        self._events = Events(self)
        self._keeper = Keeper(self)
        #: Prints what jobs write (`log_to_driver`), or None.
        self.printer: Any = None

    @classmethod
    def open(cls, settings: Settings, target: Target, child: "Child | None" = None) -> "Session":
        """Connect: handshake, then the event stream, then the sender. Raises: FirepoolError."""
        session = cls(settings, target, child)
        try:
            session._handshake()
            session._events.start()
            if not session._events.listening.wait(_LISTEN_S):
                raise BrokerUnavailable(f"{target.address} accepts calls but sends no events")
            if session._events.refused is not None:
                raise session._events.refused
        except BaseException:
            session._events.close()
            session.api.close()
            raise
        session._sender.start()
        if settings.log_to_driver:
            from firepool_ray._printer import Printer

            session.printer = Printer(session)
        return session

    def _handshake(self) -> None:
        self.version = self.api.json("GET", "/v1/version", patience_s=min(5.0, self.settings.patience_s))
        theirs = int(self.version.get("protocol", PROTOCOL))
        if theirs < PROTOCOL:
            raise BrokerUnavailable(
                f"the broker speaks protocol {theirs}, this SDK needs {PROTOCOL}: upgrade the broker, or install "
                f"firepool-ray {self.version.get('version')}"
            )

        try:
            listed = self.api.json("GET", "/v1/pools", patience_s=0)["pools"]
            self.pools = {pool["sku"]: pool for pool in listed}
        except (FirepoolError, KeyError, TypeError) as why:
            self.note(f"the pools are not shown to this client: {why}")

    def check_interpreter(self, sku: str, python: str, pickle_format: int) -> None:
        """Whether a by-value function can be read in the pool. Raises: SerializationMismatch, naming both sides."""
        pools = [p for p in self.version.get("interpreters", ()) if p.get("sku") == sku and p.get("version")]
        if not pools or any(p["version"] == python and int(p["pickle"]) >= pickle_format for p in pools):
            return
        theirs = ", ".join(f"{p['version']} (pickle {p['pickle']}, {p.get('python', '?')})" for p in pools)
        raise SerializationMismatch(
            f"this program runs Python {python} (pickle {pickle_format}), pool {sku!r} runs {theirs}: a function that "
            "travels by value needs the same Python minor version on both sides. Use the same version, or put the "
            "function into an importable module and submit it with ship='import'.",
            client={"python": python, "pickle": pickle_format},
            pools=[dict(p) for p in pools],
        )

    def sku(self, name: str | None) -> str | None:
        """The pool that a program's name means; None = the broker's default."""
        name = name or self.settings.sku
        return self.settings.sku_alias.get(name, name) if name is not None else None

    def is_untrusted(self, sku: str) -> bool:
        """Whether the broker marks the pool as one whose results must not be unpickled."""
        return bool(self.pools.get(sku, {}).get("untrusted"))

    def capacity(self, sku: str | None) -> int:
        """Pods that the pool can have, as far as is known."""
        pool = self.pools.get(self.sku(sku) or "cpu", {})
        shape = pool.get("shape") or {}
        each = shape.get("gpus") or max(1, round(shape.get("cpus") or 1))
        return max(1, int(pool.get("max_count") or 8) // int(each))

    def can(self, capability: str) -> bool:
        """Whether the broker lists a capability."""
        return capability in self.version.get("capabilities", ())

    # -- what callers do --

    def submit(self, order: Order, key: str | None = None) -> Call:
        """Take a job in; it is sent by and by. Raises: TooManyRequests, SessionClosed."""
        if self.closed:
            raise SessionClosed("this session is shut down; call firepool.init() again")
        if key is None:
            self._count += 1  # two threads may get the same number: the random part below tells them apart
            key = f"{self.client}-{self._count:x}-{os.urandom(4).hex()}"
        elif (known := self._by_key.get(key)) is not None:
            # The caller's own key, still in flight: the broker would say the same, but the same job twice is one call.
            if {**known.order.spec, "idempotency_key": None} != {**order.spec, "idempotency_key": None}:
                raise Conflict(f"the key {key!r} is in flight with another body", job_id=known.job_id)
            return known
        order.spec["idempotency_key"] = key
        lease = order.spec.get("client_lease_s")
        call = Call(self, key, order, leased=lease is not None)
        self._by_key[key] = call
        try:
            self._sender.put(call)
        except BaseException:
            self._by_key.pop(key, None)
            raise
        if lease is not None:
            self.shortest_lease_s = min(self.shortest_lease_s, lease)
            self._keeper.watch()
        return call

    def attach(self, job_id: str, order: Order, key: str | None = None) -> Call:
        """A face for a job that somebody else submitted (an unpickled reference)."""
        with self._lock:
            call = self._by_id.get(job_id)
            if call is None:
                call = Call(self, key or job_id, order, leased=False)
                call.accept(job_id)
                self._by_id[job_id] = call
        if not call.completion.done:
            # It may be over already: then no event will come.
            threading.Thread(target=self._look, args=(call,), name="firepool-look", daemon=True).start()
        return call

    def _look(self, call: Call) -> None:
        try:
            body = self.api.json("GET", path_of("jobs", call.job_id or ""))
        except FirepoolError as error:
            self.lose(call, error)
            return
        if JobState(body["state"]).value in ("SUCCEEDED", "FAILED", "CANCELLED"):
            self.finished(call, body, None)

    def cancel(self, call: Call) -> None:
        """Ask for the end of a job; returns at once."""
        if not call.completion.done:
            self._sender.cancel(call)

    def fetch_result(self, job_id: str) -> bytes:
        """The result frames of a job that is over. Waits for the network. Raises: FirepoolError."""
        return self.api.raw("GET", path_of("jobs", job_id, "result")).body

    # -- what the threads say --

    def find(self, job_id: str, key: str | None) -> Call | None:
        """The call of an event: by id, or by key while its acceptance is still on the way."""
        return self._by_id.get(job_id) or (self._by_key.get(key) if key else None)

    def accepted(self, call: Call, job_id: str, state: JobState) -> None:
        """The broker took it."""
        if not call.completion.done:
            self._by_id[job_id] = call
        call.accept(job_id)
        state = self._early.pop(job_id, state)
        if not call.completion.done and state is not call.state and call.state is not JobState.RUNNING:
            self.moved(call, state)
        if call.completion.done:
            # The event that it ended was faster than the answer that it was taken.
            self._by_id.pop(job_id, None)

    def unknown(self, job_id: str, state: JobState) -> None:
        """Keep what an event says of a job that may turn out to be ours."""
        self._early[job_id] = state
        if len(self._early) > _EARLY_AT_MOST:
            self._early.pop(next(iter(self._early)), None)

    def moved(self, call: Call, state: JobState) -> None:
        """Its state changed."""
        call.move(state)
        if self.printer is not None and state is JobState.RUNNING:
            self.printer.follow(call)

    def finished(self, call: Call, body: Mapping[str, Any], result: str | None) -> None:
        """It is terminal."""
        call.accept(body["id"])
        self._drop(call)
        call.finish(dict(body), result)
        if self.printer is not None:
            self.printer.follow(call)

    def lose(self, call: Call, error: FirepoolError) -> None:
        """Nothing will come of it."""
        self._drop(call)
        call.fail(error)

    def lose_all(self, error: FirepoolError) -> None:
        """Nothing will come of anything in flight."""
        for call in self._in_flight():
            self.lose(call, error)

    def _drop(self, call: Call) -> None:
        self._by_key.pop(call.key, None)
        if call.job_id is not None:
            self._by_id.pop(call.job_id, None)

    def _in_flight(self) -> list[Call]:
        while True:
            try:
                return list({*self._by_key.values(), *self._by_id.values()})
            except RuntimeError:
                continue  # another thread changed the dict meanwhile

    def leased(self) -> list[str]:
        """Ids of the jobs in flight whose lease is ours to renew."""
        return [call.job_id for call in self._in_flight() if call.leased and call.job_id is not None]

    def broker_is_gone(self) -> bool:
        """Whether the embedded broker ended by itself; then everything in flight is lost."""
        if self._child is None or self._child.lives():
            return False
        self.closed = True
        self.lose_all(BrokerUnavailable(f"the embedded broker ended by itself: {self._child.last_words()}"))
        return True

    def note(self, text: str) -> None:
        """Tell the program's log, once per text."""
        if text in self._noted:
            return
        self._noted.add(text)
        import logging  # 10 ms that most programs never need

        logging.getLogger("firepool").warning("%s", text)

    # -- the end --

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, end the jobs whose lease is ours, stop the threads, end an embedded broker."""
        if self.closed and self._child is None:
            return
        self.closed = True
        for call in [c for c in self._in_flight() if c.leased][:_CANCEL_AT_MOST]:
            self._sender.cancel(call)
        self._sender.close(timeout_s)
        self._keeper.close()
        self._events.close()
        self.api.close()
        if self.printer is not None:
            self.printer.close()
        if self._child is not None:
            self._child.stop()
            self._child = None
        self.lose_all(SessionClosed("the session was shut down before the job ended"))

    def abandon(self) -> None:
        """After a fork, in the child: let go of what belongs to the parent without touching it."""
        self.closed = True
        self._child = None
        self.api.forget()
