"""Where code lives: which modules are the user's own, what they import of each other, and digests over their sources.

A digest over sources is only a hint that saves building and uploading (spec §7); what is stored is named by its own
bytes. Modules that are installed (standard library, site-packages) never travel.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple


@cache
def _installed_roots() -> tuple[str, ...]:
    import site
    import sysconfig

    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()] if hasattr(site, "getsitepackages") else []
    return tuple(dict.fromkeys(str(Path(root).resolve()) + "/" for root in roots))


@cache
def _resolved(file: str) -> str:
    return Path(file).resolve().as_posix()


def is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to the interpreter or to an installed distribution (then the job has it too)."""
    if file is None:
        return True
    path = _resolved(file)
    return any(path.startswith(root) for root in _installed_roots()) or "/site-packages/" in path


def own_file(module: ModuleType | None) -> Path | None:
    """The source file of a first-party module, else None."""
    file = getattr(module, "__file__", None)
    return _own_path(file) if isinstance(file, str) else None


@cache
def _own_path(file: str) -> Path | None:
    path = Path(file)
    return path.resolve() if path.is_file() and not is_installed(file) else None


def import_root(name: str, file: Path) -> Path | None:
    """The folder on `sys.path` from which `name` is this file; None where the two do not belong together."""
    parts = name.split(".")
    steps = len(parts) + (1 if file.name == "__init__.py" else 0)
    tail = [*parts, "__init__.py"] if file.name == "__init__.py" else [*parts[:-1], parts[-1] + file.suffix]
    if list(file.parts[-len(tail) :]) != tail:
        return None
    return file.parents[steps - 1]


def is_importable(name: str) -> bool:
    """Whether an import of `name` in a fresh interpreter with our `sys.path` finds the very module that is loaded here."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return name in sys.builtin_module_names
    try:
        found = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return found is not None and found.origin is not None and _resolved(found.origin) == _resolved(file)


@cache
def _imports_of(file: Path, stamp: tuple[int, int], name: str, package: str) -> frozenset[str]:
    """Dotted names that a source file imports, functions' own imports included. `stamp` is only the cache's key.

    Read from the compiled module, which the interpreter has cached: parsing would cost 10 to 100 times as much.
    """
    from importlib.machinery import SourceFileLoader

    try:
        code = SourceFileLoader(name, str(file)).get_code(name)
    except (SyntaxError, OSError, ImportError, ValueError):
        return frozenset()
    return imported_names(code, package) if code is not None else frozenset()


def imported_names(code: CodeType, package: str) -> frozenset[str]:
    """Dotted names that code in a package imports when it runs; `from a import b` may mean the module `a.b`."""
    found: set[str] = set()
    for level, name, names in _imports(code):
        base = name
        if level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])
        found |= {base, *(f"{base}.{n}" for n in names)}
    return frozenset(n for n in found if n)


@cache
def _imports(code: CodeType) -> frozenset[tuple[int, str, tuple[str, ...]]]:
    """Every import statement of a body and of what is defined in it: level, module, names."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    if not inner and not code.co_names:
        return frozenset()
    import dis

    found: set[tuple[int, str, tuple[str, ...]]] = set()
    consts: list[Any] = [0, None]
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_CONST":
            consts = [consts[-1], step.argval]
        elif step.opname == "IMPORT_NAME":
            found.add((consts[0] or 0, step.argval, tuple(consts[1] or ())))
    return frozenset(found).union(*map(_imports, inner))


def _own_module(name: str) -> tuple[str, Path] | None:
    """The first-party module that an import of a dotted name loads: itself, or what it is an attribute of."""
    while name:
        module = sys.modules.get(name)
        file = own_file(module)
        if file is None and module is None:
            file = _unloaded(name)
        if file is not None:
            return name, file
        name = name.rpartition(".")[0]
    return None


def _unloaded(name: str) -> Path | None:
    """The file of a first-party module that is imported only when a function runs. Imports nothing."""
    top, *inner = name.split(".")
    try:
        found = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if found is None:
        return None
    if not inner and found.origin is not None and found.has_location:
        return _own_source(Path(found.origin))
    for folder in found.submodule_search_locations or ():
        place = Path(folder).joinpath(*inner)
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if inner and path.is_file():
                return _own_source(path)
    return None


def _own_source(path: Path) -> Path | None:
    path = path.resolve()
    return path if path.suffix == ".py" and path.is_file() and not is_installed(str(path)) else None


def closure(names: Iterable[str]) -> dict[str, Path]:
    """First-party modules reachable from the given ones by imports, by name; the given ones included if first-party."""
    found: dict[str, Path] = {}
    todo = list(names)
    while todo:
        own = _own_module(todo.pop())
        if own is None or own[0] in found:
            continue
        name, file = own
        found[name] = file
        stat = file.stat()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        todo += _imports_of(file, (stat.st_mtime_ns, stat.st_size), name, package)
        # Importing a.b.c runs a and a.b first.
        todo += [name.rpartition(".")[0]] if "." in name else []
    return found


def digest(data: bytes) -> str:
    """`sha256:<hex>` of stored bytes: a blob's name."""
    import hashlib

    return "sha256:" + hashlib.sha256(data).hexdigest()


def tree_digest(entries: Iterable[tuple[str, Path]]) -> str:
    """A digest over names and contents of files: equal trees have equal ones, whatever their times are."""
    import hashlib

    whole = hashlib.sha256()
    for name, path in sorted(entries):
        whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def stamps(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Name, change time and size of files: unchanged stamps mean unchanged contents."""
    for path in paths:
        stat = path.stat()
        yield str(path), stat.st_mtime_ns, stat.st_size


class Blob(NamedTuple):
    """Bytes under their name; `read` makes them only when the broker turns out to lack them."""

    digest: str
    #: Bytes, or an estimate where they are not made yet.
    size: int
    read: Callable[[], bytes]
    #: They exist already.
    made: bool = True

    @classmethod
    def of(cls, data: bytes) -> "Blob":
        """A blob of bytes at hand."""
        return cls(digest(data), len(data), lambda: data)
