"""Firepool's SDK: functions and commands as jobs on warm pods, with an API that looks like Ray's.

`import firepool` and `import firepool_ray as firepool` are the same. Everything public is here; the modules behind it are
private. Importing this connects to nothing and loads no third-party package.
"""

from typing import TYPE_CHECKING, Any

from firepool_ray._config import Settings
from firepool_ray._context import Context, Run, context, run
from firepool_ray._errors import (
    BlockingInEventLoopWarning,
    GetTimeoutError,
    MissingExtra,
    RemoteTraceback,
    SessionClosed,
    TaskError,
)
from firepool_ray._front import Connected, init, is_initialized, shutdown
from firepool_ray._refs import JobRef, PutRef, as_completed, cancel, get, put, wait
from firepool_ray._remote import RemoteFunction, RemoteGenerator, remote
from firepool_wire.codec import Record
from firepool_wire.errors import FirepoolError, is_infra
from firepool_wire.version import FIREPOOL

if TYPE_CHECKING:
    from firepool_ray import errors
    from firepool_ray._executor import Executor
    from firepool_ray._jobs import Job, JobResult, submit
    from firepool_ray._map import MapResults
    from firepool_ray._stream import JobStream

__version__ = FIREPOOL

#: Loaded when first asked for: name → module.
_LATER = {
    "Executor": "firepool_ray._executor",
    "Job": "firepool_ray._jobs",
    "JobResult": "firepool_ray._jobs",
    "JobStream": "firepool_ray._stream",
    "MapResults": "firepool_ray._map",
    "errors": "firepool_ray.errors",
    "submit": "firepool_ray._jobs",
}

__all__ = [
    "BlockingInEventLoopWarning",
    "Connected",
    "Context",
    "Executor",
    "FirepoolError",
    "GetTimeoutError",
    "Job",
    "JobRef",
    "JobResult",
    "JobStream",
    "MapResults",
    "MissingExtra",
    "PutRef",
    "Record",
    "RemoteFunction",
    "RemoteGenerator",
    "RemoteTraceback",
    "Run",
    "SessionClosed",
    "Settings",
    "TaskError",
    "__version__",
    "as_completed",
    "cancel",
    "context",
    "errors",
    "get",
    "init",
    "is_infra",
    "is_initialized",
    "put",
    "remote",
    "run",
    "shutdown",
    "submit",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_LATER[name])
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
