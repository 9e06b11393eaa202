"""Ending an attempt's processes and proving it (`design.md` §4.2–3): ask, kill, prove.

An attempt is known by its guard (whose death ends its PID namespace), by its uid, and where neither is there, by its
descent from the agent. Killing uses every way that this pod has; the proof does not trust any of them and reads /proc.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from firepool_agent import procfs
from firepool_agent.janitor import Janitor
from firepool_wire.nursery import PodConfig
from firepool_wire.words import Isolation

#: How long the first look waits before it looks again; later ones double it up to the second figure.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
#: How long the end of a PID namespace is waited for before the other ways are tried as well.
_NAMESPACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an attempt's processes are known by."""

    #: Guard's pid in the agent's PID namespace; 0 = none was forked.
    guard: int
    uid: int
    #: Pids of the agent's own helpers (janitor, zygote, waiting guards), never touched.
    helpers: frozenset[int] = frozenset()


@dataclass(slots=True)
class Proof:
    """Outcome of `kill_and_prove`: processes killed, and those that would not go (pid and state)."""

    killed: int = 0
    survivors: list[procfs.Process] = field(default_factory=list)
    #: What a way of killing answered, where it failed.
    notes: list[str] = field(default_factory=list)


def ask(guard: int) -> None:
    """SIGTERM to the attempt's own process, by way of its guard."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGTERM)


def remaining(config: PodConfig, attempt: Attempt, seen: Collection[procfs.Process]) -> list[procfs.Process]:
    """Those of the processes seen that are the attempt's and not dead."""
    seen = [p for p in seen if p.state not in procfs.DEAD]
    if attempt.uid:
        return [p for p in seen if p.uid == attempt.uid or p.pid == attempt.guard]
    if config.nested:
        below = _below(attempt.guard, seen)
        return [p for p in seen if p.pid in below]
    ours = {os.getpid(), *attempt.helpers}
    helped = {p.pid for helper in attempt.helpers for p in procfs.descendants(helper, seen)} - _below(
        attempt.guard, seen
    )
    return [p for p in procfs.descendants(os.getpid(), seen) if p.pid not in ours and p.pid not in helped]


def _below(guard: int, seen: Collection[procfs.Process]) -> set[int]:
    return {guard, *(p.pid for p in procfs.descendants(guard, seen))} if guard else set()


def kill_and_prove(config: PodConfig, attempt: Attempt, janitor: Janitor, wait_s: float) -> Proof:
    """Kill everything of the attempt and wait, at most `wait_s` seconds, until /proc shows none of it.

    Also reaps orphans that became the agent's children. A process in uninterruptible sleep stays a survivor when the time
    is up; the pod is unclean then. Where /proc shows nothing at once, nothing has to be killed. Raises: OSError where there
    is no /proc.
    """
    if config.isolation == Isolation.PORTABLE:
        return _kill_unproven(attempt)
    proof = Proof()
    until, pause, looks = time.monotonic() + wait_s, _FIRST_PAUSE_S, 0
    while True:
        seen = list(procfs.processes())
        _reap_orphans(attempt, seen)
        proof.survivors = remaining(config, attempt, seen)
        if not proof.survivors or (looks and time.monotonic() >= until):
            return proof
        if not looks:
            proof.killed = sum(1 for p in proof.survivors if p.pid != attempt.guard)
        if not looks and config.nested and attempt.guard:
            _kill_namespace(attempt.guard, min(wait_s, _NAMESPACE_S))
        else:
            _kill_every_way(config, attempt, janitor, proof)
            _wait_for(proof.survivors[0].pid, pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        looks += 1


def _kill_namespace(guard: int, at_most_s: float) -> None:
    """The guard is PID 1 of the attempt's namespace: once it is dead the kernel has killed and reaped everything in it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGKILL)
    _wait_for(guard, at_most_s)


def _kill_every_way(config: PodConfig, attempt: Attempt, janitor: Janitor, proof: Proof) -> None:
    _kill_group(config, attempt.helpers)
    _kill_each(proof.survivors)
    note = janitor.sweep(attempt.uid) if attempt.uid else ""
    if note and note not in proof.notes:
        proof.notes.append(note)


def _kill_unproven(attempt: Attempt) -> Proof:
    """Without /proc: the guard's session. What left it is not found, which is why this level serves a single caller only."""
    if attempt.guard:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(attempt.guard, signal.SIGKILL)
    return Proof()


def _kill_group(config: PodConfig, helpers: frozenset[int]) -> None:
    """The group at once, unless a helper lives in it (a zygote whose children start where they belong)."""
    path = config.cgroups.get("unified")
    if path is None:
        return
    with contextlib.suppress(OSError):  # kernels before 5.14 have no cgroup.kill; the other ways do the work there
        with open(f"{path}/cgroup.procs") as f:
            if not helpers.isdisjoint(map(int, f.read().split())):
                return
        fd = os.open(f"{path}/cgroup.kill", os.O_WRONLY)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)


def _kill_each(processes: Collection[procfs.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def _wait_for(pid: int, at_most_s: float) -> None:
    """Until a process exits, or a moment has passed."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([fd], [], [], at_most_s)
    finally:
        os.close(fd)


def _reap_orphans(attempt: Attempt, seen: Collection[procfs.Process]) -> None:
    """Reap dead children of this process that are nobody else's to wait for (the agent is their sub-reaper)."""
    me = os.getpid()
    for process in seen:
        if process.parent == me and process.state == "Z" and process.pid not in attempt.helpers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
