"""What the nursery's pods share of this machine: the level, cgroups, bridge, interpreters and directories; and the order that is
drawn up for one pod out of them. Nursery side; knows nothing of the broker and starts no process.
"""

import contextlib
import os
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Callable
from ipaddress import IPv4Interface
from typing import Any

from firepool_agent import cgroups, gpu, interpreter, levels, network
from firepool_agent.furnish import IDS_PER_POD, Order
from firepool_wire.errors import IsolationUnavailable
from firepool_wire.nursery import PodWish
from firepool_wire.words import Isolation

#: Longest path that a Unix socket address can hold.
_SOCKET_PATH = 100
_UID_FIRST = 1 << 30
_PODS_PER_NURSERY = 256


class Estate:
    """Everything outside of the pods that has to be made, given back and cleared up."""

    def __init__(self, home: str, run: str) -> None:
        self._home, self._run = home, run
        #: One nursery per run directory: what it leaves when it is killed bears this name, and the next one removes it.
        tag = f"{zlib.crc32(run.encode()):08x}"
        self._probe = levels.probe()
        self.site = cgroups.Site.find(f"firepool-{tag}") if os.geteuid() == 0 else cgroups.Site()
        self._bridge: network.Bridge | None = None
        self._network_note = ""
        self._interpreters: dict[str, interpreter.Interpreter] = {}
        self._uid_block = (int(tag, 16) % 128) * _PODS_PER_NURSERY
        self._reachable = _reachable_directory(tag)
        #: An empty directory that any uid can reach; every pod mounts its own tree on it, in its own mount namespace.
        self._staging = f"{self._reachable}/root"
        os.makedirs(self._staging, mode=0o755, exist_ok=True)

    def abilities(self) -> dict[str, Any]:
        """What this machine can do, for `hello`."""
        return {
            "isolation": self._probe.level,
            "why": self._probe.why,
            "fix": self._probe.fix,
            "facts": self._probe.facts,
            "cgroups": sorted(self.site.parents),
            "network_note": self._network_note,
            "cards": [card.to_json() for card in gpu.find_cards()],
        }

    def refuse_if_impossible(self, wish: PodWish) -> None:
        """Raises: IsolationUnavailable: this machine cannot give the level that the wish demands."""
        if self._probe.reaches(wish.isolation):
            return
        raise IsolationUnavailable(
            f"pool {wish.sku} demands isolation {wish.isolation}; this machine gives {self._probe.level}: {self._probe.why}. "
            f"To lift it: {self._probe.fix}",
            wanted=wish.isolation,
            level=self._probe.level,
            fix=self._probe.fix,
        )

    def order(self, wish: PodWish, number: int) -> Order:
        """Make directories and groups for a pod. Raises: FirepoolError; OSError."""
        root, level = os.geteuid() == 0, self._probe.level
        namespaces = level == Isolation.NAMESPACES
        python = self._interpreter(wish.python)
        many_uids = root and level in (Isolation.NAMESPACES, Isolation.UID)
        uid_base = _UID_FIRST + (self._uid_block + number) * IDS_PER_POD if many_uids else 0
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
        groups = self.site.make(wish.name, limits, owner) if self.site.parents else {}
        wish.settings["python_version"] = python.version
        given = [wish.settings[key] for key in ("wheelhouse", "ca") if wish.settings.get(key)]
        shown = [path if os.path.isdir(path) else os.path.dirname(path) for path in given]
        return Order(
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
            staging=self._staging,
            scratch_bytes=_scratch_bytes(wish),
            cgroups=groups,
            devices=gpu.device_files(wish.cards),
            gateway=gateway,
        )

    def attach(self, order: Order) -> Callable[[int], IPv4Interface] | None:
        """How the pod gets its place on the bridge; None: it has none."""
        bridge = self._bridge
        if order.gateway is None or bridge is None:
            return None
        return lambda pid: bridge.attach(order.wish.name, pid)

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

    def log_tail(self, name: str) -> str:
        """The last words of a pod's agent."""
        try:
            with open(f"{self._home}/pods/{name}/agent.log", errors="replace") as f:
                return f.read()[-500:].strip() or "(empty)"
        except OSError as e:
            return str(e)

    def give_back(self, name: str, pod_dir: str) -> None:
        """Clear away what was made for a pod whose processes are gone."""
        if self._bridge is not None:
            self._bridge.detach(name)
        if self.site.parents:
            self.site.remove(name)
        for path in {pod_dir, f"{self._home}/pods/{name}"}:
            aside = f"{self._home}/trash-{secrets.token_hex(6)}"
            with contextlib.suppress(OSError):
                os.rename(path, aside)
                path = aside
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Clear away everything else."""
        if self._bridge is not None:
            self._bridge.close()
        self.site.close()
        for path in (self._staging, self._reachable):
            with contextlib.suppress(OSError):
                os.rmdir(path)


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
