"""What every `@remote` handle does: turn a call into an order for the session, in the caller's thread and without the network.

`_remote` has the two kinds of handles and the decorator.
"""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

from firepool_ray import _front, _pickling
from firepool_ray._calls import Call, Order, Reading
from firepool_ray._context import current_run
from firepool_ray._options import Options
from firepool_ray._payload import Shipped, Shipper
from firepool_ray._refs import JobRef, PutRef
from firepool_ray._session import Session
from firepool_ray._source import Blob
from firepool_wire import codec

P = ParamSpec("P")
R = TypeVar("R")

#: `jobspec.INLINE_ARGS_BYTES`, of a module that is loaded with the first job only; a test compares them.
INLINE_ARGS_BYTES = 64 * 1024

CallArgs = tuple[tuple[Any, ...], dict[str, Any]]


class Handle(Generic[P, R]):
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
    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, as keywords."""
        return self._options.given()

    @property
    def own_module(self) -> ModuleType | None:
        """The function's module where what it defines travels by value."""
        return self._shipper.own_module

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
        from firepool_ray import _remote

        return _remote.reduce(self)

    def submit_calls(self, calls: Sequence[CallArgs], kind: str, *, key: str | None = None) -> Call:
        """Submit one job that makes these calls. Raises: TypeError, TooManyRequests, SerializationMismatch, …"""
        session = _front.current()
        shipper = self._shipper if kind == self._kind else self._for_map()
        shipped = shipper.ship()
        depends: list[Call] = []
        data, modules = self._pack(calls, depends, shipped)
        blobs = list(shipped.blobs)
        entry = dict(shipped.entry)
        if len(data) <= INLINE_ARGS_BYTES:
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
