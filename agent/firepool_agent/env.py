"""The variables of an attempt: ours below, the user's in the middle as far as they are allowed, the broker's on top.

A user's variable is dropped when it could affect the loader, the agent or the topology (spec §4.5); the names of dropped ones
are reported in the exit record and in the job's `FIREPOOL_DROPPED_ENV`. Nothing is inherited from the agent.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from firepool_wire.nursery import PodConfig

#: Families of names that are ours, the loader's or the interpreter's.
_PREFIXES = ("LD_", "PYTHON", "FIREPOOL_", "CUDA_DEVICE_MEMORY_", "TORCHELASTIC_", "_PYTHON")
#: Loader and allocator switches that act on a process before it can defend itself.
_LOADER = {"GCONV_PATH", "GLIBC_TUNABLES", "LOCPATH", "NLSPATH", "MALLOC_CHECK_", "MALLOC_PERTURB_"}
#: Rank, rendezvous and device variables: the topology's, never the user's.
_TOPOLOGY = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
}
#: Interpreter settings that a user may choose. `PYTHONPATH` goes behind the package and the layers.
_PYTHON_ALLOWED = {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER"}

#: Variables that an interpreter reads only at its start: a job that sets one gets a fresh interpreter, not a fork.
#: (Allocator settings of a layer or a pool come in `injected`.)
ONLY_AT_START = {
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "MALLOC_ARENA_MAX",
    "PYTHONMALLOC",
}


def allowed(name: str) -> bool:
    """Whether a user may set this variable."""
    if not name or "=" in name or "\0" in name:
        return False
    if name in _PYTHON_ALLOWED:
        return True
    return not name.startswith(_PREFIXES) and name not in _LOADER and name not in _TOPOLOGY


def split(wanted: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The user's variables that are allowed, and the sorted names of the others."""
    kept = {k: v for k, v in wanted.items() if allowed(k) and "\0" not in v}
    return kept, sorted(set(wanted) - set(kept))


def base(config: PodConfig) -> dict[str, str]:
    """What every attempt in this pod starts from."""
    return {
        "PATH": f"{Path(config.python).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": config.home_dir,
        "USER": config.user,
        "LOGNAME": config.user,
        "SHELL": "/bin/sh",
        "TMPDIR": config.tmp_dir,
        "LANG": "C.UTF-8",
        # Programs that buffer their output by the block lose it when they are killed.
        "PYTHONUNBUFFERED": "1",
        "FIREPOOL_POD": config.pod,
        "FIREPOOL_SKU": config.sku,
    }


def compose(
    config: PodConfig, wanted: Mapping[str, str], injected: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The attempt's whole environment (but for search paths, see `with_paths`), and the names that were dropped."""
    kept, dropped = split(wanted)
    whole = {**base(config), **kept, **injected}
    if dropped:
        whole["FIREPOOL_DROPPED_ENV"] = ",".join(dropped)
    return whole, dropped


def with_paths(variables: dict[str, str], paths: list[str]) -> dict[str, str]:
    """The environment with package and layers in front of `PYTHONPATH`, so that programs the job starts see them too."""
    own = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    if not paths and not own:
        return variables
    return {**variables, "PYTHONPATH": os.pathsep.join([*paths, *own])}


def only_at_start(variables: Mapping[str, str]) -> str | None:
    """A variable among these that a fork of a running interpreter could not honour, or None."""
    return next((name for name in variables if name in ONLY_AT_START), None)
