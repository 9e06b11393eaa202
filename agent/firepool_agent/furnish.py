"""The pod around a new agent: its file tree and network, or at the weaker levels its directories, and the `PodConfig` that tells
the agent of them. Runs in the new process, between `birth` (which forked it) and the agent's own code.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

from firepool_agent import gpu, network, rootfs
from firepool_wire.nursery import PodConfig, PodWish
from firepool_wire.words import Isolation

#: uids of one pod: a user namespace of this size, so that pods share no per-user limit and no keyring.
IDS_PER_POD = 65_536
#: Inside a user namespace attempts get these; K (the last one) owns no process.
_FIRST_JOB_UID, _KILLER_UID = 1_000, 65_530


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


@dataclass(frozen=True, slots=True)
class Inherited:
    """Descriptors that the agent is born with: its listening socket and the pipe on which it says that it is ready."""

    listen: int
    ready: int


@dataclass(frozen=True, slots=True)
class Given:
    """What the midwife hands on: the pod's address and handles on what its tree will show."""

    address: IPv4Interface | None
    sources: Mapping[str, int]


def _job_uids(order: Order) -> tuple[int, int]:
    return (_FIRST_JOB_UID, _KILLER_UID - _FIRST_JOB_UID) if order.uid_base else (0, 0)


def plan_of(order: Order, address: str = "") -> rootfs.Plan:
    """What the file tree of this order shows."""
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


def settle_in(order: Order, given: Given, fds: Inherited) -> PodConfig:
    """Build the pod's tree and network; the config as the agent will see it."""
    plan = plan_of(order, str(given.address.ip) if given.address else "")
    socket.sethostname(plan.hostname)
    own_network = order.wish.network != "host"
    if own_network:
        network.configure(given.address, order.gateway if given.address else None)
    uid_first, uid_count = _job_uids(order)
    groups = rootfs.build(plan, given.sources)
    base = rootfs.AGENT_DIR
    return PodConfig(
        **_common(order, fds, rootfs.CARDS),
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


def move_in(order: Order, fds: Inherited) -> PodConfig:
    """Directories instead of a tree of its own. What the job must read lies outside of the agent's private one."""
    base = order.pod_dir
    for name, mode in (
        ("agent", 0o700),
        ("agent/state", 0o700),
        ("caches", 0o711),
        ("unpack", 0o711),
        ("scratch", 0o711),
        ("cards", 0o1777),
    ):
        os.makedirs(f"{base}/{name}", exist_ok=True)
        os.chmod(f"{base}/{name}", mode)
    uids = order.level == Isolation.UID
    count = IDS_PER_POD - 1 if uids else 0
    return PodConfig(
        **_common(order, fds, f"{base}/cards"),
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


def _common(order: Order, fds: Inherited, cards_dir: str) -> dict[str, Any]:
    wish = order.wish
    return {
        "pod": wish.name,
        "sku": wish.sku,
        "listen_fd": fds.listen,
        "socket": order.socket,
        "ready_fd": fds.ready,
        "boot_id": order.boot_id,
        "isolation_wanted": wish.isolation,
        "isolation": order.level,
        "isolation_why": order.why,
        "memory_limit_bytes": wish.memory_limit_bytes,
        "pids_limit": wish.pids_limit,
        "cpus": wish.cpus,
        "python": order.python,
        "preload": wish.preload,
        "cards": gpu.with_usage_files(wish.cards, cards_dir),
        "settings": wish.settings,
    }
