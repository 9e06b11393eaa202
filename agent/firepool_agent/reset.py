"""The verified reset of a pod (`spec §4.4`): end the attempt's processes and prove it, empty what it could write, compare the
pod with its clean baseline, and say in words whatever could not be confirmed.

The order is: processes, files (moved aside as a whole, deleted later), IPC, then the comparison of mounts, listening ports,
free space and device memory. Read-only caches and layers stay. A pod is claimable once its trash's bytes are free again:
`settling_bytes` says how many are not, `settled` waits for them.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from firepool_agent import gpu, procfs, proctree, sockets
from firepool_agent.janitor import Janitor
from firepool_agent.scratch import Scratch, Slot
from firepool_wire.agentapi import ResetReport
from firepool_wire.nursery import PodConfig

#: Trash up to this many bytes does not delay the next claim: it is deleted before a job could miss it.
_SMALL_TRASH = 16 << 20
#: Bytes of bookkeeping (fresh slots, directory pages) that may differ between two clean states.
_TOLERANCE = 4 << 20
_SETTLE_S = 60.0


@dataclass(slots=True)
class _Baseline:
    """The pod as it was when no job had ever run in it."""

    mounts: Counter[str] = field(default_factory=Counter)
    listeners: frozenset[procfs.Listener] = frozenset()
    device_bytes: int | None = 0
    queues: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Findings:
    """What is not clean, in words."""

    problems: list[dict[str, str]] = field(default_factory=list)
    #: Whether System V objects of the attempt may be left: not where it had none and is proven dead.
    ipc_left: bool = False

    def add(self, what: str, where: str, detail: str) -> None:
        self.problems.append({"what": what, "where": where, "detail": detail})


class Resetter:
    """Resets of one pod; the agent keeps one object for its life."""

    def __init__(self, config: PodConfig, janitor: Janitor, scratch: Scratch) -> None:
        self._config, self._janitor, self._scratch = config, janitor, scratch
        self._baseline = _Baseline()

    def baseline(self) -> None:
        """Remember the clean pod. Call it once everything of the agent's own is up."""
        self._baseline = _Baseline(
            procfs.mounts(),
            frozenset(sockets.listeners()) if self._config.own_network else frozenset(),
            gpu.used_bytes(self._config),
            frozenset(self._queues()),
        )

    def run(self, slot: Slot | None, guard: int, wait_s: float, helpers: Collection[int] = ()) -> ResetReport:
        """Clean the pod after the attempt of `slot`.

        Args:
            slot: where the attempt could write; None = no attempt was forked since the last reset.
            guard: its guard's pid; 0 = none.
            wait_s: bound of the wait for processes that will not die.
            helpers: pids of the agent's own (zygote, waiting guards), which stay.
        """
        started = time.monotonic()
        found = _Findings()
        killed, aside = 0, None
        if slot is not None:
            killed = self._end_processes(
                proctree.Attempt(guard, slot.uid, frozenset({self._janitor.pid, *helpers})), wait_s, found
            )
            aside = self._empty(slot, found)
        self._clear_queues(found)
        self._compare(slot, found)
        trash = self._scratch.used_bytes()
        if aside is not None:
            self._janitor.shred(aside)  # last: waking it may cost this process its turn on a busy machine
        return ResetReport(
            clean=not found.problems,
            problems=found.problems,
            killed=killed,
            settling_bytes=trash if trash > _SMALL_TRASH else 0,
            took_ms=round((time.monotonic() - started) * 1000, 3),
        )

    async def settled(self) -> list[dict[str, str]]:
        """Wait until the trash is deleted and its bytes are free; what did not come back (empty: the pod is claimable)."""
        loop = asyncio.get_running_loop()
        until = time.monotonic() + _SETTLE_S
        while not self._janitor.collect() and time.monotonic() < until:
            woken: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._janitor.fileno(), _wake, woken)
            try:
                async with asyncio.timeout(max(0.01, until - time.monotonic())):
                    await woken
            except TimeoutError:
                break
            finally:
                loop.remove_reader(self._janitor.fileno())
        return self._space_problems()

    def wait_settled(self, timeout_s: float = _SETTLE_S) -> list[dict[str, str]]:
        """`settled` for callers without a loop."""
        self._janitor.wait_idle(timeout_s)
        return self._space_problems()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _end_processes(self, attempt: proctree.Attempt, wait_s: float, found: _Findings) -> int:
        try:
            proof = proctree.kill_and_prove(self._config, attempt, self._janitor, wait_s)
        except OSError as e:
            found.add("processes", "/proc", f"cannot be proven gone: {e}")
            return 0
        for process in proof.survivors:
            found.add("process", str(process.pid), f"still there after SIGKILL and {wait_s:g} s, state {process.state}")
        found.ipc_left = bool(attempt.uid) and any(left.uid == attempt.uid for left in procfs.sysvipc())
        if found.ipc_left:
            proof.notes.append(self._janitor.sweep(attempt.uid))
        for note in filter(None, proof.notes):
            found.add("processes", f"uid {attempt.uid}", note)
        return proof.killed

    def _empty(self, slot: Slot, found: _Findings) -> str | None:
        """Move aside what the attempt wrote; where it lies now."""
        if not self._config.nested and slot.uid:
            _unlink_owned("/dev/shm", slot.uid, found)
        try:
            return self._scratch.set_aside(slot)
        except OSError as e:
            found.add("files", slot.root, str(e))
            return None

    def _queues(self) -> list[str]:
        with contextlib.suppress(OSError):
            return os.listdir(f"{self._config.agent_dir}/mqueue")
        return []

    def _clear_queues(self, found: _Findings) -> None:
        for name in set(self._queues()) - self._baseline.queues:
            try:
                os.unlink(f"{self._config.agent_dir}/mqueue/{name}")
            except OSError as e:
                found.add("ipc", name, str(e))

    def _compare(self, slot: Slot | None, found: _Findings) -> None:
        now, clean = procfs.mounts(), self._baseline.mounts
        for line in (now - clean) + (clean - now) if self._config.nested else ():
            found.add("mount", line.split()[0], f"differs from the clean pod: {line}")
        if self._config.own_network:
            for listener in sockets.listeners() - self._baseline.listeners:
                found.add(
                    "port", str(listener.port), f"something still listens ({listener.protocol}, uid {listener.uid})"
                )
        if slot is not None and slot.uid and (found.ipc_left or found.problems):
            for left in procfs.sysvipc():
                if left.uid == slot.uid:
                    found.add(
                        "ipc", f"{left.kind} {left.identifier}", f"System V object of uid {left.uid} is still there"
                    )
        for path, error in self._janitor.failed.items():
            found.add("files", path, f"could not be deleted: {error}")
        self._compare_device(found)

    def _compare_device(self, found: _Findings) -> None:
        before = self._baseline.device_bytes
        if not self._config.cards or before is None:
            return
        gpu.wipe_usage(self._config)
        now = gpu.used_bytes(self._config)
        if now is not None and now > before:
            found.add("device memory", "cards", f"{now - before} bytes more than in the clean pod")

    def _space_problems(self) -> list[dict[str, str]]:
        found = _Findings()
        for path, error in self._janitor.failed.items():
            found.add("files", path, f"could not be deleted: {error}")
        missing = self._scratch.used_bytes()
        if missing > _TOLERANCE + _SMALL_TRASH:
            found.add("space", self._config.scratch_dir, f"{missing} bytes did not come back")
        return found.problems


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _unlink_owned(directory: str, uid: int, found: _Findings) -> None:
    """Remove what an attempt left in a directory that it shared with others (no mount namespace)."""
    try:
        entries: list[Any] = [e for e in os.scandir(directory) if e.stat(follow_symlinks=False).st_uid == uid]
    except OSError as e:
        found.add("files", directory, str(e))
        return
    for entry in entries:
        try:
            os.unlink(entry.path)
        except OSError as e:
            found.add("files", entry.path, str(e))
