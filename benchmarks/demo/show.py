"""What a person sees of the demo: an opening that says what is real, a progress bar, tables, one `explain`."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import humaneval
from benchmarks.demo.loops import Result
from benchmarks.demo.venue import Venue
from benchmarks.workloads import ARMS

_console = Console()
_LABELS = {arm.name: arm.label for arm in ARMS}
_WORKLOADS = {
    "w_rl": "RL loop: 4 × (8 rollouts, 2 evaluations, 1 update)",
    "w_agent_2": "Agent loop: 2 agents, 19 calls with thinking pauses",
}

#: Columns of the latency table: title, span of the API's `times`.
_SPANS = (("wait", "queue_wait_s"), ("hand-off", "handoff_s"), ("start", "launch_to_first_s"))


def opening(start_s: float, *, full: bool) -> None:
    """Say what will run, what is real and what is simulated."""
    text = (
        "Every rollout runs a candidate program (a HumanEval solution, or a mutation that is wrong, loops, hogs memory, forks, "
        "litters or exits) against its test, in an isolated job of an untrusted pool on this machine. Real: the broker, its "
        f"durable store, the pods, every kill and every reset. [bold]Simulated: a pod start takes {start_s:g} s[/bold] "
        "(a GPU pod takes 20 s to minutes)."
    )
    _console.print(Panel(text, title="Firepool demo" + (" (full)" if full else ""), title_align="left"))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over all jobs; call it with the arm's name for every job that ended."""
    with Progress(
        TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=_console
    ) as bars:
        task = bars.add_task("", total=total)
        yield lambda arm: bars.update(task, advance=1, description=_LABELS[arm])


def first_cold(results: Sequence[Result], venue: Venue) -> str:
    """`explain` of one job that was not warm; empty where there was none."""
    for result in results:
        for job in result.jobs:
            if result.arm == "off" and job["path"] not in ("warm", None) and job.get("why_not_warmer"):
                return venue.explain(job["id"])
    return ""


def closing(results: Sequence[Result], explained: str, took_s: float) -> bool:
    """Tables and one explanation; whether every verdict was right."""
    for name, title in _WORKLOADS.items():
        _latencies(title, [r for r in results if r.workload == name])
    _legend()
    right = _verdicts(results)
    if explained:
        _console.print(Panel(explained, title="firepool explain: a job that was not warm", title_align="left"))
    _console.print(
        f"[dim]took {took_s:.0f} s; figures in benchmarks/out/demo.json; next: decorate a function of your own (README.md)[/dim]"
    )
    return right


def _latencies(title: str, results: Sequence[Result]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("arm", no_wrap=True)
    for column in ("jobs", "wall", "× On", "first p50", "p90", *(t for t, _ in _SPANS), "warm"):
        table.add_column(column, justify="right", no_wrap=True)
    by_arm = {r.arm: r for r in results}
    base = by_arm["on"].wall_s
    for arm in ARMS:
        r = by_arm[arm.name]
        cells = [str(len(r.jobs)), f"{r.wall_s:.1f} s", f"{r.wall_s / base:.1f}×"]
        cells += [_time(r.span("submit_to_first_s", q)) for q in (0.5, 0.9)]
        cells += [_time(r.span(span, 0.5)) for _, span in _SPANS]
        table.add_row(arm.label.removesuffix(" per job"), *cells, "–" if math.isnan(r.reuse) else f"{r.reuse:.0%}")
    _console.print(table)
    for arm in ARMS:
        paths = ", ".join(f"{n} {path}" for path, n in by_arm[arm.name].paths.most_common())
        _console.print(f"[dim] {arm.label}: {paths}[/dim]", highlight=False)
    _console.print()


def _legend() -> None:
    _console.print(
        "[dim]first: submission to first instruction; its stages at the median: wait for a pod, hand-off, start "
        "(process let go to first instruction). warm: share of jobs that started without a new pod. × On: wall time against Reuse On.[/dim]\n"
    )


def _verdicts(results: Sequence[Result]) -> bool:
    seen = Counter((kind, verdict) for r in results for kind, _, verdict in r.verdicts)
    table = Table(
        "candidate",
        "verdict",
        "because",
        "judged",
        "as expected",
        title="Verdicts over all arms",
        title_justify="left",
        header_style="bold",
    )
    right = True
    for kind, (expected, reason) in humaneval.EXPECTED.items():
        total = sum(n for (k, _), n in seen.items() if k == kind)
        good = seen[kind, expected]
        right &= good == total
        mark = (
            "[green]all[/green]"
            if good == total
            else f"[red]{good}[/red] ({', '.join(f'{n} {v}' for (k, v), n in seen.items() if k == kind)})"
        )
        table.add_row(kind, expected, reason, str(total), mark if total else "–")
    _console.print(table)
    return right


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
