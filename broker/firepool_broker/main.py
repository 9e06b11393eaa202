"""The only room that builds things: flags → settings → stores, providers, agents, runner, API → serve, until told to stop.

    firepool-broker --home DIR [--pools FILE] [--simulate h200] [--host 127.0.0.1] [--port 0] [--python PATH] …

Exit codes: 0 stopped as asked, 64 bad flags or pools, 69 cannot work here, 70 an invariant broke, 75 another broker has
this home.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog
import uvloop

from firepool_broker.serve import Broker
from firepool_broker.settings import Settings
from firepool_broker.shell import logs
from firepool_broker.shell.ports import StoreDown
from firepool_wire.errors import BadRequest, FirepoolError, StoreUnavailable, UnknownField
from firepool_wire.version import FIREPOOL

EX_USAGE, EX_UNAVAILABLE, EX_SOFTWARE, EX_TEMPFAIL = 64, 69, 70, 75

#: CPython hands the GIL over after this long. At the default of 5 ms a 16-job commit in the store's thread took 21 ms
#: beside a busy loop; at 0.1 ms it takes 1.2 ms.
SWITCH_S = 1e-4

#: Young objects before a collection. The engine keeps few cycles; long collections would stall `handle`.
GC_THRESHOLDS = (20_000, 20, 50)


def settings_of(argv: Sequence[str]) -> Settings:
    """The command line as settings. Exits with code 64 when it makes no sense."""
    parser = argparse.ArgumentParser(prog="firepool-broker", description="Keeps warm pods and binds jobs to them late.")
    default_home = os.environ.get("FIREPOOL_HOME") or str(Path.home() / ".firepool")
    parser.add_argument("--home", default=default_home, help="state folder (default: $FIREPOOL_HOME or ~/.firepool)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the last run's port if it is free, else any")
    parser.add_argument(
        "--pools", help="TOML file, one table [pools.<sku>] a pool; without it: what was applied last, or `cpu`"
    )
    parser.add_argument("--simulate", metavar="MODEL", help="make up cards of this model (h200) for a trial")
    parser.add_argument("--python", default=sys.executable, help="job interpreter of pools that name none")
    parser.add_argument("--embedded-parent", type=int, metavar="PID", help="end, with all pods, when PID is gone")
    parser.add_argument("--leave-pods", action="store_true", help="pods and their jobs outlive a stop of the broker")
    parser.add_argument("--log-file", help="write the broker's own log there (JSON lines) instead of stderr")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--version", action="version", version=f"firepool-broker {FIREPOOL}")
    try:
        given = parser.parse_args(argv)
    except SystemExit as over:
        raise SystemExit(EX_USAGE if over.code == 2 else over.code) from None
    return Settings(
        home=Path(given.home).expanduser().absolute(),
        host=given.host,
        port=given.port,
        pools_file=Path(given.pools) if given.pools else None,
        simulate=given.simulate,
        python=given.python,
        embedded_parent=given.embedded_parent,
        leave_pods=given.leave_pods,
        log_file=Path(given.log_file) if given.log_file else None,
        log_level=given.log_level,
    )


async def serve(settings: Settings) -> int:
    """Run one broker until a signal, its parent's end, or a broken invariant; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    broker = Broker(settings)
    try:
        await broker.start()
    except BaseException:
        await broker.aclose()
        raise
    gc.collect()
    gc.freeze()
    watchers = [asyncio.ensure_future(w) for w in (stop.wait(), broker.failed(), parent_gone(settings.embedded_parent))]
    await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
    why = "asked to stop" if stop.is_set() else "an invariant broke" if watchers[1].done() else "the parent is gone"
    structlog.get_logger("firepool").info("stopping", cause=why)
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    await broker.aclose()
    return EX_SOFTWARE if why == "an invariant broke" else 0


async def parent_gone(pid: int | None) -> None:
    """Returns when the process is gone; never for None."""
    if pid is None:
        await asyncio.Event().wait()
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no pidfd on this system: look now and then
        while _alive(pid):
            await asyncio.sleep(1.0)
        return
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    settings = settings_of(sys.argv[1:] if argv is None else argv)
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.set_up(settings.log_level, settings.log_file)
    log = structlog.get_logger("firepool")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings))
    except (BadRequest, UnknownField) as error:
        log.error("bad settings", code=error.code, cause=error.message)
        return EX_USAGE
    except StoreUnavailable as error:
        log.error("cannot start", code=error.code, cause=error.message)
        return EX_TEMPFAIL if "holder" in error.details else EX_UNAVAILABLE
    except (FirepoolError, StoreDown, OSError) as error:
        log.error("cannot start", cause=str(error))
        return EX_UNAVAILABLE
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
