"""What every benchmark shares: its context, its report, and how a report is shown and written (spec §15).

A benchmark is a module of this package with `NAME` and `run(ctx)`. It measures, calls `ctx.report.figure(...)`, states its
bars, and notes what it could not run; it never fills in a figure that it did not measure.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.stats import percentile

Op = Literal["<=", ">=", "=="]

#: When a `--quick` run stops taking samples; setting up and tearing down have the rest of the 45 s.
QUICK_S = 32.0

#: Where results go unless told otherwise.
OUT = Path(__file__).parent / "out"


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure to reach."""

    op: Op
    value: float

    def holds(self, figure: float) -> bool:
        """Whether a figure reaches it."""
        match self.op:
            case "<=":
                return figure <= self.value
            case ">=":
                return figure >= self.value
            case "==":
                return figure == self.value


@dataclass(slots=True)
class Report:
    """Figures with their samples, bars and notes, and tables for people."""

    name: str
    seed: int
    figures: dict[str, float] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    bars: dict[str, Bar] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def figure(self, key: str, value: float, samples: int = 1) -> None:
        """A measured figure; the key carries its unit."""
        self.figures[key] = value
        self.samples[key] = samples

    def latencies(self, stem: str, seconds: Sequence[float], unit: Literal["s", "ms", "us"] = "ms") -> None:
        """p50 and p99 of measured seconds as `<stem>_p50_<unit>` and `<stem>_p99_<unit>`."""
        scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
        for q, word in ((0.5, "p50"), (0.99, "p99")):
            self.figure(f"{stem}_{word}_{unit}", percentile(seconds, q) * scale, len(seconds))

    def bar(self, key: str, op: Op, value: float) -> None:
        """A figure to reach; judged only where the figure was measured."""
        self.bars[key] = Bar(op, value)

    def note(self, text: str) -> None:
        """Something a reader of the figures must know."""
        self.notes.append(text)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people, shown above the figures."""
        table = Table(title=title, title_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*[pretty(cell) if isinstance(cell, float) else str(cell) for cell in row])
        self.tables.append(table)

    def verdicts(self) -> dict[str, dict[str, object]]:
        """Every bar whose figure was measured, with whether it holds."""
        return {
            key: {"op": bar.op, "value": bar.value, "holds": bar.holds(self.figures[key])}
            for key, bar in self.bars.items()
            if key in self.figures
        }

    def to_json(self) -> dict[str, Any]:
        """The report as spec §15 shapes it."""
        missing = [key for key in self.bars if key not in self.figures]
        return {
            "name": self.name,
            "commit": commit(),
            "machine": machine(),
            "seed": self.seed,
            "figures": self.figures,
            "samples": self.samples,
            "bars": self.verdicts(),
            "notes": [*self.notes, machine_speed(), *(f"{key}: not measured in this run" for key in missing)],
        }

    def write(self, path: Path) -> None:
        """Write the JSON object."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")

    def show(self, console: Console) -> None:
        """The report for people."""
        for table in self.tables:
            console.print(table)
        console.print(self._figures_table())
        for note in self.notes:
            console.print(f"  note: {note}", highlight=False, markup=False)
        console.print(f"  note: {machine_speed()}", highlight=False, markup=False)

    def _figures_table(self) -> Table:
        table = Table(title=f"{self.name} (seed {self.seed})", title_justify="left")
        for column in ("figure", "value", "samples", "to reach", ""):
            table.add_column(column, justify="left" if column in ("figure", "") else "right")
        for key, value in self.figures.items():
            bar = self.bars.get(key)
            wanted = f"{bar.op} {pretty(bar.value)}" if bar is not None else ""
            verdict = "" if bar is None else "[green]holds[/]" if bar.holds(value) else "[bold red]FAILS[/]"
            table.add_row(key, pretty(value), str(self.samples[key]), wanted, verdict)
        return table


@dataclass(frozen=True, slots=True)
class Context:
    """What a benchmark is given."""

    report: Report
    quick: bool
    seed: int
    console: Console
    #: CLOCK_MONOTONIC when the benchmark began.
    began_s: float = field(default_factory=time.monotonic)

    def out_of_time(self, share: float = 1.0) -> bool:
        """Whether a `--quick` run has used this share of its time: on a busy machine it then makes do with the samples it has."""
        return self.quick and time.monotonic() - self.began_s > QUICK_S * share

    def say(self, text: str) -> None:
        """Progress for whoever watches."""
        self.console.print(text, style="dim", highlight=False, markup=False)


def pretty(value: float) -> str:
    """A number with as many digits as people read."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def machine() -> dict[str, object]:
    """What this ran on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


@cache
def machine_speed(samples: int = 15) -> str:
    """How fast this machine is at the moment, in words: the fastest of some bare `python -I -S -c pass`.

    A shared machine is at times half as fast as at others, also when idle. Absolute figures of two runs compare only with this
    beside them; ratios within a run need it not.
    """
    took = []
    for _ in range(samples):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        took.append(time.perf_counter() - began)
    return f"this machine, at the moment: a bare `python -I -S -c pass` takes {min(took) * 1e3:.1f} ms at best"


def commit() -> str:
    """The commit that was measured, marked when the tree differs from it; "unknown" outside a checkout."""
    root = Path(__file__).parent.parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if dirty else head
