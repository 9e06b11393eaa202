"""Puts the command line together: the groups of commands, the options that all of them share, other packages' commands."""

from importlib.metadata import entry_points

import typer

from firepool_ray.cli import jobs, local, pools
from firepool_ray.cli.api import Target
from firepool_wire.version import FIREPOOL

HELP = """Warm pods for RL trainers and agent harnesses.

Start with [bold]firepool up[/bold], then [bold]firepool submit -- python train.py[/bold].
Every command takes --json; exit codes are explained in the docs (docs/cli.md).
"""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"firepool {FIREPOOL}")
        raise typer.Exit


def _shared(
    context: typer.Context,
    address: str = typer.Option(
        "", "--address", "-a", envvar="FIREPOOL_ADDRESS", help="Broker, http://host:port; default: the local one."
    ),
    token: str = typer.Option(
        "", "--token", envvar="FIREPOOL_TOKEN", help="Bearer token; default: the local broker's own."
    ),
    profile: str = typer.Option("", "--profile", envvar="FIREPOOL_PROFILE", help="Profile of firepool.toml."),
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Say the version and exit."
    ),
) -> None:
    context.obj = Target(address=address, token=token, profile=profile)


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback()(_shared)
    for group in (local, jobs, pools):
        group.register(app)
    for found in entry_points(group="firepool.commands"):
        app.add_typer(found.load(), name=found.name)
    return app
