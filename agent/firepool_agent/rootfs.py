"""A pod's own file tree, built inside its fresh mount namespace: a small tmpfs with the host's base environment shown
read-only, own /proc, /dev and /etc, and the interpreters at their own absolute paths.

The host's files appear as they are, so nothing is copied; what the pod may write are its sized file systems under the
agent's directory. What runs inside, and when, is `birth`'s business.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from firepool_agent.syscalls import (
    MNT_DETACH,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    bind,
    mount,
    pivot_root,
    umount,
)

AGENT_DIR = "/run/firepool"
#: Not `/work`, `/app` or the like: those are where people keep the projects whose interpreters are shown at their own paths.
WORK, HOME, TMP = "/job", "/home/job", "/tmp"
#: Parts of /etc that programs read and that say nothing about the host's people.
_ETC = (
    "ssl",
    "pki",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "mime.types",
    "protocols",
    "services",
    "debian_version",
    "os-release",
    "fonts",
)
_BASE = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/opt")
_SYS = ("/sys/devices", "/sys/class", "/sys/bus", "/sys/dev")
#: Where jobs write what simulated cards pretend to hold.
CARDS = "/dev/cards"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_RESOLVED = "/run/systemd/resolve/resolv.conf"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pod's tree shows besides the base."""

    #: An existing, empty directory of the host to build on.
    staging: str
    hostname: str
    address: str
    #: Directories shown read-only at their own path.
    roots: tuple[str, ...]
    #: Host directory (disk) that becomes the agent's caches.
    caches: str
    #: Bytes of the scratch and of the unpack file systems.
    scratch_bytes: int
    unpack_bytes: int
    #: Cgroup directories of the host by controller.
    cgroups: dict[str, str]
    #: Device files to show besides the common ones (/dev/nvidia0, …).
    devices: tuple[str, ...]
    #: uid of jobs is not 0: they get a passwd line each; else they are root without privileges.
    uid_first: int
    uid_count: int


def open_sources(plan: Plan) -> dict[str, int]:
    """Handles on what is to be shown, opened while the caller still has the host's uid: a fresh uid cannot walk through a
    0700 home. Must run in the new mount namespace (a handle from the old one cannot be bound). Raises: OSError."""
    wanted = {plan.staging, plan.caches, *plan.roots, *plan.cgroups.values()}
    return {path: os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in wanted}


def build(plan: Plan, sources: Mapping[str, int]) -> dict[str, str]:
    """Build the tree and make it `/` of this mount namespace; returns the pod's cgroup paths. Must run as root of the
    namespaces' owner; closes `sources`. Raises: OSError that names the mount."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", _handle(sources, plan.staging), "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    # The handle shows the directory below the mount, the path (reachable by anyone) what lies on it.
    root = plan.staging
    os.mkdir(root + TMP)
    # The agent's and the zygote's own /tmp; every attempt has another one over it.
    mount("tmpfs", root + TMP, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=1777")
    for path in _BASE:
        _show(root, path)
    for path in plan.roots:
        _show_root(root, path, _handle(sources, path))
    for path in _SYS:
        _show(root, path)
    _etc(root, plan)
    _dev(root, plan.devices)
    os.makedirs(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path, mode in (
        (WORK, 0o755),
        (HOME, 0o755),
        (TMP, 0o1777),
        ("/layers", 0o755),
        ("/var/tmp", 0o755),
        ("/root", 0o755),
    ):
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, mode)
    groups = _agent_dir(root, plan, sources)
    for fd in sources.values():
        os.close(fd)
    _pivot(root)
    return groups


def _handle(sources: Mapping[str, int], path: str) -> str:
    return f"/proc/self/fd/{sources[path]}"


def _show(root: str, path: str) -> None:
    """Make a path of the host visible read-only at the same place: links as links, directories and files bound."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(path), target)
        return
    if not os.path.exists(path):
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    bind(path, target, read_only=True)


def _show_root(root: str, path: str, handle: str) -> None:
    """Show an interpreter's directory; it may be visible already (below /usr: the same directory behind both names)."""
    target = root + path
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(handle), os.stat(target)):
            return
    os.makedirs(target, exist_ok=True)
    bind(handle, target, read_only=True, recursive=True)


def _write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)


def _etc(root: str, plan: Plan) -> None:
    etc = f"{root}/etc"
    os.makedirs(etc)
    for name in _ETC:
        _show(root, f"/etc/{name}")
    _write(f"{etc}/passwd", passwd(plan.uid_first if plan.uid_count else 0))
    _write(f"{etc}/group", f"root:x:0:\njob:x:{plan.uid_first}:\nnogroup:x:65534:\n")
    _write(f"{etc}/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    _write(f"{etc}/hostname", f"{plan.hostname}\n")
    own_name = f"{plan.address} {plan.hostname}\n" if plan.address else f"127.0.1.1 {plan.hostname}\n"
    _write(f"{etc}/hosts", f"127.0.0.1 localhost\n::1 localhost\n{own_name}")
    _write(f"{etc}/resolv.conf", _resolvers())


def passwd(uid: int) -> str:
    """/etc/passwd in which `uid` is the job's user (the first line with a uid is the one that programs find)."""
    job = f"job:x:{uid}:{uid}:Firepool job:{HOME}:/bin/sh\n"
    root, nobody = "root:x:0:0:root:/root:/bin/sh\n", "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
    return f"{root}{job}{nobody}" if uid else f"{job}{root}{nobody}"


def _resolvers() -> str:
    """The host's resolvers; a stub that listens on the host's loopback only is replaced by what it asks itself."""
    for path in (_RESOLVED, "/etc/resolv.conf"):
        with contextlib.suppress(OSError), open(path) as f:
            return f.read()
    return ""


def _dev(root: str, devices: tuple[str, ...]) -> None:
    dev = f"{root}/dev"
    os.makedirs(f"{dev}/shm")
    os.makedirs(f"{dev}/pts")
    for path in (*(f"/dev/{name}" for name in _DEVICES), *devices):
        if os.path.exists(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o666))
            bind(path, root + path)
    os.symlink("/proc/self/fd", f"{dev}/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(root + CARDS)
    mount("tmpfs", root + CARDS, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,mode=1777")
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def _agent_dir(root: str, plan: Plan, sources: Mapping[str, int]) -> dict[str, str]:
    base = root + AGENT_DIR
    os.makedirs(base)
    # Attempts find an empty directory over it; a build of requirements, as a uid of its own, must reach its room in `caches`.
    os.chmod(base, 0o711)
    for name, size in (("scratch", plan.scratch_bytes), ("unpack", plan.unpack_bytes), ("state", plan.unpack_bytes)):
        os.mkdir(f"{base}/{name}")
        mount("tmpfs", f"{base}/{name}", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=700")
    os.mkdir(f"{base}/caches")
    bind(_handle(sources, plan.caches), f"{base}/caches")
    os.mkdir(f"{base}/mqueue")
    with contextlib.suppress(OSError):  # kernels without POSIX queues have none to leave behind
        mount("mqueue", f"{base}/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{base}/cgroup", 0o700)
    groups = {}
    for controller, path in plan.cgroups.items():
        os.makedirs(f"{base}/cgroup/{controller}")
        bind(_handle(sources, path), f"{base}/cgroup/{controller}")
        groups[controller] = f"{AGENT_DIR}/cgroup/{controller}"
    return groups


def _pivot(root: str) -> None:
    os.mkdir(f"{root}/.old")
    os.chdir(root)
    pivot_root(".", ".old")
    os.chdir("/")
    umount("/.old", MNT_DETACH)
    os.rmdir("/.old")
    # Nobody changes the tree itself any more, a job that is this namespace's only uid included.
    mount(None, "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
