"""A waiting attempt: forked before anyone knows what for, blocked until launch, then the user's program.

Runs in the job interpreter, in a process that `isolate.fork_attempt` made. Up to `enter_attempt` it is privileged and runs
nothing of a user; behind it there is no way back. Functions go on in this process; commands are executed in its place.
"""

import atexit
import faulthandler
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import time
import types
from typing import Any, NoReturn

from firepool_agent import calls, fresh, isolate
from firepool_agent.order import WAITING, Order, receive
from firepool_agent.outcome import flush
from firepool_agent.scratch import Slot
from firepool_agent.stackdump import Stacks
from firepool_wire.nursery import PodConfig

#: Where the attempt's descriptors lie from the first moment on; everything above is closed.
JOB_FD, STACKS_FD = 3, 4

#: `import` lines of the base environment's `.pth` files: code, therefore run here, without privileges.
startup_lines: list[tuple[str, types.CodeType]] = []

#: A trivial call, packed once by the zygote: `payload` and `args` (base64).
rehearsal: dict[str, Any] = {}


def live(config: PodConfig, slot: Slot, fds: list[int]) -> NoReturn:
    """The whole life of the process. `fds`: job socket, stdout, stderr, stacks."""
    code = 1
    try:
        _settle(fds)
        reseed()
        rehearse()
        sock = socket.socket(fileno=JOB_FD)
        sock.send(WAITING)
        came = receive(sock)
        if came is not None:
            code = _work(config, slot, sock, *came)
    except BaseException:  # noqa: BLE001 - the last frame of the process: say it and end
        sys.excepthook(*sys.exc_info())
    finally:
        flush()
        os._exit(code)


def _settle(fds: list[int]) -> None:
    """Own session and standard streams, no foreign descriptor, default signals."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    job, out, err, stacks = (_above(fd) for fd in fds)
    for source, target in ((null, 0), (out, 1), (err, 2), (job, JOB_FD), (stacks, STACKS_FD)):
        os.dup2(source, target, inheritable=target <= 2)
    os.closerange(STACKS_FD + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _above(fd: int) -> int:
    """The descriptor, or a copy of it that does not lie where the fixed ones go."""
    return fd if fd > STACKS_FD else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STACKS_FD + 1)


def _work(config: PodConfig, slot: Slot, sock: socket.socket, order: Order, blobs: dict[str, int]) -> int:
    carried = fresh.pack_modules() if order.fresh else -1
    isolate.enter_attempt(config, slot, isolate.Exposure(order.package, tuple(order.layers)))
    _set_environment(order.env)
    os.makedirs(order.env["FIREPOOL_OUTPUT_DIR"], exist_ok=True)
    sink = calls.Sink(sock.sendall, time.monotonic)
    if order.argv is not None:
        return execute(order.argv, sink)
    if order.fresh:
        fresh.replace_interpreter(config.python, order, blobs, carried)
    _run_startup_lines()
    sys.path[:0] = order.paths
    return run_function(order, blobs, sink)


def run_function(order: Order, blobs: dict[str, int], sink: calls.Sink) -> int:
    """Run it and what the program registered for its end. Threads that still run are not waited for: the result is out."""
    gc.enable()
    code = calls.run(order, blobs, sink)
    atexit._run_exitfuncs()
    return code


def execute(argv: list[str], sink: calls.Sink) -> int:
    """Become the command. A command that cannot be started ends as in a shell: 127 not found, 126 not executable."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these; programs expect the default
    sink.started()
    try:
        os.execvpe(argv[0], argv, os.environ)
    except FileNotFoundError:
        os.write(2, f"firepool: {argv[0]}: not found\n".encode())
        return 127
    except (OSError, ValueError) as why:
        os.write(2, f"firepool: {argv[0]}: {why}\n".encode())
        return 126


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)  # reaches C's getenv too
    if "TZ" in variables:
        time.tzset()


def _run_startup_lines() -> None:
    for line, code in startup_lines:
        try:
            exec(code, {})
        except Exception as why:  # noqa: BLE001 - as `site` does: a broken line is told and skipped
            os.write(2, f"firepool: a .pth line of the base environment failed: {line}: {why}\n".encode())


def look_like_a_start() -> None:
    """What a freshly started interpreter would have: `__main__`, line buffers, a way to show its stacks, and none of our
    modules in the way. Done once, by the zygote; attempts inherit it."""
    sys.argv = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    Stacks.arm(STACKS_FD)
    faulthandler.enable(2)
    forget_house()


def rehearse() -> None:
    """Run a call of our own through the whole path while nobody waits for it: after a fork every page that is touched for
    the first time costs 2 µs here, and the path to a user's first instruction touches some hundreds."""
    order = Order(attempt="", function={"payload": "-", "args": rehearsal["args"]}, max_result_bytes=1 << 20)
    packed = json.loads(order.pack()[4:])
    fd = os.memfd_create("rehearsal")
    os.write(fd, rehearsal["payload"])
    calls.run(Order(**packed), {"payload": fd}, calls.Sink(lambda _frame: None, time.monotonic))
    os.environ.update(dict.fromkeys(map(str, range(16)), ""))
    os.environ.clear()


def forget_house() -> None:
    """Take our modules out of `sys.modules`: a user's own firepool, of whatever version, is the one that he imports."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("firepool_agent", "firepool_wire")]:
        del sys.modules[name]


def reseed() -> None:
    """Children of one zygote would otherwise draw the same numbers (`quickfork` sees to `random`)."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
