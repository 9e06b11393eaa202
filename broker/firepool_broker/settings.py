"""What an operator says before anything runs: flags, the pools file, and what this machine offers where nothing is said.

Turns all of it into values; builds nothing (`main` does). The template digest is made here, because only here is it known
what a pod is made from.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from firepool_broker.api.poolsfile import read_pools as pools_of
from firepool_broker.core.ids import Sku, TemplateDigest
from firepool_broker.core.pools import Pool, Shape
from firepool_wire.errors import BadRequest
from firepool_wire.version import FIREPOOL, PROTOCOL

#: Cards that `--simulate` makes up, by model: how many, and memory of each.
SIMULATED = {"h200": (4, 141 * 1024), "h100": (4, 80 * 1024), "a100": (4, 80 * 1024)}
#: Memory of a pod of the pool that is made without being asked for, MiB (less on small machines).
DEFAULT_MEMORY_MIB = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One broker's settings, as its command line gives them."""

    home: Path
    host: str = "127.0.0.1"
    #: 0: the port of the last run where it is free (clients find a restarted broker again), else any.
    port: int = 0
    pools_file: Path | None = None
    simulate: str | None = None
    #: Job interpreter of pools that name none: the caller's own environment.
    python: str = sys.executable
    #: The broker ends, and deletes its pods, when this process is gone.
    embedded_parent: int | None = None
    #: Pods (and the jobs on them) outlive a broker that is asked to stop.
    leave_pods: bool = False
    log_file: Path | None = None
    log_level: str = "info"

    @property
    def token_file(self) -> Path:
        """The local operator's token (0600)."""
        return self.home / "token"

    @property
    def address_file(self) -> Path:
        """Where programs on this machine find the broker."""
        return self.home / "broker.json"


# -- pools ------------------------------------------------------------------------------------------------------------


def read_pools(path: Path) -> list[Pool]:
    """The pools of a TOML file: one table `[pools.<sku>]` a pool, with the knobs as the API takes them.

    Raises:
        BadRequest: not TOML, or a value that its knob cannot have.
        UnknownField: a field that no pool has, with the nearest one that it does.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is not a pools file: {error}", field=str(path)) from error
    except OSError as error:
        raise BadRequest(f"the pools file cannot be read: {error}", field=str(path)) from error
    tables = document.get("pools")
    unknown = sorted(set(document) - {"pools"})
    if unknown or not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        found = f" (found: {', '.join(unknown)})" if unknown else ""
        raise BadRequest(
            f"{path}: a pools file has one table [pools.<sku>] a pool and nothing else{found}", field=str(path)
        )
    return pools_of([{"sku": sku, **knobs} for sku, knobs in tables.items()])


# -- what a pod is made from --------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def interpreter_version(python: str) -> str:
    """What the interpreter says it is; "" when it does not run (its pods will say why)."""
    try:
        answer = subprocess.run(
            [python, "-I", "-S", "-c", "import sys; print(sys.version, sys.prefix)"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def template_of(pool: Pool, default_python: str) -> TemplateDigest:
    """Digest of everything that a new pod of the pool is made from; pods of another digest are stale."""
    python = python_of(pool, default_python)
    parts = {
        "agent": [FIREPOOL, PROTOCOL],
        "python": [python, str(Path(python).resolve()), interpreter_version(python)],
        "shape": [
            pool.shape.accelerator,
            pool.shape.gpus,
            pool.shape.cpus,
            pool.shape.memory_mib,
            pool.shape.simulated,
        ],
        "preload": list(pool.preload),
        "settings": [list(pair) for pair in pool.settings],
        "provider": pool.provider,
        "isolation": pool.isolation,
        "requirements_mode": pool.requirements_mode,
    }
    return TemplateDigest(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16])


def python_of(pool: Pool, default_python: str) -> str:
    """The pool's job interpreter."""
    return dict(pool.settings).get("python", default_python)


def stamp(pools: Sequence[Pool], default_python: str) -> list[Pool]:
    """The pools with their template digests."""
    return [replace(pool, template=template_of(pool, default_python)) for pool in pools]


def interpreter_of(pool: Pool, default_python: str) -> dict[str, Any]:
    """The pool's job interpreter as its agents will say, for clients that ask before there is a pod."""
    python = python_of(pool, default_python)
    number = interpreter_version(python).split(" ")[0]
    minor = ".".join(number.split(".")[:2])
    return {"sku": pool.sku, "python": python, "version": minor, "pickle": pickle.HIGHEST_PROTOCOL}


# -- what this machine offers -------------------------------------------------------------------------------------------


def default_pools(simulate: str | None = None) -> list[Pool]:
    """Pools for a machine that nobody described: `cpu`, one per model of GPU found, and what is simulated.

    Raises:
        BadRequest: nothing is known about the model to simulate.
    """
    pools = [cpu_pool()]
    pools += [gpu_pool(model, count) for model, count in found_gpus().items()]
    if simulate is not None:
        if simulate not in SIMULATED:
            raise BadRequest(f"cannot simulate {simulate!r}; known: {', '.join(sorted(SIMULATED))}", field="simulate")
        pools = [pool for pool in pools if pool.sku != simulate]
        pools.append(gpu_pool(simulate, SIMULATED[simulate][0], simulated=True))
    return pools


def cpu_pool() -> Pool:
    """The pool of jobs that ask for nothing: twice as many pods as cores, for jobs wait as often as they compute."""
    count = max(2, 2 * cores())
    return Pool(
        sku=Sku("cpu"),
        shape=Shape(cpus=1.0, memory_mib=pod_memory_mib(count)),
        min_count=min(2, count),
        max_idle_count=count,
        max_count=count,
        step=count,
        isolation="portable",
    )


def gpu_pool(model: str, count: int, *, simulated: bool = False) -> Pool:
    """A pool of single cards of one model."""
    return Pool(
        sku=Sku(model),
        shape=Shape(accelerator=model, gpus=1, cpus=1.0, memory_mib=pod_memory_mib(max(count, 2)), simulated=simulated),
        min_count=0,
        max_idle_count=count,
        max_count=count,
        step=count,
        isolation="portable",
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pod_memory_mib(pods: int) -> int:
    """Memory of one pod: the default, or a fair share of three quarters of a small machine."""
    try:
        total_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)
    except (ValueError, OSError):
        return DEFAULT_MEMORY_MIB
    return max(256, min(DEFAULT_MEMORY_MIB, total_mib * 3 // 4 // pods))


def found_gpus() -> dict[str, int]:
    """Cards of this machine by model ("h200": 8); none where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    found: dict[str, int] = {}
    try:
        for n in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n))
            model = model_of(name.decode() if isinstance(name, bytes) else str(name))
            found[model] = found.get(model, 0) + 1
    finally:
        pynvml.nvmlShutdown()
    return found


def model_of(name: str) -> str:
    """A SKU's name from a card's product name: "NVIDIA H200 141GB" → "h200"."""
    words = [w for w in name.lower().replace("-", " ").split() if w not in ("nvidia", "tesla", "geforce", "quadro")]
    return words[0] if words else "gpu"
