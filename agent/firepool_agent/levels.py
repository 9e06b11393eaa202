"""Which level of isolation this machine and user can give, why not more, and the one line that would change it.

Levels (`design.md` §4.6), strongest first: `namespaces`, `uid`, `process`, `portable`. The answer comes from trying, in a
child process, never from reading version numbers. `FIREPOOL_ISOLATION_MAX` lowers the ceiling (to try weaker levels out).
`firepool-agent probe` prints the answer as JSON; that is what `firepool doctor` asks.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from firepool_agent import syscalls
from firepool_wire.words import STRENGTH, Isolation

CEILING = "FIREPOOL_ISOLATION_MAX"


@dataclass(frozen=True, slots=True)
class Probe:
    """What this machine can do for whoever runs this process."""

    level: str
    #: Why not the next stronger level ("" at the strongest).
    why: str = ""
    #: One line that would lift it ("" when nothing is to be done).
    fix: str = ""
    #: Facts that the level does not show: root, nested PID namespaces, overlay, user ids, own network.
    facts: dict[str, bool] = field(default_factory=dict)

    def reaches(self, wanted: str) -> bool:
        """Whether a pod that demands at least `wanted` can be made here."""
        return STRENGTH[Isolation(self.level)] >= STRENGTH[Isolation(wanted)]


def probe() -> Probe:
    """Try the levels from the strongest down. Takes a few milliseconds; ask once per process."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/stat"):
        return Probe(Isolation.PORTABLE, "no /proc: processes cannot be proven gone", "run on Linux with /proc mounted")
    root = os.geteuid() == 0
    ceiling = _ceiling()
    facts = {"root": root}
    if ceiling is Isolation.NAMESPACES:
        refused = _attempt(_try_namespaces)
        if refused is None:
            facts["overlay"] = _attempt(_try_overlay) is None
            facts["own_network"] = root and _attempt(_try_network) is None
            facts["many_uids"] = root
            why = (
                "" if root else "one user id per pod (not root): the job's files are its agent's, held apart by mounts"
            )
            return Probe(
                Isolation.NAMESPACES, why, "" if root else "run the broker as root for fresh uids per attempt", facts
            )
        why, fix = f"user namespaces: {refused}", _namespace_fix()
    else:
        why, fix = f"{CEILING}={ceiling} is set", f"unset {CEILING}"
    if ceiling is Isolation.PORTABLE:
        return Probe(Isolation.PORTABLE, why, fix, facts)
    if root and STRENGTH[ceiling] >= STRENGTH[Isolation.UID]:
        refused = _attempt(_try_uids)
        if refused is None:
            return Probe(Isolation.UID, why, fix, facts)
        why = f"{why}; other uids: {refused}"
    elif not root:
        why = f"{why}; not root: no other uids"
    return Probe(Isolation.PROCESS, why, fix, facts)


def _ceiling() -> Isolation:
    text = os.environ.get(CEILING, "").strip()
    return Isolation(text) if text else Isolation.NAMESPACES


def _namespace_fix() -> str:
    """The setting that most likely denies user namespaces, as the command that lifts it."""
    settings = (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    )
    for path, denying, fix in settings:
        try:
            with open(path) as f:
                if f.read().strip() == denying:
                    return fix
        except OSError:
            continue
    return "allow user namespaces (in a container: run it with --security-opt seccomp=unconfined, or as root)"


def _attempt(trial: Callable[[], None]) -> str | None:
    """Run `trial` in a child; None when it worked, else what it said."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trial()
            code = 0
        except OSError as e:
            os.write(write_end, str(e).encode()[:500])
        except BaseException:  # noqa: BLE001  (a child must never return into the caller's code)
            os.write(write_end, traceback.format_exc().encode()[:500])
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as f:
        said = f.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return None if status == 0 else said or f"trial ended with status {status}"


def enter_user_namespace(more: int) -> None:
    """New user namespace with only our own uid in it (as its root), and the namespaces `more`. Raises: OSError."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | more)
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        fd = os.open(f"/proc/self/{path}", os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _in_new_init(inner: Callable[[], None], more: int) -> None:
    """Run `inner` as PID 1 of new namespaces; its OSError comes out here."""
    enter_user_namespace(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | more)
    refused = _attempt(inner)
    if refused is not None:
        raise OSError(refused)


def _mount_own_proc() -> None:
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)


def _nested_proc() -> None:
    _mount_own_proc()
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
    refused = _attempt(_mount_own_proc)
    if refused is not None:
        raise OSError(f"nested: {refused}")


def _try_namespaces() -> None:
    _in_new_init(_nested_proc, syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS)


def _try_network() -> None:
    enter_user_namespace(syscalls.CLONE_NEWNET)


def _try_overlay() -> None:
    def inner() -> None:
        syscalls.mount("tmpfs", "/tmp", "tmpfs", 0, "size=1m")
        for name in ("lower", "upper", "room", "merged"):
            os.mkdir(f"/tmp/{name}")
        mount_overlay("/tmp/lower", "/tmp/upper", "/tmp/room", "/tmp/merged")
        with open("/tmp/merged/x", "w") as f:
            f.write("x")

    _in_new_init(inner, 0)


def mount_overlay(lower: str, upper: str, room: str, target: str) -> None:
    """Overlay as a user namespace may mount it (`userxattr`). Raises: OSError."""
    syscalls.mount("overlay", target, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={room},userxattr")


def _try_uids() -> None:
    """Another uid must be ours to take, and it must be able to import from this interpreter."""
    os.setgroups([])
    os.setresgid(60_000, 60_000, 60_000)
    os.setresuid(60_000, 60_000, 60_000)
    os.listdir(os.path.dirname(os.__file__))
