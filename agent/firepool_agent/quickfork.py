"""fork() for processes that have one thread: without the hooks that would make threads' locks whole again.

CPython's hooks for `threading`, `logging` and `random` run Python in every child, and there every page they touch is copied:
0.9 ms of 1.7 ms a fork here. With a single thread no lock can be held by another one, so there is nothing to repair; `random` is
reseeded by hand where it is loaded. Where anything else wants to hear of forks, or there are threads, it is `os.fork`.
Runs in the job interpreter: standard library only. Measurements: `decisions/0031`.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

#: Standard modules whose hooks only repair locks, or reseed what `fork` reseeds.
_KNOWN = {"threading", "logging", "random", "concurrent.futures.thread"}


class _Hooks:
    """Whether a module that we do not know asked to be told of forks."""

    foreign: bool = False
    register: Callable[..., None] | None = None


def watch_hooks() -> None:
    """Begin to notice who registers hooks. Call it before anything but the standard library is imported."""
    if _Hooks.register is None:
        _Hooks.register = os.register_at_fork
        os.register_at_fork = _register


def _register(**hooks: Any) -> None:
    assert _Hooks.register is not None
    if sys._getframe(1).f_globals.get("__name__") not in _KNOWN:
        _Hooks.foreign = True
    _Hooks.register(**hooks)


def is_quick() -> bool:
    """Whether `fork` may leave the hooks out now."""
    return (
        _Hooks.register is not None
        and not _Hooks.foreign
        and sys.implementation.name == "cpython"
        and len(os.listdir("/proc/self/task")) == 1
    )


#: `PyDLL` keeps the interpreter's lock, so that the child's only thread holds it.
_libc_fork = ctypes.PyDLL(None, use_errno=True).fork if os.path.isdir("/proc/self/task") else None


def fork(quick: bool) -> int:
    """os.fork(), or the quick one where the caller found `is_quick()`. Raises: OSError."""
    if not quick or _libc_fork is None:
        return os.fork()
    pid: int = _libc_fork()
    if pid == 0:
        if (random := sys.modules.get("random")) is not None:
            random.seed()
        if (threading := sys.modules.get("threading")) is not None:
            threading.main_thread()._set_native_id()
    elif pid < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return pid
