"""The preloaded job interpreter: one single-threaded process that forks a waiting attempt whenever the agent asks.

Runs inside the *job* interpreter, so: standard library, `firepool_wire` and the modules beside it that say the same. It is
privileged and therefore never runs anything of a user: no user site, no `sitecustomize`, no code out of `.pth` files
(those lines run in the attempt, after it gave up its privileges). It imports what the pool preloads and computes
nothing: one matmul here would deadlock every child .

The agent talks to it over a `SOCK_SEQPACKET` pair: a slot and five descriptors in, the guard's pid out. How an attempt ends
is told by its guard (`isolate`), over a pipe that neither the attempt nor this process reads.
"""

import base64
import gc
import importlib
import json
import os
import pickle
import signal
import site
import socket
import sys
from typing import Any

from firepool_agent import cell, fresh, isolate, quickfork, seccomp
from firepool_agent.cgroups import JobGroup
from firepool_agent.outcome import pickler
from firepool_agent.scratch import Slot
from firepool_wire import codec
from firepool_wire.nursery import PodConfig

#: Descriptors that come with a request, in this order: the guard's status pipe, job socket, stdout, stderr, stacks.
FDS_PER_CELL = 5

#: BLAS and OpenMP start their thread pools at import unless told otherwise; a child must not inherit dead pools.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: Rehearsals before the first fork: CPython rewrites code that has run some times, in place.
_REHEARSALS = 20

#: Modules that an attempt imports anew, loaded here or not.
_FORGOTTEN = {"__main__", "firepool_agent", "firepool_wire"}


def find_site_packages() -> list[str]:
    """Put the interpreter's own site-packages on `sys.path` without running any code found there.

    Returns the `import` lines of `.pth` files, for the attempt to run later under its own user id.
    """
    lines: list[str] = []

    def paths_only(sitedir: str, name: str, known: set[str]) -> set[str]:
        try:
            with open(os.path.join(sitedir, name), encoding="utf-8") as pth:
                text = pth.read()
        except (OSError, UnicodeDecodeError):
            return known
        for line in map(str.strip, text.splitlines()):
            if line.startswith(("import ", "import\t")):
                if line not in lines:  # `site` visits a virtual environment's folder twice
                    lines.append(line)
            elif line and not line.startswith("#"):
                path = os.path.abspath(os.path.join(sitedir, line))
                if path not in known and os.path.exists(path):
                    known.add(path)
                    sys.path.append(path)
        return known

    site.addpackage = paths_only  # type: ignore[assignment]
    site.execsitecustomize = lambda: None
    site.main()
    return lines


def preload(names: list[str]) -> dict[str, str]:
    """Import what the pool lists. Returns the modules that failed, with the reason."""
    failed: dict[str, str] = {}
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as why:  # noqa: BLE001 - a broken base package must not take the pod with it
            failed[name] = f"{type(why).__name__}: {why}"
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return failed


def describe(failed: dict[str, str]) -> dict[str, Any]:
    """What the agent wants to know of this interpreter."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    return {
        "python": sys.executable,
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pickle": pickle.HIGHEST_PROTOCOL,
        "pid": os.getpid(),
        "threads": threads,
        "failed": failed,
        "modules": sorted({name.partition(".")[0] for name in sys.modules} - _FORGOTTEN),
    }


def serve(sock: socket.socket, config: PodConfig) -> None:
    """Fork a cell for every request until the agent closes its end."""
    guards: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, FDS_PER_CELL)
        if not data:
            return
        answer = _fork_cell(config, Slot(**json.loads(data)), list(fds), guards)
        for fd in fds:
            os.close(fd)
        sock.send(json.dumps(answer).encode())


def _reap(guards: set[int]) -> None:
    """Guards tell their story by pipe; here they are only waited for, whenever a new one is made."""
    for pid in list(guards):
        if os.waitpid(pid, os.WNOHANG)[0]:
            guards.discard(pid)


def _fork_cell(config: PodConfig, slot: Slot, fds: list[int], guards: set[int]) -> dict[str, Any]:
    status_w, *own = fds
    _reap(guards)
    try:
        child = isolate.fork_attempt(config, slot, status_w, grouped=True)
    except OSError as why:
        return {"error": f"fork: {why}"}
    if child is None:
        cell.live(config, slot, own)
    guards.add(child.pid)
    return {"guard": child.pid}


def main(fd: int, agent_dir: str) -> None:
    """Import, warm up, move to where attempts belong; then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    settings = json.loads(sock.recv(1 << 20))
    config = PodConfig.from_json(settings["config"])
    quickfork.watch_hooks()
    cell.startup_lines.extend((line, compile(line, "<.pth>", "exec")) for line in find_site_packages())
    failed = preload(config.preload)
    if any("_distutils_hack" in line for line, _ in cell.startup_lines):
        # setuptools puts this line into nearly every environment; with its module at hand it costs an attempt nothing.
        preload(["_distutils_hack"])
    _bring_cloudpickle(settings["cloudpickle_dir"])
    # Ours was only on the path to load these modules; where it is installed, its neighbours are the agent's business.
    sys.path[:] = [p for p in sys.path if p != agent_dir]
    about = describe(failed)
    _warm_up(config)
    # Children inherit the job's cgroups for nothing, where moving each of them costs 10 ms (`decisions/0032`).
    JobGroup(config).join()
    sock.send(json.dumps(about).encode())
    serve(sock, config)


def _bring_cloudpickle(folder: str | None) -> None:
    """Use the job interpreter's own cloudpickle, else the one that came with the agent."""
    try:
        importlib.import_module("cloudpickle")
    except ImportError:
        if folder is None:
            return
        sys.path.append(folder)
        try:
            importlib.import_module("cloudpickle")
        finally:
            sys.path.remove(folder)


def _warm_up(config: PodConfig) -> None:
    """Everything that attempts can inherit instead of doing it themselves, each in pages of its own."""
    fresh.house_modules.update(sys.modules)
    cell.look_like_a_start()
    dumps = pickler(pickle.HIGHEST_PROTOCOL)
    cell.rehearsal["payload"] = dumps(lambda x: x)
    cell.rehearsal["args"] = base64.b64encode(codec.pack_args([((1,), {})], dumps)).decode()
    for _ in range(_REHEARSALS):
        cell.rehearse()
    seccomp.default_profile(deny_tracing=not config.nested)
    # A collection in a child would touch, and so copy, every page; it is switched on again before user code.
    gc.collect()
    gc.disable()
    gc.freeze()
