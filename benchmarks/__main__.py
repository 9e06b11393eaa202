"""`python -m benchmarks NAME [--quick] [--json FILE] [--seed N]`: run one benchmark, show its table, write its JSON.

The exit code is 0 also when a bar fails (the table says so): a figure is a measurement, not a test.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from rich.console import Console

from benchmarks.harness import OUT, Context, Report

#: Seed of every benchmark unless told otherwise (the paper's, B.4).
SEED = 2027


def names() -> list[str]:
    """Every benchmark of this package, found without importing any (some need extras that are not installed)."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if _is_benchmark(path))


def _is_benchmark(path: Path) -> bool:
    """A module with `NAME` and `run`."""
    defined: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                defined.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
    return {"NAME", "run"} <= defined


def load(name: str) -> ModuleType | None:
    """The benchmark of this name, or None."""
    stem = name.replace("-", "_")
    return importlib.import_module(f"benchmarks.{stem}") if stem in names() else None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(prog="python -m benchmarks", description="Run one benchmark.")
    cli.add_argument("name", nargs="?", help="its name; without one, the names are listed")
    cli.add_argument("--quick", action="store_true", help="ends within 45 s and still measures something real")
    cli.add_argument("--json", type=Path, default=None, metavar="FILE", help="default benchmarks/out/<name>.json")
    cli.add_argument("--seed", type=int, default=SEED)
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    console = Console(stderr=False)
    if args.name is None:
        console.print("\n".join(names()), highlight=False)
        return 0
    module = load(args.name)
    if module is None:
        near = get_close_matches(args.name, names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        console.print(f"There is no benchmark {args.name!r}.{hint} There are: {', '.join(names())}.", markup=False)
        return 2
    report = Report(str(module.NAME), args.seed)
    module.run(Context(report, args.quick, args.seed, console))
    path = args.json or OUT / f"{report.name}.json"
    report.write(path)
    report.show(console)
    console.print(f"  written: {path}", style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
