"""First-party code as a package: a zip with sorted names and fixed times, so that equal trees give equal bytes (spec §7).

For a function: every top-level module or package that its imports reach, whole (a package's data files are part of it).
For a folder: everything below it. `.gitignore` is honoured in both.
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from firepool_ray import _ignore, _source
from firepool_ray._config import home
from firepool_ray._source import Blob
from firepool_wire.errors import PackageError

#: Largest tree that travels without being asked for. Raise: bigger surprises on a slow line; name `package=` instead.
MAX_BYTES = 100 * 1024 * 1024
#: Files are looked at for changes at most this often. Raise: edits are noticed later; lower: more `stat` calls a job.
FRESH_S = 2.0
#: The earliest time a zip can hold, and one mode for all: neither belongs to what the code is.
_WHEN = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "firepool.toml")


@dataclass(slots=True)
class _Built:
    stamp: tuple[tuple[str, int, int], ...]
    blob: Blob
    looked_at: float


_cache: dict[object, _Built] = {}


def of_modules(modules: dict[str, Path]) -> Blob | None:
    """The package of first-party modules (name → file); None for none.

    Raises:
        PackageError: too large to travel unasked.
    """
    if not modules:
        return None
    key = tuple(sorted(modules.items()))
    if (ready := _fresh(key)) is not None:
        return ready
    entries: dict[str, Path] = {}
    for top, file in _tops(modules).items():
        entries.update(_files_of(top, file))
    return _build(key, entries.items())


def of_folder(folder: Path) -> Blob:
    """The package of a whole folder. Raises: PackageError."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise PackageError(f"{folder} is not a folder")
    key = ("folder", folder)
    return _fresh(key) or _build(key, list(_ignore.walk(folder, above=project_root(folder))))


def zip_folder(folder: Path) -> bytes:
    """The bytes of a folder's package. Raises: PackageError."""
    return of_folder(folder).read()


def project_root(start: Path) -> Path:
    """The folder that makes a project of what lies below it: the nearest with a mark of one, else `start` itself."""
    for folder in (start, *start.parents):
        if any((folder / mark).exists() for mark in _MARKS):
            return folder
    return start


def _fresh(key: object) -> Blob | None:
    built = _cache.get(key)
    return built.blob if built is not None and monotonic() - built.looked_at < FRESH_S else None


def _tops(modules: dict[str, Path]) -> dict[str, tuple[Path, Path]]:
    """Top-level name → (folder on `sys.path`, the top's own file)."""
    tops: dict[str, tuple[Path, Path]] = {}
    for name, file in sorted(modules.items()):
        root = _source.import_root(name, file)
        if root is not None:
            tops.setdefault(name.partition(".")[0], (root, file))
    return tops


def _files_of(top: str, found: tuple[Path, Path]) -> Iterable[tuple[str, Path]]:
    root, file = found
    folder = root / top
    if not folder.is_dir():
        return [(file.relative_to(root).as_posix(), file)]
    inner = _ignore.walk(folder, above=project_root(folder))
    return ((f"{top}/{name}", path) for name, path in inner)


def _build(key: object, entries: Iterable[tuple[str, Path]]) -> Blob:
    listed = sorted(entries)
    stamp = tuple(_source.stamps(path for _, path in listed))
    built = _cache.get(key)
    if built is None or built.stamp != stamp:
        _check_size(listed, sum(size for _, _, size in stamp))
        built = _Built(stamp, _blob(listed, sum(size for _, _, size in stamp)), 0.0)
        _cache[key] = built
    built.looked_at = monotonic()
    return built.blob


def _blob(entries: list[tuple[str, Path]], size: int) -> Blob:
    # The bytes of a zip depend on the compressor too: another zlib makes another hint.
    hint = f"{_source.tree_digest(entries)}-{zlib.ZLIB_RUNTIME_VERSION}"
    known = remembered(hint)
    if known is not None:
        return Blob(known, size, lambda: zip_bytes(entries), made=False)
    blob = Blob.of(zip_bytes(entries))
    remember(hint, blob.digest)
    return blob


def _check_size(entries: list[tuple[str, Path]], size: int) -> None:
    if size <= MAX_BYTES:
        return
    largest = sorted(entries, key=lambda e: e[1].stat().st_size, reverse=True)[:5]
    named = ", ".join(f"{name} ({path.stat().st_size >> 20} MiB)" for name, path in largest)
    raise PackageError(
        f"the code that would travel along has {size >> 20} MiB, the most is {MAX_BYTES >> 20} MiB; largest: {named}. "
        "Put data into .gitignore, or name what the job needs with package=",
        limit_bytes=MAX_BYTES,
    )


def zip_bytes(entries: Iterable[tuple[str, Path]]) -> bytes:
    """Files as a zip that depends on nothing but their names and contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in sorted(entries):
            info = zipfile.ZipInfo(name, _WHEN)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = _MODE | (0o111 << 16 if os.access(path, os.X_OK) else 0)
            archive.writestr(info, path.read_bytes())
    return out.getvalue()


def remembered(source: str) -> str | None:
    """The package digest that a tree of this source digest had when some program last built it."""
    try:
        found = json.loads((home() / "cache" / "packages" / source).read_text())
    except (OSError, ValueError):
        return None
    return str(found["package"])


def remember(source: str, package: str) -> None:
    """Keep what `remembered` tells; a folder that cannot be written only costs the next program some time."""
    folder = home() / "cache" / "packages"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / source).write_text(json.dumps({"package": package}))
    except OSError:
        return
