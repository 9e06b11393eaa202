"""The birth of one pod: fork, namespaces, the file tree around the child, and the agent's first call. Nursery side.

At level `namespaces` two processes are forked: a midwife that leaves the host's namespaces (its uid map and its network are
set from outside while it waits) and, as PID 1 of the new PID namespace, the agent. The midwife exits at once; the agent
then belongs to the nursery and dies with it. At the weaker levels the agent is a plain child with directories of its own.
Nothing is exec'd: the agent starts with everything that the nursery had imported.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface
from typing import Any, NoReturn

from firepool_agent import network, rootfs, syscalls
from firepool_wire.errors import FirepoolError, Internal
from firepool_wire.nursery import PodConfig, PodWish
from firepool_wire.words import Isolation

Serve = Callable[[PodConfig], int]

#: uids of one pod: a user namespace of this size, so that pods share no per-user limit and no keyring.
IDS_PER_POD = 65_536
#: Inside a user namespace attempts get these; K (the last one) owns no process.
_FIRST_JOB_UID, _KILLER_UID = 1_000, 65_530
_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that is decided before the fork."""

    wish: PodWish
    level: str
    why: str
    boot_id: str
    #: First host uid of the pod's block (0: this user cannot give uids away).
    uid_base: int
    #: Host paths: the agent's socket, its log, its caches (disk), and at weaker levels its directories.
    socket: str
    log: str
    caches: str
    pod_dir: str
    #: Job interpreter and the directories that have to be visible.
    python: str
    roots: tuple[str, ...]
    staging: str
    scratch_bytes: int
    cgroups: dict[str, str]
    devices: tuple[str, ...] = ()
    gateway: IPv4Address | None = None


@dataclass(slots=True)
class Born:
    """A pod under way: its agent's host pid and the pipes that tell of it."""

    pid: int
    pidfd: int
    #: JSON of an error when the tree could not be built; end of file otherwise.
    trouble: int
    #: One byte once the agent answers calls.
    ready: int
    address: str = ""
    fds: tuple[int, ...] = field(default=())


def bear(order: Order, serve: Serve, attach: Callable[[int], IPv4Interface] | None) -> Born:
    """Make the pod's processes; returns as soon as the agent exists (its tree is still being built).

    Args:
        order: what to make.
        serve: the agent's life, called in the child.
        attach: gives the network namespace of a pid its interface; None = no network of its own.

    Raises:
        FirepoolError: refused; nothing is left.
    """
    with contextlib.ExitStack() as ours:
        listener = _listen(order.socket)
        ours.callback(listener.close)
        trouble_r, trouble_w = os.pipe()
        ready_r, ready_w = os.pipe()
        ours.callback(os.close, trouble_w)
        ours.callback(os.close, ready_w)
        inner = _Inner(order, serve, listener.fileno(), trouble_w, ready_w)
        try:
            if order.level == Isolation.NAMESPACES:
                pid, address, go = _bear_in_namespaces(inner, attach)
            else:
                pid, address, go = _bear_plain(inner)
        except BaseException as e:
            os.close(trouble_r)
            os.close(ready_r)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(order.socket)
            if isinstance(e, OSError):
                raise Internal(f"pod {order.wish.name} could not be made: {e}") from e
            raise
        born = Born(pid, os.pidfd_open(pid), trouble_r, ready_r, str(address.ip) if address else "")
        os.write(go, b"g")
        os.close(go)
        return born


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(256)
    return listener


@dataclass(frozen=True, slots=True)
class _Inner:
    """What the child needs of its parent: the order and three inherited descriptors."""

    order: Order
    serve: Serve
    listen_fd: int
    trouble: int
    ready: int


def _bear_plain(inner: _Inner) -> tuple[int, None, int]:
    go_r, go_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(inner, go_r, None)
    os.close(go_r)
    return pid, None, go_w


def _bear_in_namespaces(
    inner: _Inner, attach: Callable[[int], IPv4Interface] | None
) -> tuple[int, IPv4Interface | None, int]:
    up_r, up_w = os.pipe()
    down_r, down_w = os.pipe()
    try:
        midwife = os.fork()
        if midwife == 0:
            _midwife(inner, up_w, down_r)
        os.close(up_w)
        up_w = -1
        try:
            _expect(up_r, b"u")
            if inner.order.uid_base:
                _map_ids(midwife, inner.order.uid_base)
            address = attach(midwife) if attach else None
            os.write(down_w, (str(address) if address else "-").encode().ljust(32))
            pid = int(_expect(up_r, None))
        finally:
            _reap(midwife)
    except BaseException:
        os.close(down_w)
        raise
    finally:
        for fd in (up_r, down_r, up_w):
            if fd >= 0:
                os.close(fd)
    return pid, address, down_w


def _expect(fd: int, exact: bytes | None) -> bytes:
    """One message of the midwife. Raises: OSError: it failed (its words), or says nothing."""
    readable, _, _ = select.select([fd], [], [], _HANDSHAKE_S)
    said = os.read(fd, 4096) if readable else b"!the kernel did not answer in time"
    if not said or said.startswith(b"!") or (exact is not None and said != exact):
        raise OSError(said[1:].decode(errors="replace") or "the child ended before it could say why")
    return said


def _map_ids(pid: int, base: int) -> None:
    for name in ("uid_map", "gid_map"):
        fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        try:
            os.write(fd, f"0 {base} {IDS_PER_POD}".encode())
        finally:
            os.close(fd)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _midwife(inner: _Inner, up: int, down: int) -> NoReturn:
    """Leave the host's namespaces, become root inside, fork the agent, tell its pid and go."""
    code = 1
    try:
        order = inner.order
        keep = {inner.listen_fd, inner.trouble, inner.ready, up, down}
        _become_clean(order.log, keep)
        os.setsid()
        flags = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
        flags |= syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
        if order.wish.network != "host":
            flags |= syscalls.CLONE_NEWNET
        uid, gid = os.geteuid(), os.getegid()
        syscalls.unshare(flags)
        if not order.uid_base:
            _map_self(uid, gid)
        sources = rootfs.open_sources(_plan(order))
        os.write(up, b"u")
        address = os.read(down, 32).decode().strip()
        if not address:
            raise OSError("the nursery went away")
        if order.uid_base:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        agent = os.fork()
        if agent == 0:
            os.close(up)
            _live(inner, down, _Given(IPv4Interface(address) if address != "-" else None, sources))
        os.write(up, str(agent).encode())
        code = 0
    except BaseException as e:  # noqa: BLE001  (a fork of the nursery must never return into its loop)
        with contextlib.suppress(OSError):
            os.write(up, f"!{e}".encode()[:4000])
    finally:
        os._exit(code)


def _map_self(uid: int, gid: int) -> None:
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{path}", "w") as f:
            f.write(text)


def _become_clean(log: str, keep: set[int]) -> None:
    """Forget the nursery: its descriptors, its signal handlers, its terminal."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)  # layers and packages are read by other uids, whatever the broker's own taste
    null = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 65_536)


@dataclass(frozen=True, slots=True)
class _Given:
    """What the midwife hands on: the pod's address and handles on what its tree will show."""

    address: IPv4Interface | None
    sources: dict[str, int]


def _live(inner: _Inner, go: int, given: _Given | None) -> NoReturn:
    """The agent's process from its first moment: wait for the nursery, build the tree, serve, exit."""
    code = 1
    try:
        if given is None:
            _become_clean(inner.order.log, {inner.listen_fd, inner.trouble, inner.ready, go})
            os.setsid()
        if sys.platform == "linux":
            syscalls.become_subreaper()
        # The midwife is gone once the byte is here (its end must not be the agent's); were the nursery gone too, there
        # would be none.
        if os.read(go, 1) != b"g":
            os._exit(1)
        os.close(go)
        if sys.platform == "linux":
            syscalls.die_with_parent(signal.SIGKILL)
            syscalls.set_name(f"fp-{inner.order.wish.name}")
        try:
            config = _settle_in(inner, given) if given else _move_in(inner)
        except OSError as e:
            error = Internal(f"pod {inner.order.wish.name}: {e}")
            os.write(inner.trouble, json.dumps(error.to_json()).encode())
            os._exit(1)
        except FirepoolError as e:
            os.write(inner.trouble, json.dumps(e.to_json()).encode())
            os._exit(1)
        os.close(inner.trouble)
        code = inner.serve(config)
    except BaseException:  # noqa: BLE001  (a fork of the nursery must never return into its loop)
        traceback.print_exc()
    finally:
        os._exit(code)


def _job_uids(order: Order) -> tuple[int, int]:
    return (_FIRST_JOB_UID, _KILLER_UID - _FIRST_JOB_UID) if order.uid_base else (0, 0)


def _plan(order: Order, address: str = "") -> rootfs.Plan:
    uid_first, uid_count = _job_uids(order)
    return rootfs.Plan(
        staging=order.staging,
        hostname=order.wish.name[:63],
        address=address,
        roots=order.roots,
        caches=order.caches,
        scratch_bytes=order.scratch_bytes,
        unpack_bytes=order.scratch_bytes,
        cgroups=order.cgroups,
        devices=order.devices,
        uid_first=uid_first,
        uid_count=uid_count,
    )


def _settle_in(inner: _Inner, given: _Given) -> PodConfig:
    """Build the pod's tree and network; the config as the agent will see it."""
    order = inner.order
    plan = _plan(order, str(given.address.ip) if given.address else "")
    socket.sethostname(plan.hostname)
    own_network = order.wish.network != "host"
    if own_network:
        network.configure(given.address, order.gateway if given.address else None)
    uid_first, uid_count = _job_uids(order)
    groups = rootfs.build(plan, given.sources)
    base = rootfs.AGENT_DIR
    return PodConfig(
        **_common(inner),
        agent_dir=base,
        state_dir=f"{base}/state",
        caches_dir=f"{base}/caches",
        unpack_dir=f"{base}/unpack",
        scratch_dir=f"{base}/scratch",
        scratch_bytes=order.scratch_bytes,
        work_dir=rootfs.WORK,
        home_dir=rootfs.HOME,
        tmp_dir=rootfs.TMP,
        uid_first=uid_first,
        uid_count=uid_count,
        uid_killer=_KILLER_UID if uid_count else 0,
        nested=True,
        covered=[r for r in order.roots if any(r.startswith(f"{d}/") for d in (rootfs.WORK, rootfs.HOME, rootfs.TMP))],
        cgroups=groups,
        hostname=plan.hostname,
        address=plan.address,
        own_network=own_network,
    )


def _move_in(inner: _Inner) -> PodConfig:
    """Directories instead of a tree of its own. What the job must read lies outside of the agent's private one."""
    order = inner.order
    base = order.pod_dir
    for name, mode in (
        ("agent", 0o700),
        ("agent/state", 0o700),
        ("caches", 0o711),
        ("unpack", 0o711),
        ("scratch", 0o711),
    ):
        os.makedirs(f"{base}/{name}", exist_ok=True)
        os.chmod(f"{base}/{name}", mode)
    uids = order.level == Isolation.UID
    count = IDS_PER_POD - 1 if uids else 0
    return PodConfig(
        **_common(inner),
        agent_dir=f"{base}/agent",
        state_dir=f"{base}/agent/state",
        caches_dir=f"{base}/caches",
        unpack_dir=f"{base}/unpack",
        scratch_dir=f"{base}/scratch",
        work_dir="",
        home_dir="",
        tmp_dir="",
        uid_first=order.uid_base if uids else 0,
        uid_count=count,
        uid_killer=order.uid_base + count if uids else 0,
        cgroups=order.cgroups,
        hostname=socket.gethostname(),
    )


def _common(inner: _Inner) -> dict[str, Any]:
    order, wish = inner.order, inner.order.wish
    return {
        "pod": wish.name,
        "sku": wish.sku,
        "listen_fd": inner.listen_fd,
        "socket": order.socket,
        "ready_fd": inner.ready,
        "boot_id": order.boot_id,
        "isolation_wanted": wish.isolation,
        "isolation": order.level,
        "isolation_why": order.why,
        "memory_limit_bytes": wish.memory_limit_bytes,
        "pids_limit": wish.pids_limit,
        "cpus": wish.cpus,
        "python": order.python,
        "preload": wish.preload,
        "cards": wish.cards,
        "settings": wish.settings,
    }
