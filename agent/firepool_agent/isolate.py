"""Around one attempt: its guard and namespaces before user code exists, and the drop of every privilege right before it runs.

`fork_attempt` makes two processes. The *guard* is PID 1 of the attempt's own PID namespace (where allowed): it runs no user
code, keeps the agent's privileges, passes SIGTERM on, reaps, and tells how the attempt ended over a pipe that the attempt
does not hold, so the exit status cannot be forged. The attempt's own process waits inside until the caller launches it.
Where PID namespaces are not allowed the guard is a sub-reaper instead and the rest is the same.

What a pod is made of lives in `rootfs` and `birth`; what is cleaned afterwards in `reset`.
"""

import contextlib
import json
import os
import resource
import signal
from dataclasses import dataclass
from typing import Any, NoReturn

from firepool_agent import procfs, quickfork, seccomp, syscalls
from firepool_agent.levels import Probe as Probe
from firepool_agent.levels import mount_overlay
from firepool_agent.levels import probe as probe
from firepool_agent.rootfs import passwd
from firepool_agent.scratch import Slot
from firepool_wire.nursery import PodConfig
from firepool_wire.words import Isolation

#: An attempt is the first to go when memory runs out on the whole machine.
_OOM_SCORE = 500
_MAX_OPEN_FILES = 16_384
_LAYERS = "/layers"
_PLAIN = syscalls.MS_NOSUID | syscalls.MS_NODEV


class Uids:
    """Fresh uids, one per attempt, round the pod's block; 0 where the pod has none."""

    def __init__(self, config: PodConfig) -> None:
        self._first, self._count = config.uid_first, config.uid_count
        self._taken = 0

    def next(self) -> int:
        """The uid of the next attempt."""
        if not self._count:
            return 0
        uid = self._first + self._taken % self._count
        self._taken += 1
        return uid


@dataclass(frozen=True, slots=True)
class Child:
    """What the forker holds: the guard's pid in the forker's PID namespace."""

    pid: int


@dataclass(frozen=True, slots=True)
class _Fork:
    """How to fork: whether the caller lives in the job's cgroups already, and whether hooks may be left out."""

    grouped: bool
    quick: bool


@dataclass(frozen=True, slots=True)
class End:
    """How the attempt's own process ended, as its guard saw it."""

    #: Raw wait status (`os.waitstatus_to_exitcode` reads it).
    status: int
    peak_rss_bytes: int
    cpu_s: float
    #: Processes of the attempt that were still there when it ended (killed with the namespace).
    leftovers: int


def read_end(data: bytes) -> End | None:
    """The guard's message; None when the pipe ended without one (the guard itself was killed)."""
    return End(**json.loads(data)) if data else None


@dataclass(frozen=True, slots=True)
class Exposure:
    """What the job shall see besides its slot; paths as the agent sees them."""

    #: Unpacked, read-only package tree that becomes the writable work dir.
    package: str | None = None
    #: Directories shown read-only under /layers (see `layer_path`).
    layers: tuple[str, ...] = ()


def job_paths(config: PodConfig, slot: Slot) -> tuple[str, str, str]:
    """Work dir, home and tmp as the attempt sees them."""
    if config.nested:
        return config.work_dir, config.home_dir, config.tmp_dir
    return slot.work, slot.home, slot.tmp


def layer_path(config: PodConfig, layer: str) -> str:
    """Where the attempt sees a requirements layer that the agent has at `layer`."""
    return f"{_LAYERS}/{os.path.basename(layer)}" if config.nested else layer


def fork_attempt(config: PodConfig, slot: Slot, status_w: int, *, grouped: bool = False) -> Child | None:
    """Fork guard and attempt; returns the guard in the caller and None in the attempt's process (still privileged).

    The caller must be single-threaded; `status_w` is the write end of a pipe for `read_end`, closed in the attempt.
    `grouped`: the caller lives in the job's cgroups, so that its children need not be moved there (10 ms each: the kernel
    waits for an RCU grace period).
    Raises: OSError: in the caller, before anything was forked.
    """
    quick = quickfork.is_quick()
    guard = _fork_in_new_pid_namespace(quick) if config.nested else quickfork.fork(quick)
    if guard:
        return Child(guard)
    _guard(config, slot, status_w, _Fork(grouped, quick))
    return None


def _fork_in_new_pid_namespace(quick: bool) -> int:
    """fork() whose child is PID 1 of a new namespace; the caller's later children land at home again."""
    home = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = -1
        try:
            pid = quickfork.fork(quick)
        finally:
            if pid != 0:
                syscalls.setns(home, syscalls.CLONE_NEWPID)
    finally:
        os.close(home)
    return pid


def _guard(config: PodConfig, slot: Slot, status_w: int, how: _Fork) -> None:
    """The guard's life; returns (None) only in the attempt's own process."""
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        if config.nested:
            syscalls.unshare(syscalls.CLONE_NEWNS)  # the attempt's process fills it: it touches those pages anyway
        else:
            syscalls.become_subreaper()
        os.setsid()
        child = quickfork.fork(how.quick)
    except BaseException as e:  # noqa: BLE001  (a guard must never return into its forker's code)
        os.write(2, f"guard of attempt slot {slot.number}: {e}\n".encode())
        os._exit(70)
    if child:
        _stand_guard(child, status_w)
    try:
        os.close(status_w)
        _approach(config, slot, how.grouped)
    except BaseException as e:  # noqa: BLE001  (nor must an attempt)
        os.write(2, f"attempt in slot {slot.number}: {e}\n".encode())
        os._exit(70)


def _stand_guard(child: int, status_w: int) -> NoReturn:
    code = 70
    try:
        syscalls.set_name("fp-guard")
        signal.signal(signal.SIGTERM, lambda *_: _pass_on(child))
        _close_others(status_w)
        status = _reap_until(child)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        left = _leftovers()
        end = {
            "status": status,
            "peak_rss_bytes": used.ru_maxrss * 1024,
            "cpu_s": round(used.ru_utime + used.ru_stime, 6),
            "leftovers": left,
        }
        os.write(status_w, json.dumps(end).encode())
        code = 0
    finally:
        os._exit(code)


def _pass_on(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)


def _reap_until(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _leftovers() -> int:
    """Living processes of the attempt, besides this guard."""
    try:
        if os.getpid() == 1 and len(procfs.pids()) == 1:
            return 0  # nearly always, and for a third of what looking closer costs
        return sum(1 for p in procfs.descendants(os.getpid(), procfs.processes()) if p.state not in procfs.DEAD)
    except OSError:
        return 0


def _close_others(keep: int) -> None:
    """The guard holds nothing of the attempt's: an open pipe end here would keep a log reader waiting for ever."""
    top = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65_536)
    os.closerange(0, keep)
    os.closerange(keep + 1, top)


def _own_mounts(config: PodConfig, slot: Slot) -> None:
    """Fill the attempt's mount namespace: own /proc, and its slot where programs expect the directories."""
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    kept = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) for path in config.covered]
    for source, target in (
        (slot.work, config.work_dir),
        (slot.home, config.home_dir),
        (slot.tmp, config.tmp_dir),
        (slot.shm, "/dev/shm"),
    ):
        syscalls.bind(source, target)
    for path, handle in kept:
        os.makedirs(path, exist_ok=True)
        syscalls.bind(f"/proc/self/fd/{handle}", path, read_only=True, recursive=True)
        os.close(handle)
    if slot.uid:
        named = f"{slot.root}/passwd"
        with open(named, "w") as f:
            f.write(passwd(slot.uid))
        os.chmod(named, 0o644)
        syscalls.bind(named, "/etc/passwd", read_only=True)


def _approach(config: PodConfig, slot: Slot, grouped: bool) -> None:
    """What an attempt's process can have behind it while it still waits, so that nobody waits for it at launch."""
    if config.nested:
        _own_mounts(config, slot)
    if not grouped:
        _join_groups(config)
    _raise_oom_score()
    _limit_resources(config)
    with contextlib.suppress(OSError):  # kernels without keyrings have nothing to share
        syscalls.new_session_keyring()
    seccomp.default_profile(deny_tracing=not config.nested)


def enter_attempt(config: PodConfig, slot: Slot, exposure: Exposure = Exposure()) -> None:
    """Become the job: show it its package and layers, then drop everything. Called in the attempt's process right before
    user code; the order matters, since every step needs a privilege that a later one gives up.

    Raises: OSError: a step was refused; nothing of the user's has run, and the process must exit.
    """
    work, _home, _tmp = job_paths(config, slot)
    _expose(config, slot, exposure)
    if config.nested:
        hide(config.agent_dir)
    os.chdir(work)
    if config.isolation == Isolation.NAMESPACES:
        syscalls.drop_bounding_set()
    _become(slot.uid)
    if config.isolation == Isolation.NAMESPACES:
        syscalls.set_capabilities(0)
    # A change of uid made the process undumpable: it could not open its own /proc/self/fd/1 (/dev/stdout).
    syscalls.set_dumpable(True)
    syscalls.die_with_parent(signal.SIGKILL)  # a change of uid cleared it too
    syscalls.no_new_privileges()
    profile = seccomp.default_profile(deny_tracing=not config.nested)
    if profile is not None:
        syscalls.set_seccomp_filter(profile)


def _expose(config: PodConfig, slot: Slot, exposure: Exposure) -> None:
    """Package and layers where the job looks for them. The job owns what it sees of its package, and never its cache."""
    if exposure.package is not None and config.nested:
        upper, room = f"{slot.overlay}/upper", f"{slot.overlay}/room"
        for path in (upper, room):
            os.mkdir(path, 0o755)
            if slot.uid:
                os.chown(path, slot.uid, slot.uid)
        _give_tree(exposure.package, slot.uid)
        mount_overlay(exposure.package, upper, room, config.work_dir)
    elif exposure.package is not None:
        import shutil  # with its archive formats a megabyte that every fork would copy

        shutil.copytree(exposure.package, slot.work, dirs_exist_ok=True)
        _give_tree(slot.work, slot.uid)
    if not config.nested:
        return  # layers are readable where they are
    if exposure.layers:
        syscalls.mount("tmpfs", _LAYERS, "tmpfs", _PLAIN, "size=64k,mode=755")
        for path in exposure.layers:
            os.mkdir(layer_path(config, path))
            syscalls.bind(path, layer_path(config, path), read_only=True)
        syscalls.mount(None, _LAYERS, None, syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _PLAIN)


def _give_tree(path: str, uid: int) -> None:
    """Make a tree `uid`'s. Under an overlay it may then change everything, and every change goes to its own slot."""
    if not uid or os.stat(path).st_uid == uid:
        return
    for directory, _names, files in os.walk(path):
        for name in files:
            os.chown(f"{directory}/{name}", uid, uid, follow_symlinks=False)
        os.chown(directory, uid, uid)


def _join_groups(config: PodConfig) -> None:
    for path in set(config.cgroups.values()):
        fd = os.open(f"{path}/cgroup.procs", os.O_WRONLY)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)


def hide(path: str) -> None:
    """Cover a directory with an empty one that cannot be written (in the attempt's mount namespace only)."""
    syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_RDONLY | _PLAIN, "size=4k,mode=000")


def _raise_oom_score() -> None:
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, str(_OOM_SCORE).encode())
        finally:
            os.close(fd)


def _limit_resources(config: PodConfig) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    if config.uid_count:
        _lower(resource.RLIMIT_NPROC, config.pids_limit)


def _lower(what: int, value: int) -> None:
    _soft, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _become(uid: int) -> None:
    if not uid:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def describe(config: PodConfig) -> dict[str, Any]:
    """Level of this pod in words, for `hello` and `doctor`."""
    return {
        "isolation": config.isolation,
        "why": config.isolation_why,
        "nested": config.nested,
        "uids": config.uid_count,
    }
