"""The command line `firepool`. One module a group of commands; what they print is in `output`, how they talk to the broker
in `api`. Other packages add commands through the entry point group `firepool.commands` (each a typer app)."""

import sys


def main() -> None:
    """Entry point of the console script. Imports typer here, so that `import firepool_ray` stays light."""
    from firepool_ray.cli.app import build
    from firepool_ray.cli.output import run

    sys.exit(run(build()))
