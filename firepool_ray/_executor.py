"""Firepool as `concurrent.futures`: futures of references, and an executor for libraries that want one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from firepool_ray._calls import Call
from firepool_ray._options import Options
from firepool_ray._remote import RemoteFunction
from firepool_wire.errors import FirepoolError

if TYPE_CHECKING:
    from typing import Unpack

    from firepool_ray._options import OptionsDict

P = ParamSpec("P")
R = TypeVar("R")


class JobFuture(futures.Future[Any]):
    """A future of a job; cancelling it cancels the job, also when that runs already."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        call.completion.subscribe(self._settle)

    def _settle(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        if self._call.is_here:
            self._fill()
        else:
            # A large result comes over the network, which must not hold up the thread that tells everybody.
            import threading

            threading.Thread(target=self._fill, name="firepool-fetch", daemon=True).start()

    def _fill(self) -> None:
        try:
            outcome = self._call.outcome(0)
        except FirepoolError as error:
            outcome = error
        if isinstance(outcome, FirepoolError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)

    def cancel(self) -> bool:
        """Cancel the job; False when it is over."""
        if not super().cancel():
            return False
        self._call.session.cancel(self._call)
        return True


class Executor(futures.Executor):
    """Every call a job of its own; `map` puts many calls into a job.

    Args:
        options: options of every job, as in `@remote`.
    """

    def __init__(self, **options: "Unpack[OptionsDict]") -> None:
        self._options = Options.of(options)
        self._handles: dict[Callable[..., Any], RemoteFunction[..., Any]] = {}
        self._futures: set[futures.Future[Any]] = set()
        self._down = False

    def _handle(self, fn: Callable[..., Any]) -> RemoteFunction[..., Any]:
        if isinstance(fn, RemoteFunction):
            return fn
        if fn not in self._handles:
            self._handles[fn] = RemoteFunction(fn, self._options)
        return self._handles[fn]

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "futures.Future[R]":
        """Submit a call. Raises: RuntimeError: the executor is shut down."""
        if self._down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = self._handle(fn).remote(*args, **kwargs).future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **more: Any,
    ) -> Iterator[R]:
        """Results of `fn` over the iterables, in order. `chunksize=1` (the default of the interface) means as fits."""
        if self._down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if timeout is not None:
            return super().map(fn, *iterables, timeout=timeout)
        results = self._handle(fn).starmap(zip(*iterables, strict=False), chunk="auto" if chunksize == 1 else chunksize)
        return iter(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those in flight, or cancel them."""
        self._down = True
        left = list(self._futures)
        if cancel_futures:
            for future in left:
                future.cancel()
        elif wait:
            futures.wait(left)
