"""How a function travels, decided once and looked at again only when something it is made of may have changed.

By import path where it is installed; by value where that is small and closed (its module's top level then does not run in
the job); by import path with its package where it is large, cannot be pickled or is imported back by what it uses.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from firepool_ray import _pickling, _source
from firepool_ray._options import Options
from firepool_ray._source import Blob
from firepool_wire.errors import PackageError

#: A by-value function larger than this goes by import path where it can: it probably caught a model.
MAX_VALUE_BYTES = 1024 * 1024
#: And one larger than this does not go at all.
MAX_CAPTURED_BYTES = 64 * 1024 * 1024


class Shipped(NamedTuple):
    """A function, ready to be named in a spec."""

    #: `FunctionEntry` as JSON, without arguments.
    entry: dict[str, Any]
    #: First-party modules that must travel along, by name.
    modules: dict[str, Path]
    blobs: tuple[Blob, ...]
    by_value: bool


class Shipper:
    """One function on its way to jobs. Used from any thread; two that race do the work twice."""

    def __init__(self, function: FunctionType, options: Options, kind: str) -> None:
        self.function = function
        self._ship = options.ship
        self._kind = kind
        self._name = options.name or function.__qualname__
        self._folder = options.package if isinstance(options.package, str) else None
        self._package = options.package
        self._held: list[object] | None = None
        self._pickled = b""
        self._shipped: Shipped | None = None

    @property
    def own_module(self) -> ModuleType | None:
        """The function's module where it is the user's own: what it defines travels by value."""
        module = sys.modules.get(self.function.__module__ or "")
        return module if _source.own_file(module) is not None else None

    def ship(self) -> Shipped:
        """The function as it is now.

        Raises:
            TypeError: it cannot be pickled, and cannot be imported either; names what is in the way.
            PackageError: what it captures is too large.
        """
        if self._shipped is not None and not self._may_differ():
            return self._shipped
        if self._ship == "import" or (self._ship == "auto" and self._is_installed()):
            self._shipped = self._by_import()
            return self._shipped
        try:
            pickled, needs = _pickling.dumps(self.function, self.own_module)
        except Exception as why:  # noqa: BLE001 - whatever the user's objects raise when pickled
            self._shipped = self._instead(why)
            return self._shipped
        if self._shipped is None or pickled != self._pickled:
            self._pickled = pickled
            self._shipped = self._by_value(pickled, needs)
        return self._shipped

    def _may_differ(self) -> bool:
        if not self._shipped or not self._shipped.by_value:
            return False
        held = _pickling.snapshot(self.function, self.own_module)
        same = held is not None and self._held is not None and len(held) == len(self._held)
        if same and held is not None and self._held is not None:
            same = all(a is b for a, b in zip(held, self._held, strict=True))
        self._held = held
        return not same

    def _is_installed(self) -> bool:
        module = sys.modules.get(self.function.__module__ or "")
        return module is not None and _source.is_installed(getattr(module, "__file__", None)) and self._is_named()

    def _is_named(self) -> bool:
        """Whether `module:qualname` leads to the function, or to the handle around it."""
        found: Any = sys.modules.get(self.function.__module__ or "")
        for name in self.function.__qualname__.split("."):
            found = getattr(found, name, None)
        inner = getattr(found, "__firepool_function__", found)
        return inner is self.function and self.function.__module__ != "__main__"

    def _importable(self) -> bool:
        return self._is_named() and _source.is_importable(self.function.__module__)

    def _by_import(self) -> Shipped:
        if not self._importable():
            raise TypeError(
                f"{self._name} cannot be sent by import path: {self.function.__module__}:{self.function.__qualname__} "
                "is not found by an import; use ship='value'"
            )
        module = self.function.__module__
        entry = {"import_path": f"{module}:{self.function.__qualname__}", **self._common()}
        return Shipped(entry, _source.closure([module]), (), by_value=False)

    def _by_value(self, pickled: bytes, needs: set[str]) -> Shipped:
        if len(pickled) > MAX_VALUE_BYTES and self._ship == "auto" and self._importable():
            return self._by_import()
        if len(pickled) > MAX_CAPTURED_BYTES:
            raise PackageError(
                f"{self._name} by value has {len(pickled) >> 20} MiB: it captures something large. Load that inside the "
                "function, or pass it with firepool.put()",
                limit_bytes=MAX_CAPTURED_BYTES,
            )
        modules = self.modules_of(needs)
        if self.function.__module__ in modules and self._ship == "auto" and self._importable():
            # What it uses imports its module back: by value there would be two of every class.
            return self._by_import()
        blob = Blob.of(pickled)
        entry = {"payload": blob.digest, "python": _pickling.PYTHON, **self._common()}
        self._held = _pickling.snapshot(self.function, self.own_module)
        return Shipped(entry, modules, (blob,), by_value=True)

    def _instead(self, why: Exception) -> Shipped:
        if self._ship == "auto" and self._importable():
            return self._by_import()
        found = _pickling.culprits(self.function, self.own_module)
        named = f" It refers to {'; '.join(found)}." if found else ""
        raise TypeError(f"{self._name} cannot be pickled: {type(why).__name__}: {why}.{named}") from why

    def _common(self) -> dict[str, Any]:
        common: dict[str, Any] = {"name": self._name}
        if self._kind != "call":
            common["kind"] = self._kind
        return common

    def modules_of(self, needs: set[str]) -> dict[str, Path]:
        """First-party modules that come with imports of the given ones."""
        return _source.closure(needs) if self._package is None else {}

    def package(self, modules: Iterable[tuple[str, Path]]) -> Blob | str | None:
        """The package that goes along: made, or named by digest. Raises: PackageError."""
        from firepool_ray import _package  # zipfile: 5 ms

        if self._folder is None:
            return _package.of_modules(dict(modules)) if self._package is None else None
        return self._folder if self._folder.startswith("sha256:") else _package.of_folder(Path(self._folder))
