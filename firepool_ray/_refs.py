"""References to results and what one does with them: `get`, `wait`, `put`, `cancel`, `as_completed`. Ray's semantics."""

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from firepool_ray import _front
from firepool_ray._calls import Call, Order, Reading
from firepool_ray._completion import Completion, wait_for
from firepool_ray._errors import GetTimeoutError, SessionClosed
from firepool_wire.errors import FirepoolError
from firepool_wire.words import JobState

if TYPE_CHECKING:
    from concurrent.futures import Future

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

#: How long pickling a reference waits until the broker gave its job an id.
_ACCEPT_S = 60.0


class JobRef(Generic[R_co]):
    """A result that is on its way. Hashable, awaitable, picklable; the job runs on when the reference is dropped."""

    __slots__ = ("__weakref__", "_held")

    def __init__(self, call: Call) -> None:
        self._held = call

    @property
    def _call(self) -> Call:
        """The call in this process's session: a forked child asks the broker itself."""
        call = self._held
        if call.session.pid != os.getpid() and not call.completion.done:
            if call.job_id is None:
                raise SessionClosed("the job was not accepted yet when the process forked; submit it in the child")
            self._held = call = _front.current().attach(call.job_id, call.order, call.key)
        return call

    @property
    def key(self) -> str:
        """The idempotency key, known at once."""
        return self._held.key

    @property
    def job_id(self) -> str | None:
        """The broker's id, once it took the job."""
        return self._held.job_id

    @property
    def state(self) -> JobState | None:
        """The last state that was heard of; None until then."""
        return self._call.state

    def done(self) -> bool:
        """Whether the job is over."""
        return self._call.completion.done

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the value. Raises: GetTimeoutError; the job's own error."""
        outcome = self._outcome(timeout)
        if isinstance(outcome, FirepoolError):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> FirepoolError | None:
        """Wait for the end; the error, or None. Raises: GetTimeoutError."""
        outcome = self._outcome(timeout)
        return outcome if isinstance(outcome, FirepoolError) else None

    def _outcome(self, timeout: float | None) -> Any:
        call = self._call
        if not call.completion.done:
            _block([call], 1, timeout)
            if not call.completion.done:
                raise GetTimeoutError(_late(call, timeout), job_id=call.job_id)
        return call.outcome(0)

    def cancel(self, *, wait: bool = False) -> None:
        """Ask for the job's end; `wait` until its process tree is verified gone. Over already: nothing."""
        call = self._call
        call.session.cancel(call)
        if wait:
            _block([call], 1, None)

    def future(self) -> "Future[R_co]":
        """A `concurrent.futures.Future` of the result; cancelling it cancels the job."""
        from firepool_ray._executor import JobFuture

        return JobFuture(self._call)

    def __await__(self) -> Generator[Any, None, R_co]:
        return _awaited(self._call).__await__()

    def hex(self) -> str:
        """The key; known at once, unlike the job's id."""
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobRef) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        call = self._held
        state = call.state.value if call.state is not None else "submitted"
        return f"<JobRef {call.order.name} {call.job_id or call.key}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        call = self._call
        if call.job_id is None and not call.accepted.wait(_ACCEPT_S):
            raise SessionClosed(f"{call.order.name} has no id yet: the broker did not take it within {_ACCEPT_S:g} s")
        if call.job_id is None:
            raise call.error or SessionClosed(f"{call.order.name} never reached the broker")
        return _rebuild, (call.job_id, call.key, call.order.name, call.order.reading.loads is not None)


def _rebuild(job_id: str, key: str, name: str, trusted: bool) -> "JobRef[Any]":
    return ref_of(job_id, key=key, name=name, trusted=trusted)


def ref_of(job_id: str, *, key: str | None = None, name: str = "job", trusted: bool = True) -> "JobRef[Any]":
    """A reference to a job that somebody else submitted."""
    from firepool_ray._handle import reading

    order = Order(spec={}, reading=reading(trusted=trusted), name=name)
    return JobRef(_front.current().attach(job_id, order, key))


async def _awaited(call: Call) -> Any:
    import asyncio

    if not call.completion.done:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def ring() -> None:
            # A loop that was closed meanwhile has nobody left who waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        call.completion.subscribe(ring)
        try:
            await woken
        finally:
            call.completion.forget(ring)
    outcome = call.outcome(0) if call.is_here else await asyncio.to_thread(call.outcome, 0)
    if isinstance(outcome, FirepoolError):
        raise outcome
    return outcome


def _late(call: Call, timeout: float | None) -> str:
    state = call.state.value if call.state is not None else "not yet taken by the broker"
    return f"{call.order.name} was not over after {timeout:g} s ({state}); it goes on, the wait can be repeated"


def _block(calls: Sequence[Call], enough: int, timeout: float | None) -> None:
    """Wait in this thread; Ctrl-C asks for the end of what is waited for, then goes on its way."""
    _front.warn_if_in_loop("waiting for a job", "use `await ref`, or `await asyncio.to_thread(…)`")
    try:
        wait_for([call.completion for call in calls], enough, timeout)
    except KeyboardInterrupt:
        for call in calls:
            if call.leased:
                call.session.cancel(call)
        raise


class PutRef(Generic[R_co]):
    """A value put aside once, to be passed to many calls; as an argument it becomes the value."""

    __slots__ = ("pickled",)

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def result(self, timeout: float | None = None) -> R_co:
        """A copy of the value."""
        import pickle

        value: R_co = pickle.loads(self.pickled)
        return value

    def __repr__(self) -> str:
        return f"<PutRef of {len(self.pickled)} bytes>"


def put(value: R) -> PutRef[R]:
    """Put a value aside as it is now. Raises: TypeError: it cannot be pickled, or is a reference already."""
    from firepool_ray import _pickling

    if isinstance(value, JobRef | PutRef):
        raise TypeError("put() of a reference; wrap it in a list if that is what you mean")
    return PutRef(_pickling.dumps_args(value, None)[0])


@overload
def get(refs: "JobRef[R] | PutRef[R]", *, timeout: float | None = None) -> R: ...
@overload
def get(refs: "list[JobRef[R]] | list[JobRef[R] | PutRef[R]]", *, timeout: float | None = None) -> list[R]: ...
def get(refs: Any, *, timeout: float | None = None) -> Any:
    """The value of a reference, or of a list of them in its order.

    Of a list the first failure that is found is raised, without waiting for the rest. The jobs go on when the time is over.

    Raises:
        GetTimeoutError: not all were there in time (0: what is ready now).
        ValueError: not a reference or a list of them.
        FirepoolError: a job's own error; `TaskError` is of the user's class as well.
    """
    if isinstance(refs, JobRef | PutRef):
        return refs.result(timeout)
    if not isinstance(refs, list) or not all(isinstance(r, JobRef | PutRef) for r in refs):
        raise ValueError(f"get() takes a reference or a list of references, not {_kind(refs)}")
    calls = [r._call for r in refs if isinstance(r, JobRef)]
    _await_all(calls, timeout)
    return [r.result(0) for r in refs]


def _await_all(calls: Sequence[Call], timeout: float | None) -> None:
    """Return when all are done; raise the first failure in their order as soon as one is there."""
    first = Completion()
    lock, left = threading.Lock(), [len(calls)]

    def seen(call: Call) -> None:
        with lock:
            left[0] -= 1
            last = left[0] <= 0
        if last or call.error is not None:
            first.complete()

    waiting = [call for call in calls if not call.completion.done]
    left[0] = len(waiting)
    failed = any(call.error is not None for call in calls)
    rings = [(call, lambda call=call: seen(call)) for call in waiting]
    for call, ring in rings:
        call.completion.subscribe(ring)
    if waiting and not failed:
        _front.warn_if_in_loop("waiting for jobs", "use `await asyncio.gather(*refs)`")
        try:
            first.wait(timeout)
        except KeyboardInterrupt:
            for call in waiting:
                if call.leased:
                    call.session.cancel(call)
            raise
        finally:
            for call, ring in rings:
                call.completion.forget(ring)
    for call in calls:
        if call.completion.done and call.error is not None:
            outcome = call.outcome(0)
            raise outcome if isinstance(outcome, FirepoolError) else call.error
    missing = [call for call in calls if not call.completion.done]
    if missing:
        raise GetTimeoutError(f"{len(missing)} of {len(calls)} jobs, {_late(missing[0], timeout)}")


def wait(
    refs: "list[JobRef[R]]", *, num_returns: int = 1, timeout: float | None = None
) -> "tuple[list[JobRef[R]], list[JobRef[R]]]":
    """Wait until `num_returns` of the jobs are over, or the time is. A job that failed counts as over.

    Returns:
        The references that are over, at most `num_returns`, and the others; both in their order.

    Raises:
        TypeError: not a list of references.
        ValueError: a reference twice, or a number that cannot be reached.
    """
    if not isinstance(refs, list) or not all(isinstance(r, JobRef) for r in refs):
        raise TypeError(f"wait() takes a list of references, not {_kind(refs)}")
    if not refs:
        return [], []
    if len(set(refs)) != len(refs):
        raise ValueError("wait() was given a reference twice")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(f"num_returns={num_returns} of {len(refs)} references")
    calls = [r._call for r in refs]
    if sum(call.completion.done for call in calls) < num_returns and timeout != 0:
        _block(calls, num_returns, timeout)
    ready = [r for r, call in zip(refs, calls, strict=True) if call.completion.done][:num_returns]
    chosen = set(ready)
    return ready, [r for r in refs if r not in chosen]


def as_completed(refs: "Sequence[JobRef[R]]", *, timeout: float | None = None) -> "Iterator[JobRef[R]]":
    """References in the order in which their jobs end. Raises: GetTimeoutError: not all within `timeout`."""
    over: SimpleQueue[JobRef[R]] = SimpleQueue()
    for ref in refs:
        ref._call.completion.subscribe(lambda ref=ref: over.put(ref))  # type: ignore[misc]
    deadline = None if timeout is None else monotonic() + timeout
    for n in range(len(refs)):
        if over.empty():
            _front.warn_if_in_loop("as_completed", "use `asyncio.as_completed(refs)`")
        try:
            yield over.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except Empty:
            raise GetTimeoutError(f"{len(refs) - n} of {len(refs)} jobs were not over after {timeout} s") from None


def cancel(ref: "JobRef[Any]", *, wait: bool = False) -> None:
    """Ask for the end of a job; see `JobRef.cancel`."""
    if not isinstance(ref, JobRef):
        raise TypeError(f"cancel() takes a reference, not {_kind(ref)}")
    ref.cancel(wait=wait)


def _kind(value: object) -> str:
    if isinstance(value, list):
        odd = next((v for v in value if not isinstance(v, JobRef | PutRef)), None)
        return f"a list with a {type(odd).__name__} in it"
    return f"a {type(value).__name__}"


__all__ = ["JobRef", "PutRef", "Reading", "as_completed", "cancel", "get", "put", "ref_of", "wait"]
