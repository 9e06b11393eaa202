"""Functions and arguments as pickles for the job: the user's own modules by value, everything installed by reference.

cloudpickle is imported here on first use. What this adds to it: `@remote` handles inside functions, stable bytes for
modules that loaders make up, and a report of what could not be pickled.
"""

import io
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from firepool_ray import _source

PICKLE = 5
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: What a `@remote` handle becomes inside a pickle for the job; set by `_remote`, which knows handles.
reduce_handle: Callable[[object], tuple[Any, ...] | None] = lambda value: None  # noqa: E731

#: cloudpickle's register of modules to send by value is global to the process.
_registering = threading.Lock()


class _NotPlain(Exception):
    pass


class _PlainPickler(pickle.Pickler):
    """The C pickler, as long as it meets nothing but built-in types."""

    def reducer_override(self, obj: object) -> Any:
        raise _NotPlain


def dumps_args(value: object, by_value: ModuleType | None) -> tuple[bytes, set[str]]:
    """Arguments as a pickle, and the modules that reading it imports; what `by_value` defines travels inside."""
    out = io.BytesIO()
    try:
        _PlainPickler(out, PICKLE).dump(value)
    except _NotPlain:
        return dumps(value, by_value)
    return out.getvalue(), set()


def dumps(value: object, by_value: ModuleType | None) -> tuple[bytes, set[str]]:
    """Any value as a pickle for the job, and the modules that reading it (and running its functions) imports.

    Raises: whatever pickling the user's objects raises.
    """
    out = io.BytesIO()
    pickler = _pickler()(out, PICKLE)
    with _sending(by_value):
        pickler.dump(value)
    return out.getvalue(), pickler.needs - {"__main__"}


@contextmanager
def _sending(module: ModuleType | None) -> Iterator[None]:
    import cloudpickle

    if module is None or sys.modules.get(module.__name__) is not module or module.__name__ == "__main__":
        yield
        return
    with _registering:
        ours = module.__name__ not in cloudpickle.list_registry_pickle_by_value()
        if ours:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if ours:
                cloudpickle.unregister_pickle_by_value(module)


@cache
def _pickler() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle's, with our two additions."""

        def __init__(self, out: io.BytesIO, protocol: int) -> None:
            super().__init__(out, protocol=protocol)
            #: Globals of made-up modules → the same under a stable name; functions → their twins there.
            self._stable: dict[int, dict[str, Any]] = {}
            self._twins: dict[int, FunctionType] = {}
            #: Modules that the reader imports.
            self.needs: set[str] = set()

        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce_handle(obj)
            if reduced is not None:
                return reduced
            if isinstance(obj, ModuleType):
                self.needs.add(obj.__name__)
            elif isinstance(obj, FunctionType) and is_made_up(obj):
                obj = self._twin(obj)
            reduced = super().reducer_override(obj)
            if isinstance(obj, FunctionType | type):
                if reduced is NotImplemented:
                    self.needs.add(obj.__module__)
                elif isinstance(obj, FunctionType):
                    package = obj.__globals__.get("__package__") or ""
                    self.needs |= _source.imported_names(obj.__code__, package)
            return reduced

        def _twin(self, function: FunctionType) -> FunctionType:
            twin = self._twins.get(id(function))
            if twin is None:
                names = function.__globals__
                stable = self._stable.get(id(names))
                if stable is None:
                    stable = self._stable[id(names)] = {**names, "__name__": stable_name(function)}
                twin = FunctionType(
                    function.__code__, stable, function.__name__, function.__defaults__, function.__closure__
                )
                twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
                twin.__dict__.update(function.__dict__)
                twin.__doc__, twin.__annotations__ = function.__doc__, function.__annotations__
                twin.__module__ = stable["__name__"]
                self._twins[id(function)] = twin
            return twin

    return Pickler


def is_made_up(function: FunctionType) -> bool:
    """Whether a function's module is one that a loader made up: not what an import of its name would find.

    verl loads a reward file under a name that differs in every process: pickled by reference it is not found, and by value
    its bytes would differ in every process.
    """
    name = function.__module__
    if name is None or name == "__main__" or not Path(function.__code__.co_filename).is_file():
        return False
    module = sys.modules.get(name)
    if module is not None and vars(module) is not function.__globals__:
        # Defined elsewhere and renamed (functools.wraps): the module it claims is not the point.
        return False
    return not _source.is_importable(name) and not _source.is_installed(function.__code__.co_filename)


def stable_name(function: FunctionType) -> str:
    """One name for a source file, whatever the loader called its module."""
    return _stable_name(function.__code__.co_filename)


@cache
def _stable_name(file: str) -> str:
    import hashlib

    path = Path(file)
    return f"firepool_by_value_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def snapshot(function: FunctionType, by_value: ModuleType | None) -> list[object] | None:
    """Everything that a by-value function is made of, if none of it can change in place; else None.

    Two snapshots whose members are the very same objects mean equal pickles, so the function need not be pickled again.
    """
    held: list[object] = []
    seen: set[int] = set()
    return held if _hold(function, by_value, held, seen) else None


def _hold(function: FunctionType, by_value: ModuleType | None, held: list[object], seen: set[int]) -> bool:
    if id(function) in seen:
        return True
    seen.add(id(function))
    held += [function.__code__, function.__defaults__, function.__kwdefaults__]
    if function.__kwdefaults__ or function.__dict__:
        return False
    values: list[object] = list(function.__defaults__ or ())
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return False  # a cell that is filled later
    values += [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
    for value in values:
        held.append(value)
        if isinstance(value, FunctionType):
            if not _source.is_installed(value.__code__.co_filename) and not _hold(value, by_value, held, seen):
                return False
        elif not _fixed(value):
            return False
    return True


@cache
def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


_FIXED = (type(None), bool, int, float, complex, str, bytes, type(...), ModuleType, type(len), re.Pattern)


def _fixed(value: object) -> bool:
    """Whether a value stays what it is. A class of the user's own does not: its attributes travel with it."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_fixed, value))
    if isinstance(value, type):
        return _source.is_installed(getattr(sys.modules.get(value.__module__), "__file__", None))
    return type(value) in _FIXED


def culprits(function: FunctionType, by_value: ModuleType | None) -> list[str]:
    """Names of what a function refers to that cannot be pickled, with the reason."""
    named = {n: function.__globals__[n] for n in sorted(_names(function.__code__)) if n in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            named[name] = cell.cell_contents
        except ValueError:
            continue
    return [f"{name}: {why}" for name, value in named.items() if (why := _why_not(value, by_value))]


def _why_not(value: object, by_value: ModuleType | None) -> str | None:
    try:
        dumps(value, by_value)
    except Exception as why:  # noqa: BLE001 - the user's `__reduce__` may raise anything
        return f"{type(why).__name__}: {why}"
    return None
