"""Where an attempt is right now: stacks of all threads of a Python function, the process tree of a command. Agent side."""

import asyncio
import contextlib
import os

from firepool_agent import procfs
from firepool_agent.cells import Cell
from firepool_agent.order import STACKS_SIGNAL

#: Longest text kept: a thousand threads fit.
MAX_BYTES = 256 * 1024
#: The interpreter answers within microseconds unless its machine is busy; a pause this long means that it is done.
_QUIET_S = 0.05
_PATIENCE_S = 0.5


async def collect(cell: Cell, *, python: bool) -> str:
    """The attempt's stacks as text; "" when it did not answer."""
    if not python:
        return _tree(cell)
    with contextlib.suppress(ProcessLookupError):
        os.kill(cell.pid, STACKS_SIGNAL)
    data = await _read_until_quiet(cell.stacks)
    return data.decode(errors="replace") or _tree(cell)


async def _read_until_quiet(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    data = bytearray()
    came = asyncio.Event()
    loop.add_reader(fd, came.set)
    try:
        patience = _PATIENCE_S
        while len(data) < MAX_BYTES:
            try:
                await asyncio.wait_for(came.wait(), patience)
            except TimeoutError:
                break
            came.clear()
            with contextlib.suppress(BlockingIOError):
                part = os.read(fd, 64 * 1024)
                if not part:
                    break
                data += part
            patience = _QUIET_S
    finally:
        loop.remove_reader(fd)
    return bytes(data[:MAX_BYTES])


def _tree(cell: Cell) -> str:
    lines = []
    for process in [procfs.read_process(cell.pid), *procfs.descendants(cell.pid, procfs.processes())]:
        if process is not None:
            lines.append(f"{process.pid} (parent {process.parent}) {process.state} {_command(process.pid)}")
    return "\n".join(lines)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read(1000).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
