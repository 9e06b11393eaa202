"""What a person or a program sees of the command line: tables or JSON, errors that say what to do, exit codes.

Exit codes: a job's own code where one ended with one (128 + n for signal n); else sysexits: 64 wrong use, 66 no such
thing, 69 no broker, 70 a bug of ours, 75 try again later (infrastructure or a limit), 77 not allowed; 1 for a job that
failed without a code; 130 for Ctrl-C.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import typer
from rich.console import Console
from rich.table import Table

from firepool_wire import errors

#: Exit status by error code; anything else is 75 when a retry can help, else 1.
EXIT_BY_CODE = {
    "BadRequest": 64,
    "UnknownField": 64,
    "UnknownSku": 66,
    "NotFound": 66,
    "BrokerUnavailable": 69,
    "Internal": 70,
    "Unauthenticated": 77,
    "Forbidden": 77,
    "ImageNotAllowed": 77,
}

#: Base of every error of wrong use. typer brings its own copy of click in newer versions, so it is asked for its class.
_WrongUse = cast("type[Exception]", next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"))

_out = Console(soft_wrap=False)
_err = Console(stderr=True, soft_wrap=True)


def exit_code(error: errors.FirepoolError) -> int:
    """The process exit status that stands for an error."""
    if error.code in EXIT_BY_CODE:
        return EXIT_BY_CODE[error.code]
    return 75 if error.retryable else 1


def job_exit_code(body: Mapping[str, Any]) -> int:
    """The exit status that stands for a terminal job."""
    if body["state"] == "SUCCEEDED":
        return 0
    if body.get("signal"):
        return 128 + int(body["signal"])
    if body.get("exit_code"):
        return int(body["exit_code"])
    error = body.get("error")
    return exit_code(errors.from_json(error)) or 1 if error else 1


def emit_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def say(text: str) -> None:
    """A line for people, on standard output; markup of rich applies."""
    _out.print(text, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """A line for people that is not the answer itself (progress, hints): on standard error."""
    _err.print(text, highlight=False)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, empty: str = ""
) -> None:
    """Rows for people; `empty` is said instead of an empty table. Cells of None show as a dash."""
    rows = list(rows)
    if not rows:
        say(empty or "nothing to show")
        return
    grid = Table(*columns, title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for row in rows:
        grid.add_row(*("–" if cell is None or cell == "" else str(cell) for cell in row))
    if _out.is_terminal:
        _out.print(grid)
    else:
        # A pipe has no width: let nothing be cut.
        Console(file=sys.stdout, width=240).print(grid)


def seconds(value: float | None) -> str | None:
    """A duration as people say it."""
    if value is None:
        return None
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(value: float | None) -> str | None:
    """Bytes as people say them."""
    if value is None:
        return None
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return None


def explain_error(error: errors.FirepoolError) -> None:
    """An error on standard error: what happened, to which job, whose fault, whether to retry, what to do."""
    whose = {"user": "yours", "infra": "ours", "limit": "a limit"}[error.fault.value]
    again = "trying again can help" if error.retryable else "trying again as it is will not help"
    if error.retry_after_s is not None:
        again += f" (after {seconds(error.retry_after_s)})"
    head = f"[bold red]{error.code}[/bold red]" + (f" (job {error.job_id})" if error.job_id else "")
    note(f"{head}: {error.message}")
    note(f"  whose fault: {whose}; {again}")
    if log := error.details.get("log"):
        note(f"  last lines:\n{log}")


def run(app: typer.Typer) -> int:
    """Run the app; every error of ours becomes words and an exit status, never a traceback."""
    command = typer.main.get_command(app)
    try:
        result = command.main(standalone_mode=False, prog_name="firepool")
    except errors.FirepoolError as error:
        if "--json" in sys.argv:
            emit_json({"error": error.to_json()})
        else:
            explain_error(error)
        return exit_code(error)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return 130
    except _WrongUse as wrong:
        cast("typer.BadParameter", wrong).show()
        return 64
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) left; that is not a failure of ours.
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0
