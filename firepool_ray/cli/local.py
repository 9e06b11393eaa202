"""Commands about this machine: up, down, status, doctor. The broker is a process of its own, started by its console script;
nothing of it is imported here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from firepool_ray._config import process_lives, published
from firepool_ray.cli.api import home, target
from firepool_ray.cli.jobs import Json
from firepool_ray.cli.output import emit_json, note, say, seconds, table
from firepool_wire.errors import BrokerUnavailable, IsolationUnavailable

#: What each isolation level means to a user (`design.md` §4.6), strongest first.
_LEVELS = {
    "namespaces": "every job a user, process tree and file system of its own",
    "uid": "every job a user of its own; process tree and file system are shared",
    "process": "jobs are your own user's processes, found and killed through /proc",
    "portable": "no proof that a job's processes are gone: warm reuse for the local caller only",
}
_FACTS = {
    "root": "root",
    "overlay": "overlay file systems",
    "own_network": "a network of its own for every pod",
    "many_uids": "fresh user ids for every attempt",
}

#: Seconds that `up` waits for readiness and `down` for the end.
START_S, STOP_S = 60.0, 30.0


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.command()(up)
    app.command()(down)
    app.command()(status)
    app.command()(doctor)


def running_broker() -> dict[str, Any] | None:
    """What `broker.json` says of the local broker, or None when there is none or its process is gone."""
    return published(home())


def broker_command() -> list[str]:
    """How to start the broker with this interpreter.

    Raises:
        BrokerUnavailable: the `local` extra is not installed; says what to install.
    """
    probe = [
        sys.executable,
        "-c",
        "import importlib.util as u, sys; sys.exit(u.find_spec('firepool_broker.main') is None)",
    ]
    if subprocess.run(probe, check=False).returncode:
        raise BrokerUnavailable(
            "this environment has the client only; for a broker on this machine: pip install 'firepool-ray[local]'"
        )
    return [sys.executable, "-m", "firepool_broker"]


def up(
    simulate: Annotated[str, typer.Option(help="Accelerator to make up, for a trial: h200, h100, a100 …")] = "",
    pools: Annotated[Path | None, typer.Option(help="Pools file (TOML); default: what this machine has.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 = any free one.", min=0, max=65535)] = 0,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay in this terminal.")] = False,
    as_json: Json = False,
) -> None:
    """Start a broker on this machine (or say that one runs)."""
    if found := running_broker():
        _report(found, already=True, as_json=as_json)
        return
    command = [*broker_command(), "--home", str(home()), "--host", host, "--port", str(port)]
    if simulate:
        command += ["--simulate", simulate]
    if pools:
        command += ["--pools", str(pools.resolve())]
    if foreground:
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    home().mkdir(mode=0o700, parents=True, exist_ok=True)
    log = home() / "broker.log"
    with log.open("ab") as out:
        start = out.tell()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    with Console(stderr=True).status("starting the broker"):
        found = _await_ready(child, log, start)
    _report(found, already=False, as_json=as_json)


def _await_ready(child: subprocess.Popen[bytes], log: Path, start: int) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = running_broker()
        if found and int(found["pid"]) == child.pid:
            return found
        if child.poll() is not None:
            with log.open("rb") as text:
                text.seek(start)
                tail = text.read().decode(errors="replace").strip().splitlines()[-15:]
            raise BrokerUnavailable(
                f"the broker ended at its start with code {child.returncode}; its log is {log}", log="\n".join(tail)
            )
        time.sleep(0.02)
    child.terminate()
    raise BrokerUnavailable(f"the broker was not ready after {START_S:.0f} s and was stopped; its log is {log}")


def _report(found: dict[str, Any], *, already: bool, as_json: bool) -> None:
    if as_json:
        emit_json({**found, "already_running": already})
        return
    say(f"broker {'already runs' if already else 'is up'} at [bold]{found['address']}[/bold] (pid {found['pid']})")
    say("[dim]next: firepool pools · firepool submit -- echo hello · firepool down[/dim]")


def down(as_json: Json = False) -> None:
    """Stop the local broker and its pods."""
    found = running_broker()
    if not found:
        emit_json({"stopped": False}) if as_json else say("no broker runs here")
        return
    pid = int(found["pid"])
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while process_lives(pid):
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"broker {pid} did not stop within {STOP_S:.0f} s; its log is {home() / 'broker.log'}"
            )
        time.sleep(0.02)
    emit_json({"stopped": True, "pid": pid}) if as_json else say(f"broker {pid} stopped, its pods are gone")


def status(context: typer.Context, as_json: Json = False) -> None:
    """Who answers at the address: version, pools, jobs by state."""
    with target(context).connect() as api:
        version = api.get("/v1/version")
        pools = api.get("/v1/pools")["pools"]
    if as_json:
        emit_json({"address": api.address, "version": version, "pools": pools})
        return
    say(f"broker [bold]{api.address}[/bold], version {version['version']}")
    rows = [
        (
            p["sku"],
            p["counts"]["physical"],
            p["counts"]["idle"],
            p["counts"]["running"],
            p["counts"]["held"],
            p["counts"]["queued"],
        )
        for p in pools
    ]
    table(("SKU", "PODS", "IDLE", "RUNNING", "HELD", "QUEUED"), rows, empty="no pools configured")


def doctor(as_json: Json = False) -> None:
    """What this machine can do: isolation level and why, the one-line fix, interpreter, accelerators, broker."""
    probe = subprocess.run(
        [sys.executable, "-m", "firepool_agent", "probe"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        reason = probe.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise IsolationUnavailable(
            f"the agent cannot look at this machine: {reason[0]}; is the `local` extra installed?"
        )
    facts: dict[str, Any] = json.loads(probe.stdout)
    facts["python"] = {"path": sys.executable, "version": ".".join(map(str, sys.version_info[:3]))}
    facts["broker"] = running_broker()
    # The agent looks beside the interpreter first, then on PATH.
    beside = Path(sys.executable).with_name("uv")
    facts["uv"] = str(beside) if beside.is_file() else shutil.which("uv")
    if as_json:
        emit_json(facts)
        return
    say(f"isolation: [bold]{facts['isolation']}[/bold] ({_LEVELS[facts['isolation']]})")
    if facts["why"]:
        say(f"  why not more: {facts['why']}")
    if facts["fix"]:
        say(f"  to change it: {facts['fix']}")
    for fact, true in facts["facts"].items():
        say(f"  [dim]{_FACTS.get(fact, fact)}: {'yes' if true else 'no'}[/dim]")
    cards = facts.get("cards") or []
    say(
        f"accelerators: {', '.join(c['model'] for c in cards) if cards else 'none (firepool up --simulate h200 makes some up)'}"
    )
    say(f"python: {facts['python']['version']} at {sys.executable}; installer: {facts['uv'] or 'pip'}")
    broker = facts["broker"]
    if broker:
        age = seconds(time.time() - float(broker["started_at"]))
        say(f"broker: {broker['address']}, up for {age}")
    else:
        note("[dim]no broker runs here: firepool up[/dim]")
