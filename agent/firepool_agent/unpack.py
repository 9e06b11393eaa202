"""Code packages: zip archives unpacked once into a digest-keyed cache that jobs cannot change (`spec §7`).

Everything about an archive is untrusted: its digest is computed, sizes are counted while they are written and never
believed, and an entry that is not a plain file or directory inside the tree refuses the whole package. The cache lies in
memory where the pod has it there, else on disk; `isolate` shows a tree to the job through an overlay (or a copy).
"""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import zipfile
from dataclasses import dataclass

from firepool_wire.errors import PackageError
from firepool_wire.nursery import PodConfig

#: Limits of spec §7; the first is configurable per pool.
MAX_COMPRESSED_BYTES = 512 << 20
MAX_WRITTEN_BYTES = 2_000_000_000
#: An archive of a few MiB can name millions of empty files; each costs an inode of the pod.
MAX_ENTRIES = 200_000
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Limits:
    """What an archive may be."""

    compressed_bytes: int = MAX_COMPRESSED_BYTES
    written_bytes: int = MAX_WRITTEN_BYTES
    entries: int = MAX_ENTRIES


class Unpacker:
    """The unpack cache of one pod."""

    def __init__(self, config: PodConfig, limits: Limits = Limits()) -> None:
        self._places = (config.unpack_dir, f"{config.caches_dir}/packages")
        self._limits = limits
        self._count = 0
        #: Digests by last use, oldest first.
        self._used: list[str] = []

    def cached(self, digest: str) -> str | None:
        """Path of the unpacked tree, or None."""
        for place in self._places:
            path = f"{place}/{_key(digest)}"
            if os.path.isdir(path):
                return path
        return None

    def tree(self, digest: str, archive: str) -> str:
        """Path of the read-only tree of a package; unpacks `archive` when it is not there yet.

        Raises:
            PackageError: digest, size, entry or format is not acceptable; nothing stays.
        """
        path = self.cached(digest)
        if path is None:
            check_digest(digest, archive, self._limits.compressed_bytes)
            path = self._unpack(digest, archive)
        if digest in self._used:
            self._used.remove(digest)
        self._used.append(digest)
        return path

    def _unpack(self, digest: str, archive: str) -> str:
        """Into memory, after making room there; into the cache on disk when it is still too small."""
        fast, slow = self._places
        while True:
            try:
                return self._unpack_at(fast, digest, archive)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise PackageError(f"package {digest}: {e}", digest=digest) from e
                if not self._evict():
                    break
        try:
            return self._unpack_at(slow, digest, archive)
        except OSError as e:
            raise PackageError(f"package {digest} does not fit into this pod: {e}", digest=digest) from e

    def _unpack_at(self, place: str, digest: str, archive: str) -> str:
        self._count += 1
        os.makedirs(place, mode=0o711, exist_ok=True)
        partial, whole = f"{place}/.partial-{self._count}", f"{place}/{_key(digest)}"
        try:
            os.mkdir(partial, 0o755)
            extract(archive, partial, self._limits)
            os.chmod(partial, 0o755)
            os.rename(partial, whole)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return whole

    def _evict(self) -> bool:
        """Drop the tree that was not used for longest; False when there is none."""
        for digest in self._used:
            path = f"{self._places[0]}/{_key(digest)}"
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
                self._used.remove(digest)
                return True
        return False


def _key(digest: str) -> str:
    kind, _, name = digest.partition(":")
    if kind != "sha256" or len(name) != 64 or not all(c in "0123456789abcdef" for c in name):
        raise PackageError(f"{digest!r} is not a sha256 digest", digest=digest)
    return name


def check_digest(digest: str, archive: str, limit_bytes: int) -> None:
    """Raises: PackageError: the stored bytes are too many, or not those of `digest`."""
    size = os.path.getsize(archive)
    if size > limit_bytes:
        raise PackageError(
            f"the package has {size} bytes, the limit is {limit_bytes}", limit_bytes=limit_bytes, bytes=size
        )
    with open(archive, "rb") as f:
        found = f"sha256:{hashlib.file_digest(f, 'sha256').hexdigest()}"
    if found != digest:
        raise PackageError(f"the package's bytes are {found}, not {digest}", expected=digest, found=found)


def extract(archive: str, target: str, limits: Limits) -> int:
    """Unpack into an empty directory that nobody else writes to; returns the bytes written.

    Raises:
        PackageError: an entry leaves the tree, is a link or a device, or a limit was passed; `target` holds a part then.
        OSError: the file system refused.
    """
    try:
        with zipfile.ZipFile(archive) as z:
            entries = z.infolist()
            if len(entries) > limits.entries:
                raise PackageError(f"the package has {len(entries)} entries, the limit is {limits.entries}")
            if (declared := sum(entry.file_size for entry in entries)) > limits.written_bytes:
                raise _too_much(declared, limits.written_bytes)  # an honest bomb costs no writing
            written = 0
            made = {""}
            for entry in entries:
                name = _checked_name(entry)
                if entry.is_dir():
                    _make_dirs(target, name, made)
                else:
                    _make_dirs(target, os.path.dirname(name), made)
                    written += _write_entry(z, entry, f"{target}/{name}", written, limits.written_bytes)
            return written
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as e:
        raise PackageError(f"the package cannot be unpacked: {e}") from e
    except Exception as e:
        if type(e).__module__ in ("zlib", "_lzma", "lzma"):
            raise PackageError(f"the package cannot be unpacked: {e}") from e
        raise


def _checked_name(entry: zipfile.ZipInfo) -> str:
    """The entry's path inside the tree. Raises: PackageError."""
    name = entry.filename.rstrip("/")
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or any(p in ("", ".", "..") for p in parts):
        raise PackageError(f"entry {entry.filename!r} does not lie inside the package", entry=entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise PackageError(
            f"entry {entry.filename!r} is a link or a device; packages hold files only", entry=entry.filename
        )
    if any(len(os.fsencode(p)) > 255 for p in parts):
        raise PackageError(f"entry {entry.filename[:80]!r}… has a name that is too long", entry=entry.filename[:200])
    return name


def _make_dirs(target: str, name: str, made: set[str]) -> None:
    if name in made:
        return
    _make_dirs(target, os.path.dirname(name), made)
    try:
        os.mkdir(f"{target}/{name}", 0o755)
    except FileExistsError as e:
        raise PackageError(f"entry {name!r} is a file and a directory at once", entry=name) from e
    made.add(name)


def _too_much(size: int, limit: int) -> PackageError:
    return PackageError(f"the package unpacks to at least {size} bytes, the limit is {limit}", limit_bytes=limit)


def _write_entry(z: zipfile.ZipFile, entry: zipfile.ZipInfo, path: str, before: int, limit: int) -> int:
    """Write one file; returns its bytes. `before`: bytes that the package has written already. Raises: PackageError."""
    mode = 0o755 if (entry.external_attr >> 16) & 0o111 else 0o644
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except (FileExistsError, IsADirectoryError) as e:
        raise PackageError(f"entry {entry.filename!r} is there twice", entry=entry.filename) from e
    written = 0
    with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as out, z.open(entry) as source:
        os.fchmod(fd, mode)
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if before + written > limit:
                raise _too_much(before + written, limit)
            out.write(chunk)
    return written
