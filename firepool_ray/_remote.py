"""`@remote`: a function as a handle whose `.remote()` submits a job and returns at once.

The handle is not callable (as in Ray), keeps the function's name, docs and signature, and pickles by import path where it
has one, else by value.
"""

# Evaluating the signatures below costs 15 ms at import.
from __future__ import annotations

import base64
import functools
import importlib
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from firepool_ray import _front, _pickling
from firepool_ray._calls import Call, Order, Reading
from firepool_ray._context import current_run
from firepool_ray._options import Options
from firepool_ray._payload import Shipped, Shipper
from firepool_ray._refs import JobRef, PutRef
from firepool_ray._session import Session
from firepool_ray._source import Blob
from firepool_wire import codec

if TYPE_CHECKING:
    from typing import Unpack

    from firepool_ray._map import MapResults
    from firepool_ray._options import OptionsDict
    from firepool_ray._stream import JobStream

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: `jobspec.INLINE_ARGS_BYTES`, of a module that is loaded with the first job only; a test compares them.
_INLINE_ARGS_BYTES = 64 * 1024

OnInfra = Literal["retry", "none", "raise"]
CallArgs = tuple[tuple[Any, ...], dict[str, Any]]


class _Handle(Generic[P, R]):
    """What functions and generator functions share."""

    _kind = "call"

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._signature = inspect.signature(function)
        self._shipper = Shipper(_plain(function), options, self._kind)
        self._spec: tuple[object, dict[str, Any]] | None = None
        self._map_shipper: Shipper | None = None
        #: Seconds that one item of a map takes, as seen so far.
        self.item_s: float | None = None
        functools.update_wrapper(self, function)

    @property
    def sku(self) -> str | None:
        """The pool that the options name."""
        return self._options.sku

    @property
    def __firepool_function__(self) -> Callable[..., Any]:
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._function.__name__
        raise TypeError(f"{name} runs in a pod: call {name}.remote(…), or {name}.local(…) for a call right here")

    def __repr__(self) -> str:
        return f"<remote {self._function.__module__}.{self._function.__qualname__}>"

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        # A handle defined in a class body stays a handle: there is no self on the other side.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        path = _import_path(self)
        if path is not None:
            return _by_path, (path, self._options.given())
        pickled, _ = _pickling.dumps(self._function, self._shipper.own_module)
        return _by_value, (pickled, self._options.given())

    def submit_calls(self, calls: Sequence[CallArgs], kind: str, *, key: str | None = None) -> Call:
        """Submit one job that makes these calls. Raises: TypeError, TooManyRequests, SerializationMismatch, …"""
        session = _front.current()
        shipper = self._shipper if kind == self._kind else self._for_map()
        shipped = shipper.ship()
        depends: list[Call] = []
        data, modules = self._pack(calls, depends, shipped)
        blobs = list(shipped.blobs)
        entry = dict(shipped.entry)
        if len(data) <= _INLINE_ARGS_BYTES:
            entry["args"] = base64.b64encode(data).decode()
        else:
            blobs.append(Blob.of(data))
            entry["args_blob"] = blobs[-1].digest
        if len(calls) != 1:
            entry["items"] = len(calls)
        spec = dict(self._base_spec(session, shipped))
        package = shipper.package(modules.items())
        if package is not None:
            spec["package"] = package if isinstance(package, str) else package.digest
            blobs += [] if isinstance(package, str) else [package]
        spec["entrypoint"] = {"function": entry}
        trusted = not spec.get("untrusted") and not session.is_untrusted(spec.get("sku", "cpu"))
        order = Order(
            spec=spec,
            reading=reading(trusted=trusted),
            name=entry["name"],
            file=shipper.function.__code__.co_filename,
            blobs=tuple(blobs),
            depends=tuple(depends),
            items=len(calls),
        )
        return session.submit(order, key or self._options.idempotency_key)

    def _for_map(self) -> Shipper:
        if self._map_shipper is None:
            self._map_shipper = Shipper(_plain(self._function), self._options, "map")
        return self._map_shipper

    def _pack(self, calls: Sequence[CallArgs], depends: list[Call], shipped: Shipped) -> tuple[bytes, dict[str, Any]]:
        modules = shipped.modules
        own = self._shipper.own_module if shipped.by_value else None
        extra: dict[str, Any] = {}

        def dumps(value: object) -> bytes:
            pickled, needs = _pickling.dumps_args(value, own)
            if needs:
                extra.update(self._shipper.modules_of(needs))
            return pickled

        def place(value: object) -> int | None:
            if not isinstance(value, JobRef):
                return None
            depends.append(value._call)
            return len(depends) - 1

        try:
            data = codec.pack_args([(_values(args), kwargs and _named(kwargs)) for args, kwargs in calls], dumps, place)
        except Exception as why:
            raise TypeError(f"an argument of {self._function.__name__} cannot be pickled: {why}{_odd(calls)}") from why
        return data, {**modules, **extra} if extra else modules

    def _base_spec(self, session: Session, shipped: Shipped) -> dict[str, Any]:
        run = current_run()
        made_for = (session, run, shipped.by_value)
        if self._spec is None or self._spec[0] != made_for:
            sku = session.sku(self._options.sku)
            if shipped.by_value:
                session.check_interpreter(sku or "cpu", _pickling.PYTHON, _pickling.PICKLE)
            lease = session.settings.client_lease_s
            spec = self._options.spec(None, sku=sku, lease_s=lease, run=run)
            self._spec = (made_for, spec)
        return self._spec[1]

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs:
        # Wrong arguments are the caller's mistake and belong into his own traceback.
        self._signature.bind(*args, **kwargs)
        return args, kwargs


class RemoteFunction(_Handle[P, R]):
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


class RemoteGenerator(_Handle[P, T]):
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


def _plain(function: Callable[..., Any]) -> FunctionType:
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"@remote takes a function, not a {type(function).__name__}; classes come with actors, later"
            if isinstance(function, type)
            else f"@remote takes a function, not a {type(function).__name__}; wrap it in one"
        )
    return function


def _values(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.result() if isinstance(a, PutRef) else a for a in args)


def _named(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.result() if isinstance(v, PutRef) else v for k, v in kwargs.items()}


def _odd(calls: Sequence[CallArgs]) -> str:
    """Which argument it was, for the message."""
    for args, kwargs in calls:
        for name, value in [*enumerate(args), *kwargs.items()]:
            try:
                _pickling.dumps_args(None if isinstance(value, JobRef) else value, None)
            except Exception:  # noqa: BLE001 - the user's `__reduce__` may raise anything
                return f" (argument {name!r}, a {type(value).__qualname__})"
    return ""


@functools.cache
def reading(*, trusted: bool) -> Reading:
    """How results are read: of untrusted jobs nothing is unpickled and nothing imported."""
    return Reading(loads=pickle.loads, classes=_import_class) if trusted else Reading(loads=None)


def _import_class(name: str) -> type | None:
    found = codec.imported_class(name)
    if found is None:
        try:
            importlib.import_module(name.partition(":")[0])
        except Exception:  # noqa: BLE001 - a module that cannot be imported here leaves a record, not an error
            return None
        found = codec.imported_class(name)
    return found


def _import_path(handle: _Handle[..., Any]) -> tuple[str, str] | None:
    """Where an import finds a handle for the same function, or None."""
    function = handle.__firepool_function__
    module, qualname = function.__module__, function.__qualname__
    try:
        found = _look_up(module, qualname)
    except (KeyError, AttributeError):
        return None
    inner = getattr(found, "__firepool_function__", found)
    from firepool_ray import _source

    return (module, qualname) if inner is function and _source.is_importable(module) else None


def _look_up(module: str, qualname: str) -> Any:
    import sys

    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _by_path(path: tuple[str, str], options: dict[str, Any]) -> _Handle[..., Any]:
    importlib.import_module(path[0])
    found = _look_up(*path)
    return make(getattr(found, "__firepool_function__", found), Options.of(options))


def _by_value(pickled: bytes, options: dict[str, Any]) -> _Handle[..., Any]:
    return make(pickle.loads(pickled), Options.of(options))


def make(function: Callable[..., Any], options: Options) -> RemoteFunction[..., Any] | RemoteGenerator[..., Any]:
    """The handle of a function."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return RemoteGenerator(function, options)
    return RemoteFunction(function, options)


def _make(function: Callable[..., Any], options: dict[str, Any]) -> _Handle[..., Any]:
    return make(function, Options.of(options))


def _reduce_handle(value: object) -> tuple[Any, ...] | None:
    """A handle inside a pickle for the job: its function takes part in the pickle, so that recursion is no loop."""
    if not isinstance(value, _Handle):
        return None
    return _make, (value.__firepool_function__, value._options.given())


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
