"""A new interpreter for an attempt that a fork could not serve: a variable that is read only at start, a layer that shadows a
preloaded module or carries a `.pth`.

It starts as the attempt, without privileges, where our files may not be readable; so it finds our modules in a zip archive in
memory that the waiting process packed while it still could, and its order in another one.
"""

import faulthandler
import importlib
import io
import json
import os
import site
import socket
import sys
import time
import types
from dataclasses import asdict
from typing import NoReturn

from firepool_agent.order import Order

_START = (
    "import sys; sys.path[:1] = ['/proc/self/fd/{zip}']; from firepool_agent import fresh; fresh.main({zip}, {order})"
)

#: Packages that go along.
_CARRIED = ("firepool_agent", "firepool_wire", "cloudpickle")

#: `sys.modules` as it was before the attempt forgot us; filled by the zygote.
house_modules: dict[str, types.ModuleType] = {}


def pack_modules() -> int:
    """The modules that the job side needs, as an archive in memory; its descriptor survives `exec`."""
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, module in sorted(house_modules.items()):
            if name.partition(".")[0] in _CARRIED and module.__file__:
                is_package = hasattr(module, "__path__")
                inside = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
                archive.write(module.__file__, inside)
    return _memory("firepool-modules", packed.getvalue())


def _memory(name: str, data: bytes) -> int:
    fd = os.memfd_create(name, 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def replace_interpreter(python: str, order: Order, blobs: dict[str, int], modules: int) -> NoReturn:
    """Execute a new interpreter in this process's place. Raises: OSError: it cannot be executed."""
    told = _memory("firepool-order", json.dumps({"order": asdict(order), "blobs": blobs}).encode())
    for fd in (3, 4, *blobs.values()):
        os.set_inheritable(fd, True)
    os.execve(python, [python, "-c", _START.format(zip=modules, order=told)], os.environ)


def main(modules: int, order: int) -> NoReturn:
    """First function in the new interpreter."""
    from firepool_agent import calls, cell
    from firepool_agent.outcome import flush
    from firepool_agent.stackdump import Stacks

    code = 1
    try:
        with os.fdopen(order, "rb") as file:
            file.seek(0)
            told = json.load(file)
        _bring_cloudpickle(f"/proc/self/fd/{modules}")
        os.close(modules)
        work = Order(**told["order"])
        for path in reversed(work.paths):
            _add_site(path)
        cell.forget_house()
        for fd in (3, 4):
            os.set_inheritable(fd, False)
        Stacks.arm(cell.STACKS_FD)
        faulthandler.enable()
        sock = socket.socket(fileno=cell.JOB_FD)
        code = cell.run_function(work, told["blobs"], calls.Sink(sock.sendall, time.monotonic))
    except BaseException:  # noqa: BLE001 - the last frame of the process: say it and end
        sys.excepthook(*sys.exc_info())
    finally:
        flush()
        os._exit(code)


def _bring_cloudpickle(archive: str) -> None:
    """The environment's own cloudpickle first, else the one in the archive; nothing of ours stays on the path."""
    sys.path.remove(archive)
    try:
        importlib.import_module("cloudpickle")
    except ImportError:
        sys.path.append(archive)
        importlib.import_module("cloudpickle")
        sys.path.remove(archive)


def _add_site(path: str) -> None:
    """Put a layer in front of `sys.path` and honour its `.pth` files, as an installation into site-packages would."""
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)
    site.addsitedir(path)
