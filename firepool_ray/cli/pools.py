"""Commands about capacity: pools (list, apply with a diff), pods, top."""

import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from firepool_ray.cli.api import Api, target
from firepool_ray.cli.jobs import Json
from firepool_ray.cli.output import emit_json, say, seconds, table
from firepool_wire.errors import BadRequest

pools_app = typer.Typer(
    help="Pools: what there is, and apply a pools file.", no_args_is_help=False, invoke_without_command=True
)


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.add_typer(pools_app, name="pools")
    app.command()(pods)
    app.command()(top)


@pools_app.callback()
def pools(context: typer.Context, as_json: Json = False) -> None:
    """Show the pools with their knobs and what they hold now."""
    if context.invoked_subcommand:
        return
    with target(context).connect() as api:
        answer = api.get("/v1/pools")
    if as_json:
        emit_json(answer)
        return
    table(*_pool_table(answer["pools"]), empty="no pools configured: firepool pools apply FILE")


def _pool_table(found: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    columns = (
        "SKU",
        "PODS",
        "STARTING",
        "IDLE",
        "RUNNING",
        "HELD",
        "QUEUED",
        "FLOOR",
        "CEILING",
        "KEEP-ALIVE",
        "NOTES",
    )
    rows: list[tuple[object, ...]] = []
    for pool in found:
        counts, knobs = pool["counts"], pool["pool"]
        notes = [str(n) for n in pool.get("labels", [])]
        rows.append(
            (
                pool["sku"],
                counts["physical"],
                counts["starting"],
                counts["idle"],
                counts["running"] + counts["assigned"],
                counts["held"],
                counts["queued"],
                knobs["min_count"],
                knobs["max_count"],
                seconds(knobs["idle_timeout_s"]),
                ", ".join(notes),
            )
        )
    return columns, rows


def read_pools_file(path: Path) -> list[dict[str, Any]]:
    """The pool definitions of a pools file: one table `[pools.<sku>]` each.

    Raises:
        BadRequest: the file is missing, not TOML, or has no such table; says where.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"cannot read the pools file {path}: {error.strerror}", field="file") from None
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML: {error}", field="file") from None
    found = document.get("pools")
    if not isinstance(found, dict) or not found:
        raise BadRequest(f"{path} defines no pool: write one table [pools.<sku>] for each", field="pools")
    return [{"sku": sku, **knobs} for sku, knobs in found.items()]


@pools_app.command()
def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Pools file (TOML).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    as_json: Json = False,
) -> None:
    """Make the pools what the file says; shows the difference. A wrong file changes nothing and lists every error."""
    with target(context).connect() as api:
        answer = api.put("/v1/pools", {"pools": read_pools_file(file), "dry_run": dry_run})
    if as_json:
        emit_json(answer)
        return
    changes = answer["diff"]
    for change in changes:
        mark = {"added": "[green]+[/green]", "removed": "[red]-[/red]", "changed": "[yellow]~[/yellow]"}[change["kind"]]
        what = (
            f"{change['sku']}.{change['knob']}: {change['before']} → {change['after']}"
            if change.get("knob")
            else change["sku"]
        )
        say(f"{mark} {what}")
    if not changes:
        say("nothing changes")
    elif dry_run:
        say("[dim]dry run: nothing was applied[/dim]")


def pods(
    context: typer.Context, sku: Annotated[str, typer.Option(help="Only this pool.")] = "", as_json: Json = False
) -> None:
    """List pods: state, owner, how long it is held, what it runs."""
    with target(context).connect() as api:
        answer = api.get("/v1/pods", **({"sku": sku} if sku else {}))
    if as_json:
        emit_json(answer)
        return
    rows = [
        (
            p["name"],
            p["sku"],
            p["state"],
            p.get("owner"),
            p.get("tag"),
            p.get("job"),
            seconds(p.get("hold_left_s")),
            p.get("isolation"),
        )
        for p in answer["pods"]
    ]
    table(
        ("POD", "SKU", "STATE", "OWNER", "TAG", "JOB", "HELD FOR", "ISOLATION"),
        rows,
        empty="no pods: they come with the first job",
    )


def top(
    context: typer.Context,
    interval_s: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then leave.")] = False,
    as_json: Json = False,
) -> None:
    """Watch pools and running jobs."""
    with target(context).connect() as api:
        if as_json or once:
            answer = {"pools": api.get("/v1/pools")["pools"], "jobs": _running(api)}
            if as_json:
                emit_json(answer)
            else:
                table(*_pool_table(answer["pools"]))
            return
        with Live(_screen(api), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_screen(api), refresh=True)


def _running(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/v1/jobs", state="RUNNING,QUEUED", limit="20")["jobs"]
    return found


def _screen(api: Api) -> Table:
    columns, rows = _pool_table(api.get("/v1/pools")["pools"])
    upper = Table(*columns, box=None, header_style="bold")
    for row in rows:
        upper.add_row(*("–" if c is None or c == "" else str(c) for c in row))
    lower = Table("JOB", "STATE", "NAME", "SKU", "BLOCKED BY", box=None, header_style="bold")
    for body in _running(api):
        lower.add_row(
            body["id"],
            body["state"],
            body.get("name") or "–",
            body["sku"],
            (body.get("waiting") or {}).get("blocked_by") or "–",
        )
    both = Table.grid()
    both.add_row(upper)
    both.add_row("")
    both.add_row(lower)
    return both
