"""The cgroups of a pod: limits and figures from the memory, pids and cpu trees (v1 or v2), kill and freeze from v2.

`Site` (nursery side) finds the trees of this machine and makes a pod's groups; `JobGroup` (agent side) uses the job's
group inside the pod. Machines differ: a controller on a v1 tree is not on v2, and a v2 tree without controllers still
kills. Whatever is not there is a no-op that says so by returning None or False; limits then rest on rlimits alone.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from firepool_agent.procfs import read_text
from firepool_wire.nursery import PodConfig

_ROOT = "/sys/fs/cgroup"
_CONTROLLERS = ("memory", "pids", "cpu")
#: Weight of all pods together against single processes outside, per core.
_PODS_WEIGHT = 8


def parse_own_groups(text: str) -> dict[str, str]:
    """/proc/self/cgroup: controller (or "" for v2) → path of our group."""
    found = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


@dataclass(slots=True)
class Site:
    """Where groups can be made on this machine: parent directories by controller; `unified` is the v2 tree."""

    parents: dict[str, str] = field(default_factory=dict)
    #: Controllers that live on the v2 tree.
    on_v2: frozenset[str] = frozenset()

    @classmethod
    def find(cls, name: str) -> "Site":
        """Look the machine over and make a parent group `name` in every tree that lets us."""
        try:
            with open("/proc/self/cgroup") as f:
                own = parse_own_groups(f.read())
        except OSError:
            return cls()
        site = cls()
        v2_mount = _ROOT if os.path.exists(f"{_ROOT}/cgroup.controllers") else f"{_ROOT}/unified"
        if os.path.exists(f"{v2_mount}/cgroup.controllers"):
            site._adopt("unified", v2_mount + own.get("", "/").rstrip("/"), name)
        for controller in _CONTROLLERS:
            if controller in own:
                site._adopt(controller, f"{_ROOT}/{controller}{own[controller].rstrip('/')}", name)
        site._delegate_v2()
        return site

    def _adopt(self, key: str, base: str, name: str) -> None:
        path = f"{base}/{name}"
        try:
            os.makedirs(path, exist_ok=True)
        except OSError:
            return
        if not os.access(f"{path}/cgroup.procs", os.W_OK):
            return
        self.parents[key] = path
        if key == "cpu":
            # All pods together are one group of this machine; at the default weight of one process they would starve.
            _write(f"{path}/cpu.shares", str(1024 * _PODS_WEIGHT * (os.cpu_count() or 1)))
        for entry in os.scandir(path):  # pods of a nursery of this name that was killed; they died with it
            if entry.is_dir():
                for left in (f"{entry.path}/job", f"{entry.path}/agent", entry.path):
                    _rmdir(left)

    def _delegate_v2(self) -> None:
        """Switch controllers on for our groups where the v2 tree has them (a no-op where v1 trees hold them)."""
        parent = self.parents.get("unified")
        if parent is None:
            return
        granted = set()
        for controller in _CONTROLLERS:
            if controller not in self.parents and _write(f"{parent}/cgroup.subtree_control", f"+{controller}"):
                granted.add(controller)
                self.parents[controller] = parent
        self.on_v2 = frozenset(granted)

    def make(self, pod: str, limits: "Limits", owner: int) -> dict[str, str]:
        """The groups of a pod's jobs with its limits; their directory per controller.

        On v1 the agent stays in the nursery's own groups: a job that meets the limit takes nobody with it, and moving a
        process costs 10 ms a tree (the kernel waits for a grace period), where a child inherits its groups for nothing. v2
        lets a user move processes only inside a tree that is its own, so there the pod has an `agent` group beside `job`; a v2
        tree that only kills is not worth that to a pod whose PID namespace kills as well.
        """
        made: dict[str, str] = {}
        for controller in self.parents:
            if controller == "unified" and not self.on_v2 and owner != os.geteuid():
                continue
            path = self._job(controller, pod)
            base = os.path.dirname(path) if self._is_v2(controller) else path
            os.makedirs(base, exist_ok=True)
            if self._is_v2(controller):
                for name in self.on_v2:
                    _write(f"{base}/cgroup.subtree_control", f"+{name}")
                for each in (path, f"{base}/agent"):
                    os.makedirs(each, exist_ok=True)
                    _give(each, owner)
            self._limit(controller, path, limits)
            _give(path, owner)
            _give(base, owner)
            made[controller] = path
        return made

    def _is_v2(self, controller: str) -> bool:
        return controller == "unified" or controller in self.on_v2

    def _job(self, controller: str, pod: str) -> str:
        return f"{self.parents[controller]}/{pod}" + ("/job" if self._is_v2(controller) else "")

    def enter(self, pod: str, pid: int) -> None:
        """Move an agent to where it may move its jobs from (v2 only). Raises: OSError."""
        path = f"{self.parents.get('unified', '')}/{pod}/agent/cgroup.procs"
        if os.path.exists(path):
            with open(path, "w") as f:
                f.write(str(pid))

    def _limit(self, controller: str, job: str, limits: "Limits") -> None:
        v2 = controller in self.on_v2
        if controller == "memory" and limits.memory_bytes is not None:
            _write(f"{job}/{'memory.max' if v2 else 'memory.limit_in_bytes'}", str(limits.memory_bytes))
            _write(f"{job}/{'memory.swap.max' if v2 else 'memory.swappiness'}", "0")
        elif controller == "pids":
            _write(f"{job}/pids.max", str(limits.pids))
        elif controller == "cpu":
            weight = max(1, min(10_000, round(100 * limits.cpus)))
            _write(f"{job}/cpu.weight", str(weight)) if v2 else _write(
                f"{job}/cpu.shares", str(max(2, round(1024 * limits.cpus)))
            )

    def kill(self, pod: str) -> bool:
        """Kill the pod's jobs at once; False where the kernel has no cgroup.kill."""
        return "unified" in self.parents and _write(f"{self._job('unified', pod)}/cgroup.kill", "1")

    def oom_kills(self, pod: str) -> int:
        """Processes of the pod that the kernel killed for memory."""
        if "memory" not in self.parents:
            return 0
        return _oom_kills(self._job("memory", pod), "memory" in self.on_v2) or 0

    def remove(self, pod: str, deadline_s: float = 1.0) -> list[str]:
        """Remove the pod's groups; returns those that would not go."""
        paths = []
        for controller, parent in self.parents.items():
            if self._is_v2(controller):
                paths += [f"{parent}/{pod}/job", f"{parent}/{pod}/agent"]
            paths.append(f"{parent}/{pod}")
        return [path for path in dict.fromkeys(paths) if not _retry(lambda path=path: _rmdir(path), deadline_s)]  # type: ignore[misc]

    def close(self) -> list[str]:
        """Remove the parent groups; returns those that would not go."""
        return [path for path in set(self.parents.values()) if not _retry(lambda path=path: _rmdir(path), 1.0)]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pod's job group may use; None = unlimited."""

    memory_bytes: int | None
    pids: int
    cpus: float


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _retry(action: Callable[[], bool], deadline_s: float) -> bool:
    """A group of processes that just died stays busy for a moment."""
    until = time.monotonic() + deadline_s
    while not action():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _give(path: str, owner: int) -> None:
    """Let `owner` (the agent) move processes, set the attempt's own memory limit and reset figures."""
    if owner == os.geteuid():
        return
    names = (
        "cgroup.procs",
        "cgroup.kill",
        "cgroup.freeze",
        "memory.max_usage_in_bytes",
        "memory.peak",
        "memory.limit_in_bytes",
        "memory.max",
    )
    os.chown(path, owner, owner)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.chown(f"{path}/{name}", owner, owner)


def _write(path: str, text: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read_int(path: str) -> int | None:
    try:
        text = read_text(path).strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def parse_flat(text: str) -> dict[str, int]:
    """A flat keyed file (`memory.events`, `memory.oom_control`, `cpu.stat`): name → number."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _oom_kills(group: str, v2: bool) -> int | None:
    try:
        return parse_flat(read_text(f"{group}/{'memory.events' if v2 else 'memory.oom_control'}")).get("oom_kill")
    except OSError:
        return None


class JobGroup:
    """The job's groups as the agent uses them. Missing trees are no-ops: figures None, actions False."""

    def __init__(self, config: PodConfig) -> None:
        self._paths = config.cgroups
        memory = config.cgroups.get("memory", "")
        self._memory = memory
        self._memory_v2 = bool(memory) and os.path.exists(f"{memory}/memory.max")

    def join(self) -> None:
        """Move the calling process into the job's groups (it must still own its privileges). Raises: OSError."""
        for path in set(self._paths.values()):
            fd = os.open(f"{path}/cgroup.procs", os.O_WRONLY)
            try:
                os.write(fd, b"0")
            finally:
                os.close(fd)

    def limit(self, memory_bytes: int) -> bool:
        """Lower (or restore) the memory limit of the next attempt; False where the agent may not."""
        name = "memory.max" if self._memory_v2 else "memory.limit_in_bytes"
        return bool(self._memory) and _write(f"{self._memory}/{name}", str(memory_bytes))

    def reset_peak(self) -> bool:
        """Start the peak figure anew."""
        name = "memory.peak" if self._memory_v2 else "memory.max_usage_in_bytes"
        return bool(self._memory) and _write(f"{self._memory}/{name}", "0")

    def peak_bytes(self) -> int | None:
        """Most memory that the job's processes used at once."""
        return (
            _read_int(f"{self._memory}/{'memory.peak' if self._memory_v2 else 'memory.max_usage_in_bytes'}")
            if self._memory
            else None
        )

    def current_bytes(self) -> int | None:
        """Memory in use now."""
        return (
            _read_int(f"{self._memory}/{'memory.current' if self._memory_v2 else 'memory.usage_in_bytes'}")
            if self._memory
            else None
        )

    def cache_bytes(self) -> int:
        """Memory in use that the kernel could take back at once: file pages that nobody has to write first."""
        try:
            figures = parse_flat(read_text(f"{self._memory}/memory.stat"))
        except OSError:
            return 0
        if self._memory_v2:
            return figures.get("file", 0) - figures.get("shmem", 0) - figures.get("file_dirty", 0)
        cache = figures.get("total_cache", 0) - figures.get("total_shmem", figures.get("shmem", 0))
        return max(0, cache - figures.get("total_dirty", 0))

    def oom_kills(self) -> int | None:
        """Processes of jobs that the kernel killed for memory since the pod was made."""
        return _oom_kills(self._memory, self._memory_v2) if self._memory else None

    def kill(self) -> bool:
        """SIGKILL everything in the group at once; False where the kernel has no cgroup.kill."""
        path = self._paths.get("unified")
        return path is not None and _write(f"{path}/cgroup.kill", "1")

    def empty(self) -> bool | None:
        """Whether no process is left in the group; None: cannot say."""
        path = self._paths.get("unified")
        try:
            return parse_flat(read_text(f"{path}/cgroup.events")).get("populated") == 0
        except OSError:
            return None
