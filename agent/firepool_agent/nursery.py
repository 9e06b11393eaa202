"""The nursery: one warm, single-threaded process per broker home that makes pods and sees them out.

It has its own session and outlives its broker: pods keep running through a broker's crash, and the next broker finds them
here with their annotations. Without a broker for `orphan_timeout_s` it ends everything itself. It holds no jobs and no
secrets; what a pod is made of is `birth`'s and `rootfs`'s business, what it does the agent's.

    python -m firepool_agent.nursery --home DIR --run DIR [--orphan-timeout-s N] [--serve module:function]
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import stat
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firepool_agent import birth, cgroups, gpu, interpreter, levels, network, procfs, syscalls
from firepool_wire.errors import FirepoolError, Internal, IsolationUnavailable
from firepool_wire.nursery import NURSERY_VERSION, PodState, PodWish
from firepool_wire.version import FIREPOOL
from firepool_wire.words import Isolation

#: Longest path that a Unix socket address can hold.
_SOCKET_PATH = 100
_UID_FIRST = 1 << 30
_PODS_PER_NURSERY = 256


@dataclass(slots=True)
class _Pod:
    """A pod and what the nursery holds for it."""

    state: PodState
    born: birth.Born
    pod_dir: str
    number: int
    ready_at: float
    why: str = ""
    started: float = field(default_factory=time.monotonic)


class Nursery:
    """The loop and its pods. One broker is connected at a time; the newest wins."""

    def __init__(self, home: str, run: str, serve: birth.Serve, orphan_timeout_s: float) -> None:
        self._home, self._run, self._serve = home, run, serve
        self._orphan_timeout_s = orphan_timeout_s
        self._selector = selectors.DefaultSelector()
        self._probe = levels.probe()
        #: One nursery per run directory: what it leaves when it is killed bears this name, and the next one removes it.
        tag = f"{zlib.crc32(run.encode()):08x}"
        self._tag = tag
        root = os.geteuid() == 0
        self._site = cgroups.Site.find(f"firepool-{tag}") if root else cgroups.Site()
        self._bridge: network.Bridge | None = None
        self._network_note = ""
        self._pods: dict[str, _Pod] = {}
        #: Pods that ended while nobody listened, by name, until the broker forgets them.
        self._ended: dict[str, dict[str, Any]] = {}
        self._interpreters: dict[str, interpreter.Interpreter] = {}
        self._uid_block = (int(tag, 16) % 128) * _PODS_PER_NURSERY
        self._peer: socket.socket | None = None
        self._buffer = b""
        self._orphan_since: float | None = time.monotonic()
        self._ending = False
        #: An empty directory that any uid can reach; every pod mounts its own tree on it, in its own mount namespace.
        self._reachable = _reachable_directory(tag)
        self.staging = f"{self._reachable}/root"

    # -- life ----------------------------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        """Serve until told to end or orphaned too long; every pod is verified gone when this returns."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        os.makedirs(self.staging, mode=0o755, exist_ok=True)
        gc.freeze()
        try:
            while not (self._ending and not self._pods):
                for key, _ in self._selector.select(self._timeout()):
                    key.data()
                self._pass_time()
        finally:
            self._tear_down()

    def _timeout(self) -> float | None:
        now = time.monotonic()
        waits = [p.ready_at - now for p in self._pods.values() if not p.state.ready and p.ready_at > now]
        if self._orphan_since is not None:
            waits.append(self._orphan_since + self._orphan_timeout_s - now)
        return max(0.0, min(waits)) if waits else None

    def _pass_time(self) -> None:
        now = time.monotonic()
        for pod in self._pods.values():
            if not pod.state.ready and pod.born.ready == -1 and not pod.state.ending and now >= pod.ready_at:
                self._tell_ready(pod)
        if self._orphan_since is not None and now - self._orphan_since >= self._orphan_timeout_s:
            self.end()

    def end(self) -> None:
        """Unmake every pod; `run` returns when the last one is gone."""
        self._ending = True
        self._orphan_since = None
        for name in list(self._pods):
            self._unmake(name, "the nursery ends")

    def _tear_down(self) -> None:
        for pod in list(self._pods.values()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pod.born.pidfd, signal.SIGKILL)
        until = time.monotonic() + 10
        while self._pods and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                key.data()
        if self._bridge is not None:
            self._bridge.close()
        self._site.close()
        for path in (self.staging, self._reachable):
            with contextlib.suppress(OSError):
                os.rmdir(path)
        self._say({"is": "over"})

    # -- the broker ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        self._hang_up()
        peer.settimeout(5.0)  # a broker that hangs must not hang its pods' keeper
        self._peer, self._buffer, self._orphan_since = peer, b"", None
        self._selector.register(peer, selectors.EVENT_READ, self._hear)

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._selector.unregister(self._peer)
            self._peer.close()
            self._peer = None
            self._orphan_since = time.monotonic()

    def _hear(self) -> None:
        assert self._peer is not None
        try:
            data = self._peer.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                # One broken request must not cost every pod on this machine its keeper.
                error = Internal(f"the nursery cannot read {line[:200]!r}: {type(e).__name__}: {e}")
                self._say({"is": "refused", "name": "", "error": error.to_json()})

    def _say(self, message: dict[str, Any]) -> None:
        if self._peer is None:
            return
        try:
            self._peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._hang_up()

    def _obey(self, ask: dict[str, Any]) -> None:
        match ask.get("do"):
            case "hello":
                self._say(
                    {
                        "is": "hello",
                        "pid": os.getpid(),
                        "version": NURSERY_VERSION,
                        "firepool": FIREPOOL,
                        **self._abilities(),
                    }
                )
            case "make":
                self._answer_make(PodWish.from_json(ask["wish"]))
            case "unmake":
                self._unmake(str(ask["name"]), str(ask.get("why", "")))
            case "annotate":
                self._annotate(str(ask["name"]), ask["set"])
            case "list":
                self._say(
                    {
                        "is": "pods",
                        "pods": [p.state.to_json() for p in self._pods.values()],
                        "ended": list(self._ended.values()),
                    }
                )
            case "forget":
                for name in ask["names"]:
                    self._ended.pop(name, None)
            case "end":
                self.end()
            case other:
                self._say(
                    {"is": "refused", "name": "", "error": Internal(f"the nursery does not know {other!r}").to_json()}
                )

    def _abilities(self) -> dict[str, Any]:
        return {
            "isolation": self._probe.level,
            "why": self._probe.why,
            "fix": self._probe.fix,
            "facts": self._probe.facts,
            "cgroups": sorted(self._site.parents),
            "network_note": self._network_note,
            "cards": [card.to_json() for card in gpu.find_cards()],
        }

    def _annotate(self, name: str, changes: dict[str, str | None]) -> None:
        pod = self._pods.get(name)
        if pod is None:
            return
        for key, value in changes.items():
            if value is None:
                pod.state.annotations.pop(key, None)
            else:
                pod.state.annotations[key] = value

    # -- making --------------------------------------------------------------------------------------------------

    def _answer_make(self, wish: PodWish) -> None:
        try:
            pod = self._pods.get(wish.name) or self._make(wish)
            self._say({"is": "made", "pod": pod.state.to_json()})
        except FirepoolError as e:
            self._say({"is": "refused", "name": wish.name, "error": e.to_json()})
        except OSError as e:
            error = Internal(f"pod {wish.name} could not be made: {e}")
            self._say({"is": "refused", "name": wish.name, "error": error.to_json()})

    def _make(self, wish: PodWish) -> _Pod:
        started = time.monotonic()
        self._refuse_if_impossible(wish)
        number = self._free_number()
        order = self._order(wish, number)
        attach = None
        if order.gateway is not None:
            bridge = self._bridge
            assert bridge is not None
            attach = lambda pid: bridge.attach(wish.name, pid)  # noqa: E731
        try:
            born = birth.bear(order, self._serve, attach)
            self._site.enter(wish.name, born.pid)
        except (FirepoolError, OSError):
            self._give_back(wish.name, order.pod_dir)
            raise
        state = PodState(
            name=wish.name,
            sku=wish.sku,
            template=wish.template,
            created_at=time.time(),
            socket=order.socket,
            pid=born.pid,
            incarnation=order.boot_id,
            single_use=wish.single_use,
            isolation=order.level,
            isolation_why=order.why,
            address=born.address,
            annotations=dict(wish.annotations),
            cards=wish.cards,
            made_ms=round((time.monotonic() - started) * 1000, 3),
        )
        pod = _Pod(state, born, order.pod_dir, number, time.monotonic() + wish.simulated_start_s)
        self._pods[wish.name] = pod
        self._ended.pop(wish.name, None)
        self._selector.register(born.pidfd, selectors.EVENT_READ, lambda: self._gone(pod))
        self._selector.register(born.ready, selectors.EVENT_READ, lambda: self._heard_ready(pod))
        return pod

    def _refuse_if_impossible(self, wish: PodWish) -> None:
        if self._ending:
            raise Internal("the nursery is ending")
        if not self._probe.reaches(wish.isolation):
            raise IsolationUnavailable(
                f"pool {wish.sku} demands isolation {wish.isolation}; this machine gives {self._probe.level}: {self._probe.why}. "
                f"To lift it: {self._probe.fix}",
                wanted=wish.isolation,
                level=self._probe.level,
                fix=self._probe.fix,
            )

    def _free_number(self) -> int:
        taken = {pod.number for pod in self._pods.values()}
        return next(n for n in range(len(taken) + 1) if n not in taken)

    def _order(self, wish: PodWish, number: int) -> birth.Order:
        root, level = os.geteuid() == 0, self._probe.level
        namespaces = level == Isolation.NAMESPACES
        python = self._interpreter(wish.python)
        many_uids = root and level in (Isolation.NAMESPACES, Isolation.UID)
        uid_base = _UID_FIRST + (self._uid_block + number) * birth.IDS_PER_POD if many_uids else 0
        pod_dir = f"{self._home}/pods/{wish.name}"
        os.makedirs(f"{pod_dir}/caches", exist_ok=True)
        if namespaces and uid_base:
            os.chown(f"{pod_dir}/caches", uid_base, uid_base)
        if level == Isolation.UID:
            pod_dir = self._readable_dir(wish.name)
        if not (namespaces and root):
            wish.network = "host"  # only root can give a namespace a way out
        gateway = self._gateway(wish) if wish.network == "bridge" else None
        limits = cgroups.Limits(wish.memory_limit_bytes, wish.pids_limit, wish.cpus)
        owner = uid_base if namespaces else os.geteuid()
        groups = self._site.make(wish.name, limits, owner) if self._site.parents else {}
        wish.settings["python_version"] = python.version
        given = [wish.settings[key] for key in ("wheelhouse", "ca") if wish.settings.get(key)]
        shown = [path if os.path.isdir(path) else os.path.dirname(path) for path in given]
        return birth.Order(
            wish=wish,
            level=level,
            why=self._probe.why,
            boot_id=secrets.token_hex(8),
            uid_base=uid_base,
            socket=self._socket_path(wish.name),
            log=f"{self._home}/pods/{wish.name}/agent.log",
            caches=f"{self._home}/pods/{wish.name}/caches",
            pod_dir=pod_dir,
            python=python.executable,
            roots=interpreter.outermost([*interpreter.own().roots, *python.roots, *shown]),
            staging=self.staging,
            scratch_bytes=_scratch_bytes(wish),
            cgroups=groups,
            devices=gpu.device_files(wish.cards),
            gateway=gateway,
        )

    def _gateway(self, wish: PodWish) -> Any:
        if self._bridge is None and not self._network_note:
            bridge = network.Bridge(self._run)
            try:
                bridge.open()
                self._bridge, self._network_note = bridge, bridge.note
            except OSError as e:
                self._network_note = f"no bridge ({e}): pods have loopback only"
        if self._bridge is None:
            wish.network = "none"
            return None
        return self._bridge.gateway

    def _interpreter(self, python: str) -> interpreter.Interpreter:
        if python not in self._interpreters:
            own = not python or os.path.abspath(python) == os.path.abspath(sys.executable)
            self._interpreters[python] = interpreter.own() if own else interpreter.ask(python)
        return self._interpreters[python]

    def _readable_dir(self, name: str) -> str:
        """A directory of the pod that another uid can reach (the home is private)."""
        path = f"{self._reachable}/{name}"
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o711)
        return path

    def _socket_path(self, name: str) -> str:
        path = f"{self._run}/{name}.sock"
        return path if len(path) <= _SOCKET_PATH else f"{self._run}/{secrets.token_hex(6)}.sock"

    # -- facts ---------------------------------------------------------------------------------------------------

    def _heard_ready(self, pod: _Pod) -> None:
        byte = os.read(pod.born.ready, 1)
        self._selector.unregister(pod.born.ready)
        os.close(pod.born.ready)
        pod.born.ready = -1 if byte else -2  # -2: it went away without; the pidfd tells the rest
        if byte and time.monotonic() >= pod.ready_at:
            self._tell_ready(pod)

    def _tell_ready(self, pod: _Pod) -> None:
        pod.state.ready = True
        self._say({"is": "ready", "name": pod.state.name})

    def _unmake(self, name: str, why: str) -> None:
        pod = self._pods.get(name)
        if pod is None or pod.state.ending:
            return
        pod.state.ending, pod.why = True, why
        self._site.kill(name)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pod.born.pidfd, signal.SIGKILL)

    def _gone(self, pod: _Pod) -> None:
        """The agent's process is dead, and with it (PID namespace, or the sweep below) everything in the pod."""
        name = pod.state.name
        self._selector.unregister(pod.born.pidfd)
        if pod.born.ready >= 0:
            self._selector.unregister(pod.born.ready)
            os.close(pod.born.ready)
        status = _reap(pod.born.pid)
        trouble = _drain(pod.born.trouble)
        os.close(pod.born.pidfd)
        del self._pods[name]
        if pod.state.isolation in (Isolation.UID, Isolation.PROCESS):
            self._site.kill(name)
            self._sweep_orphans()
        oom = status == signal.SIGKILL and not pod.state.ending and self._site.oom_kills(name) > 0
        why = pod.why or (f"the agent ended with {_in_words(status)}" if not trouble else "the pod could not be built")
        fact = {"is": "ended", "name": name, "why": why, "oom": oom}
        if trouble and not pod.state.ready:
            fact["error"] = json.loads(trouble)
        elif not pod.state.ready and not pod.state.ending:
            fact["why"] = f"{why}; its log ends: {self._log_tail(name)}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pod.state.socket)
        self._ended[name] = fact
        self._say(fact)  # its processes are gone; directories and groups are nobody's business but ours
        self._give_back(name, pod.pod_dir)

    def _log_tail(self, name: str) -> str:
        try:
            with open(f"{self._home}/pods/{name}/agent.log", errors="replace") as f:
                return f.read()[-500:].strip() or "(empty)"
        except OSError as e:
            return str(e)

    def _sweep_orphans(self) -> None:
        """Kill what dead agents left: at the weaker levels orphans become our children, as we are their sub-reaper."""
        agents = {pod.born.pid for pod in self._pods.values()}
        until = time.monotonic() + 5
        while time.monotonic() < until:
            orphans = [p for p in procfs.processes() if p.parent == os.getpid() and p.pid not in agents]
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)
                _reap(orphan.pid)

    def _give_back(self, name: str, pod_dir: str) -> None:
        if self._bridge is not None:
            self._bridge.detach(name)
        if self._site.parents:
            self._site.remove(name)
        for path in {pod_dir, f"{self._home}/pods/{name}"}:
            aside = f"{self._home}/trash-{secrets.token_hex(6)}"
            with contextlib.suppress(OSError):
                os.rename(path, aside)
                path = aside
            shutil.rmtree(path, ignore_errors=True)


def _reachable_directory(tag: str) -> str:
    """A directory of ours that any uid can walk through. Raises: OSError: the name is somebody else's."""
    path = f"{'/run' if os.geteuid() == 0 else '/tmp'}/firepool-{tag}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o711)
    seen = os.lstat(path)
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a directory of this user")
    os.chmod(path, 0o711)
    return path


def _scratch_bytes(wish: PodWish) -> int:
    if wish.scratch_bytes is not None:
        return wish.scratch_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(64 << 20, (wish.memory_limit_bytes or total) // 2)


def _reap(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _in_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _load(name: str) -> birth.Serve:
    module, _, function = name.partition(":")
    serve: birth.Serve = getattr(importlib.import_module(module), function)
    return serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the nursery of a home; prints nothing, answers on `<run>/nursery.sock`."""
    parser = argparse.ArgumentParser(prog="firepool-agent nursery", description="makes this machine's pods")
    parser.add_argument("--home", required=True, help="directory of the broker, absolute")
    parser.add_argument("--run", required=True, help="short, private directory for sockets")
    parser.add_argument("--orphan-timeout-s", type=float, default=600.0)
    parser.add_argument("--serve", default="firepool_agent.server:serve", help="what runs in a pod: module:function")
    options = parser.parse_args(arguments)
    serve = _load(options.serve)
    with contextlib.suppress(OSError):
        syscalls.become_subreaper()
        syscalls.set_name("fp-nursery")
    path = f"{options.run}/nursery.sock"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.new")
    os.chmod(f"{path}.new", 0o600)
    listener.listen(8)
    nursery = Nursery(options.home, options.run, serve, options.orphan_timeout_s)
    signal.signal(signal.SIGTERM, lambda *_: nursery.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.rename(f"{path}.new", path)
    try:
        nursery.run(listener)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
