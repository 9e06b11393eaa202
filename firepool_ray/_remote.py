"""`@remote`: a function as a handle whose `.remote()` submits a job and returns at once.

The handle is not callable (as in Ray), keeps the function's name, docs and signature, and pickles by import path where it
has one, else by value.
"""

# Evaluating the signatures below costs 15 ms at import.
from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from firepool_ray import _pickling, _source
from firepool_ray._handle import Handle
from firepool_ray._options import Options
from firepool_ray._refs import JobRef

if TYPE_CHECKING:
    from typing import Unpack

    from firepool_ray._map import MapResults
    from firepool_ray._options import OptionsDict
    from firepool_ray._stream import JobStream

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

OnInfra = Literal["retry", "none", "raise"]


class RemoteFunction(Handle[P, R]):
    """A function that runs in a pod."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        """Submit a call. Returns at once; nothing here waits for the network.

        Top-level arguments that are references become their values before the call starts.

        Raises:
            TypeError: wrong arguments, or something that cannot be pickled.
            TooManyRequests: too many calls wait to be sent (see `init(max_unsent=…, when_full=…)`).
            SerializationMismatch: the pool's Python cannot read a function by value; both sides are named.
        """
        return JobRef(self.submit_calls([self._bound(args, kwargs)], "call"))

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function right here, in this process."""
        result: R = self._function(*args, **kwargs)
        return result

    @functools.cached_property
    def aio(self) -> Callable[P, Coroutine[Any, Any, R]]:
        """The call as a real `async def` with the function's own name, docs and signature.

        Cancelling the awaiting task cancels the job.
        """
        return _async_twin(self)

    def options(self, **changed: Unpack[OptionsDict]) -> RemoteFunction[P, R]:
        """A handle with other options; this one stays as it is. Raises: ValueError: no such option."""
        return RemoteFunction(self._function, Options.of(changed, self._options))

    def map(
        self,
        xs: Iterable[Any],
        *,
        order: bool = True,
        return_exceptions: bool = False,
        concurrency: int | None = None,
        chunk: int | Literal["auto"] = "auto",
        on_infra: OnInfra = "retry",
    ) -> MapResults[R]:
        """Call the function with each of `xs`, many calls to a job, each call in a process of its own.

        Args:
            xs: one argument a call.
            order: results in the order of `xs`, else as they come.
            return_exceptions: a failed call gives its exception as its result; else the first one is raised.
            concurrency: jobs in flight at most; None = as many as the pool can use.
            chunk: calls a job; "auto" follows how long calls take.
            on_infra: a call that failed by no fault of its own: "retry" it once more, give "none", or "raise".

        Returns:
            An iterator over the results (also an async one); jobs are submitted at once.
        """
        return self.starmap(
            ((x,) for x in xs),
            order=order,
            return_exceptions=return_exceptions,
            concurrency=concurrency,
            chunk=chunk,
            on_infra=on_infra,
        )

    def starmap(
        self,
        xs: Iterable[Iterable[Any]],
        *,
        order: bool = True,
        return_exceptions: bool = False,
        concurrency: int | None = None,
        chunk: int | Literal["auto"] = "auto",
        on_infra: OnInfra = "retry",
    ) -> MapResults[R]:
        """`map` over tuples of arguments."""
        from firepool_ray._map import MapResults, Plan

        plan = Plan(
            order=order,
            return_exceptions=return_exceptions,
            concurrency=concurrency,
            chunk=chunk,
            on_infra=on_infra,
        )
        return MapResults(self, [self._bound(tuple(x), {}) for x in xs], plan)


class RemoteGenerator(Handle[P, T]):
    """A generator function that runs in a pod; its values are streamed."""

    _kind = "generator"

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> JobStream[T]:
        """Submit a call; iterate over what it yields, as it comes. Returns at once. Raises: as `RemoteFunction.remote`."""
        from firepool_ray._stream import JobStream

        return JobStream(self.submit_calls([self._bound(args, kwargs)], "generator"))

    remote_gen = remote

    def local(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        """Call the function right here, in this process."""
        values: Iterator[T] = self._function(*args, **kwargs)
        return values

    @functools.cached_property
    def aio(self) -> Callable[P, AsyncIterator[T]]:
        """The call as a real async generator function with the function's own name, docs and signature."""
        return _async_generator_twin(self)

    def options(self, **changed: Unpack[OptionsDict]) -> RemoteGenerator[P, T]:
        """A handle with other options; this one stays as it is. Raises: ValueError: no such option."""
        return RemoteGenerator(self._function, Options.of(changed, self._options))


def _async_twin(handle: RemoteFunction[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    function = handle.__firepool_function__

    @functools.wraps(function)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        import asyncio

        ref = handle.remote(*args, **kwargs)
        try:
            return await ref
        except asyncio.CancelledError:
            ref.cancel()
            raise

    _own_up(twin, function)
    return twin


def _async_generator_twin(handle: RemoteGenerator[P, T]) -> Callable[P, AsyncIterator[T]]:
    function = handle.__firepool_function__

    @functools.wraps(function)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        stream = handle.remote(*args, **kwargs)
        try:
            async for value in stream:
                yield value
        finally:
            stream.cancel()

    _own_up(twin, function)
    return twin


def _own_up(twin: Any, function: Callable[..., Any]) -> None:
    """Make the twin findable by plain pickle (`module:function.aio`) and its signature visible where nobody follows wraps."""
    twin.__qualname__ = f"{function.__qualname__}.aio"
    twin.__signature__ = inspect.signature(function)


def reduce(handle: Handle[..., Any]) -> tuple[Any, ...]:
    """A handle for any pickler: by import path where an import finds it, else by value."""
    path = _import_path(handle)
    if path is not None:
        return _by_path, (path, handle.given)
    pickled, _ = _pickling.dumps(handle.__firepool_function__, handle.own_module)
    return _by_value, (pickled, handle.given)


def _import_path(handle: Handle[..., Any]) -> tuple[str, str] | None:
    """Where an import finds a handle for the same function, or None."""
    function = handle.__firepool_function__
    module, qualname = function.__module__, function.__qualname__
    try:
        found = _look_up(module, qualname)
    except (KeyError, AttributeError):
        return None
    inner = getattr(found, "__firepool_function__", found)
    return (module, qualname) if inner is function and _source.is_importable(module) else None


def _look_up(module: str, qualname: str) -> Any:
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _by_path(path: tuple[str, str], options: dict[str, Any]) -> Handle[..., Any]:
    importlib.import_module(path[0])
    found = _look_up(*path)
    return make(getattr(found, "__firepool_function__", found), Options.of(options))


def _by_value(pickled: bytes, options: dict[str, Any]) -> Handle[..., Any]:
    return make(pickle.loads(pickled), Options.of(options))


def make(function: Callable[..., Any], options: Options) -> RemoteFunction[..., Any] | RemoteGenerator[..., Any]:
    """The handle of a function."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return RemoteGenerator(function, options)
    return RemoteFunction(function, options)


def _make(function: Callable[..., Any], options: dict[str, Any]) -> Handle[..., Any]:
    return make(function, Options.of(options))


def _reduce_handle(value: object) -> tuple[Any, ...] | None:
    """A handle inside a pickle for the job: its function takes part in the pickle, so that recursion is no loop."""
    if not isinstance(value, Handle):
        return None
    return _make, (value.__firepool_function__, value.given)


_pickling.reduce_handle = _reduce_handle


class Decorator:
    """`@remote(…)` with options, waiting for its function."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @overload
    def __call__(self, function: Callable[P, Iterator[T]]) -> RemoteGenerator[P, T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, AsyncIterator[T]]) -> RemoteGenerator[P, T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> RemoteFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> RemoteFunction[P, R]: ...
    def __call__(self, function: Callable[..., Any]) -> Any:
        """The handle."""
        return make(function, self._options)


@overload
def remote(function: Callable[P, Iterator[T]], /) -> RemoteGenerator[P, T]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, AsyncIterator[T]], /) -> RemoteGenerator[P, T]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, Coroutine[Any, Any, R]], /) -> RemoteFunction[P, R]: ...
@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...
@overload
def remote(**options: Unpack[OptionsDict]) -> Decorator: ...
def remote(function: Any = None, /, **options: Any) -> Any:
    """Make a function run in a pod: `@remote`, or `@remote(sku="h200", run_timeout_s=60)`.

    Raises:
        ValueError: no such option, or an impossible value.
        TypeError: not a function.
    """
    chosen = Options.of(options)
    return Decorator(chosen) if function is None else make(function, chosen)
