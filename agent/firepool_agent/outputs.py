"""Files that outlive their attempt: what matches the job's globs in the work dir, and everything under `FIREPOOL_OUTPUT_DIR`.

They are copied aside when the attempt has ended, however it ended, before the reset. The copy runs with the agent's privileges over
directories that belonged to hostile code, so it never follows a link, opens regular files of the attempt's own user only, and
counts what it reads rather than believing sizes.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firepool_agent.scratch import Slot
from firepool_wire.agentapi import Launch
from firepool_wire.errors import NotFound

#: Name of the output directory in the job's home.
DIR_NAME = "firepool-outputs"
#: Most files kept; further ones are discarded like any other file.
MAX_FILES = 10_000
#: Directory entries looked at to count what is thrown away, where the file system cannot tell: beyond it the count is a lower bound.
_COUNTED_ENTRIES = 2_000
_CHUNK = 1 << 20


@dataclass(slots=True)
class Kept:
    """What was kept and what will be thrown away."""

    files: list[dict[str, Any]] = field(default_factory=list)
    kept_bytes: int = 0
    discarded_bytes: int = 0


async def keep(slot: Slot, launch: Launch, keep_dir: Path) -> Kept:
    """Copy the attempt's output files to `keep_dir`; off the event loop when there are any."""
    found = list(_found(slot, launch.outputs))
    kept = Kept()
    if found:
        await asyncio.to_thread(_copy_all, slot, found, launch.max_output_bytes, keep_dir, kept)
    kept.discarded_bytes = max(0, _written_bytes(slot) - kept.kept_bytes)
    return kept


def _found(slot: Slot, globs: list[str]) -> Iterator[tuple[str, str]]:
    """(directory, path relative to it) of every file to keep; the output directory's first."""
    own = f"{slot.home}/{DIR_NAME}"
    for path in _files(own):
        yield own, path
    if not globs:
        return
    wanted = re.compile("|".join(f"(?:{_pattern(glob)})" for glob in globs))
    for path in _files(work := work_dir(slot)):
        if wanted.fullmatch(path):
            yield work, path


def work_dir(slot: Slot) -> str:
    """Where the job's writes to its work dir lie: the upper layer where a package is mounted below."""
    upper = f"{slot.overlay}/upper"
    return upper if os.path.isdir(upper) else slot.work


def _files(top: str) -> Iterator[str]:
    if not os.path.isdir(top):
        return
    for folder, _dirs, names, _fd in os.fwalk(top, follow_symlinks=False):
        inside = os.path.relpath(folder, top)
        for name in names:
            yield name if inside == "." else f"{inside}/{name}"


def _pattern(glob: str) -> str:
    """A glob relative to the work dir as a regular expression: `*` stays within a folder, `**` does not."""
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", glob.removeprefix("./")):
        text += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))
    # A glob that names a folder means everything in it.
    return text if not glob.endswith("/") else text + ".*"


def _copy_all(slot: Slot, found: list[tuple[str, str]], limit: int, keep_dir: Path, kept: Kept) -> None:
    seen: set[str] = set()
    for top, path in found:
        if path in seen:
            continue
        seen.add(path)
        if len(kept.files) >= MAX_FILES:
            return
        entry: dict[str, Any] | None = None
        with contextlib.suppress(OSError):  # vanished, a link, not ours: not an output
            entry = _copy(slot, top, path, limit - kept.kept_bytes, keep_dir / path)
        if entry is not None:
            kept.files.append({"path": path, **entry})
            kept.kept_bytes += entry["bytes"]


def _copy(slot: Slot, top: str, path: str, room: int, target: Path) -> dict[str, Any] | None:
    """Copy one file; None when it is not a plain file of the attempt's. Raises: OSError."""
    with _opened(top, path) as source:
        seen = os.fstat(source)
        if not stat.S_ISREG(seen.st_mode) or (slot.uid and seen.st_uid != slot.uid):
            return None
        if seen.st_size > room:
            return {"bytes": 0, "sha256": "", "dropped": f"{seen.st_size} bytes are over what max_output_bytes leaves"}
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with target.open("wb") as copy:
            while size < room and (data := os.read(source, min(_CHUNK, room - size))):
                copy.write(data)
                digest.update(data)
                size += len(data)
        return {"bytes": size, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _opened(top: str, path: str) -> Iterator[int]:
    """A file below `top`, every step of the way taken without following links. Raises: OSError."""
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    *folders, name = path.split("/")
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)
    try:
        yield file
    finally:
        os.close(file)


def _written_bytes(slot: Slot) -> int:
    """Bytes of regular files in the slot, over at most `_COUNTED_ENTRIES` entries."""
    total, left = 0, _COUNTED_ENTRIES
    edge = [slot.tmp, slot.home, work_dir(slot), slot.shm]
    while edge and left > 0:
        with contextlib.suppress(OSError), os.scandir(edge.pop()) as entries:
            for entry in entries:
                left -= 1
                if entry.is_dir(follow_symlinks=False):
                    edge.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
                if left <= 0:
                    break
    return total


def locate(keep_dir: Path, path: str) -> Path:
    """A kept file by its path. Raises: NotFound."""
    parts = path.split("/")
    target = keep_dir.joinpath(*parts)
    if not path or ".." in parts or path.startswith("/") or not target.is_file():
        raise NotFound(f"no output file {path!r}", path=path)
    return target
