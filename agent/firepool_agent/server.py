"""The agent as a process: puts the rooms together and serves calls until it is told to end.

`serve` is the door that the nursery calls in a fork of its own, as PID 1 of the pod where PID namespaces are allowed; elsewhere the
agent makes itself a sub-reaper. HTTP is `h1`'s business, the calls are `routes`'.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from firepool_agent import h1, syscalls
from firepool_agent.attempts import Attempts
from firepool_agent.blobs import Blobs
from firepool_agent.cells import Zygote
from firepool_agent.cgroups import JobGroup
from firepool_agent.isolate import Uids
from firepool_agent.janitor import Janitor
from firepool_agent.journal import Journal
from firepool_agent.layers import Layers
from firepool_agent.parts import Parts
from firepool_agent.reset import Resetter
from firepool_agent.routes import Routes
from firepool_agent.scratch import Scratch
from firepool_agent.unpack import Unpacker
from firepool_wire.errors import FirepoolError
from firepool_wire.nursery import PodConfig


def serve(config: PodConfig) -> int:
    """Serve the pod until SIGTERM or a shutdown call. Returns the process's exit code."""
    if os.getpid() != 1:
        syscalls.become_subreaper()
    # The helper is forked while this process is small and single-threaded.
    janitor = Janitor.start(config)
    return asyncio.run(_serve(config, janitor))


def build(config: PodConfig, janitor: Janitor) -> Parts:
    """The agent's rooms."""
    state = Path(config.state_dir)
    state.mkdir(parents=True, exist_ok=True)
    scratch = Scratch(config)
    return Parts(
        config=config,
        journal=Journal(state / "journal"),
        blobs=Blobs(Path(config.caches_dir) / "blobs"),
        scratch=scratch,
        uids=Uids(config),
        group=JobGroup(config),
        zygote=Zygote(config),
        janitor=janitor,
        resetter=Resetter(config, janitor, scratch),
        unpacker=Unpacker(config),
        layers=Layers(config, janitor),
    )


async def _serve(config: PodConfig, janitor: Janitor) -> int:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    parts = build(config, janitor)
    attempts = Attempts(parts)
    routes = Routes(parts, attempts, ending.set)
    front = h1.Server(routes.handle)
    server = await asyncio.start_unix_server(
        front.connected, sock=socket.socket(fileno=config.listen_fd), limit=h1.MAX_HEAD_BYTES * 16
    )
    try:
        await _ready(config, parts, attempts)
        await ending.wait()
    finally:
        server.close()
        await attempts.aclose()
        await front.aclose()
        parts.zygote.stop()
        parts.journal.close()
        janitor.close()
    return 0


async def _ready(config: PodConfig, parts: Parts, attempts: Attempts) -> None:
    """Tell the nursery once a first process waits: the pod is as warm as it will ever be."""
    try:
        await attempts.make_spare()
        parts.resetter.baseline()
    except FirepoolError as error:
        # Calls are answered all the same: `prepare` tries again and says what is wrong.
        sys.stderr.write(f"agent of {config.pod}: {error.message}\n")
    if config.ready_fd >= 0:
        with contextlib.suppress(BrokenPipeError):
            os.write(config.ready_fd, b"R")
        os.close(config.ready_fd)
