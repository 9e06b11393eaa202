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
from dataclasses import dataclass
from ipaddress import IPv4Interface
from typing import NoReturn

from firepool_agent import rootfs, syscalls
from firepool_agent.furnish import IDS_PER_POD, Given, Inherited, Order, move_in, plan_of, settle_in
from firepool_wire.errors import FirepoolError, Internal
from firepool_wire.nursery import PodConfig
from firepool_wire.words import Isolation

Serve = Callable[[PodConfig], int]

_HANDSHAKE_S = 10.0


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
        inner = _Inner(order, serve, Inherited(listener.fileno(), ready_w), trouble_w)
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
    """What the child needs of its parent: the order and its inherited descriptors."""

    order: Order
    serve: Serve
    fds: Inherited
    trouble: int


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
        keep = {inner.fds.listen, inner.trouble, inner.fds.ready, up, down}
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
        sources = rootfs.open_sources(plan_of(order))
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
            _live(inner, down, Given(IPv4Interface(address) if address != "-" else None, sources))
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


def _live(inner: _Inner, go: int, given: Given | None) -> NoReturn:
    """The agent's process from its first moment: wait for the nursery, build the tree, serve, exit."""
    code = 1
    try:
        if given is None:
            _become_clean(inner.order.log, {inner.fds.listen, inner.trouble, inner.fds.ready, go})
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
            config = settle_in(inner.order, given, inner.fds) if given else move_in(inner.order, inner.fds)
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
