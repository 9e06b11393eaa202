"""Where attempts write: slots of the pod's scratch space, one per attempt, never used twice.

A slot holds the work dir, home, /tmp and /dev/shm of one attempt. Giving every attempt new directories and moving the old
slot aside as a whole makes emptying one rename, however many files lie where. At level `namespaces` the scratch space is a
file system of its own with a size limit, so "what did the job write" is one statvfs.

Deleting what was moved aside is the janitor's work; mounting a slot where the job sees it is `isolate`'s.
"""

import contextlib
import os
from dataclasses import dataclass

from firepool_wire.nursery import PodConfig


@dataclass(frozen=True, slots=True)
class Slot:
    """Directories of one attempt as the agent sees them; `uid` owns them (0: the agent's own)."""

    number: int
    uid: int
    root: str

    @property
    def work(self) -> str:
        """Work dir: the job's current directory, the package's place."""
        return f"{self.root}/work"

    @property
    def home(self) -> str:
        """HOME of the job."""
        return f"{self.root}/home"

    @property
    def tmp(self) -> str:
        """/tmp of the job (TMPDIR where there is no mount namespace)."""
        return f"{self.root}/tmp"

    @property
    def shm(self) -> str:
        """/dev/shm of the job (unused where there is no mount namespace)."""
        return f"{self.root}/shm"

    @property
    def overlay(self) -> str:
        """Room for an overlay over a package: its upper and work directories."""
        return f"{self.root}/overlay"


#: Directory and mode; the sticky world-writable ones are what programs expect of /tmp and /dev/shm.
_ROOMS = (("work", 0o755), ("home", 0o700), ("tmp", 0o1777), ("shm", 0o1777), ("overlay", 0o755))


class Scratch:
    """The slots of one pod. The agent keeps one object for its life."""

    def __init__(self, config: PodConfig) -> None:
        self._root = config.scratch_dir
        self._sized = config.scratch_bytes > 0
        #: Everything that was moved aside lies here until the janitor deleted it.
        self.trash = f"{self._root}/trash"
        self._slots = f"{self._root}/slots"
        for path, mode in ((self._root, 0o711), (self._slots, 0o711), (self.trash, 0o700)):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        self._next = 0
        #: Bytes in use by a clean scratch space; 0 where it is no file system of its own.
        self._clean_bytes = self._used()

    def fresh(self, uid: int) -> Slot:
        """A new, empty slot whose directories belong to `uid`. Raises: OSError (space)."""
        self._next += 1
        slot = Slot(self._next, uid, f"{self._slots}/{self._next}")
        os.mkdir(slot.root, 0o711)
        for name, mode in _ROOMS:
            path = f"{slot.root}/{name}"
            os.mkdir(path, mode)
            os.chmod(path, mode)
            if uid:
                os.chown(path, uid, uid)
        return slot

    def set_aside(self, slot: Slot) -> str | None:
        """Move the slot to the trash; its new path, or None when it is not there (already set aside)."""
        target = f"{self.trash}/{slot.number}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(slot.root, target)
            return target
        return None

    def slots(self) -> list[str]:
        """Paths of all slots that are not in the trash."""
        return [entry.path for entry in os.scandir(self._slots)]

    def used_bytes(self) -> int:
        """Bytes written since the scratch space was clean (0 where it is no file system of its own)."""
        return max(0, self._used() - self._clean_bytes)

    def free_bytes(self) -> int:
        """Bytes that a job could still write."""
        seen = os.statvfs(self._root)
        return seen.f_bavail * seen.f_frsize

    def _used(self) -> int:
        if not self._sized:
            return 0
        seen = os.statvfs(self._root)
        return (seen.f_blocks - seen.f_bfree) * seen.f_frsize
