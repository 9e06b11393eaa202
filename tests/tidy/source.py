"""What the tidy tests read: our own source files as text and syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Folders that hold code we ship.
HOUSES = ("firepool_ray", "broker/firepool_broker", "agent/firepool_agent", "agent/firepool_wire")


@cache
def modules(*folders: str) -> tuple[Path, ...]:
    """Every Python file below the folders (default: all houses and the benchmarks), generated migrations left out."""
    chosen = folders or (*HOUSES, "benchmarks")
    found = [p for folder in chosen for p in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(p for p in found if "migrations/versions" not in p.as_posix())


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def label(path: Path, node: ast.AST | None = None) -> str:
    """`folder/file.py:line name`, clickable in most terminals."""
    place = path.relative_to(ROOT).as_posix()
    if node is None:
        return place
    return f"{place}:{getattr(node, 'lineno', 0)} {getattr(node, 'name', '')}"
