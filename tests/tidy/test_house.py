"""The layout of the house as a test: floors, rooms with tests, pure core, versions and names that agree."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import firepool_wire.version
from benchmarks import diagrams
from tests.tidy.source import ROOT, label, modules, tree

#: Core rooms that hold only names or data, checked through the rooms that use them.
DATA_ROOMS = {"ids", "asks", "events", "effects", "__init__"}


def test_every_room_of_the_core_says_where_it_is_tested() -> None:
    """A file of its own, or a name in the docstring of the file that tests it with others: where to look, and to add."""
    rooms = {p.stem for p in modules("broker/firepool_broker/core")} - DATA_ROOMS
    files = sorted((ROOT / "tests/core").glob("test_*.py"))
    named = {p.stem.removeprefix("test_") for p in files}
    named |= {room for p in files for room in re.findall(r"`(\w+)`", ast.get_docstring(tree(p)) or "")}
    assert rooms <= named, f"named by no test file in tests/core: {sorted(rooms - named)}"


def test_the_core_opens_no_file_and_prints_nothing() -> None:
    calls = [
        label(p, n)
        for p in modules("broker/firepool_broker/core")
        for n in ast.walk(tree(p))
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and n.func.id in ("open", "print", "input", "exec", "eval")
    ]
    assert not calls


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == firepool_wire.version.FIREPOOL


def test_change_fragments_are_named_by_what_they_change() -> None:
    wrong = [
        p.name
        for p in (ROOT / "changes").iterdir()
        if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md|README\.md", p.name)
    ]
    assert not wrong, "changes/<words>.<added|changed|fixed|removed>.md"


def test_every_decision_names_what_was_rejected() -> None:
    thin = [p.name for p in (ROOT / "decisions").glob("[0-9]*.md") if "## Rejected" not in p.read_text()]
    assert not thin


def test_what_the_docs_draw_of_the_code_is_up_to_date() -> None:
    stale = [
        name
        for name, text in diagrams.pages().items()
        if not (ROOT / name).exists() or (ROOT / name).read_text() != text
    ]
    assert not stale, f"run `make docs` for {stale}"


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ("broker/firepool_broker/core/ids.py", "import time"),
        ("broker/firepool_broker/sim/__init__.py", "import firepool_broker.shell.ports"),
        ("agent/firepool_wire/words.py", "import firepool_agent"),
        ("firepool_ray/__init__.py", "import firepool_broker"),
    ],
)
def test_the_floors_are_really_watched(tmp_path: Path, planted: str, line: str) -> None:
    """A guard that can pass without looking is worse than none: a planted violation must be caught."""
    for name in ("firepool_ray", "broker", "agent"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    victim = tmp_path / planted
    victim.write_text(victim.read_text() + f"\n{line}\n")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{tmp_path}/broker:{tmp_path}/agent", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0, run.stdout + run.stderr
    assert "BROKEN" in run.stdout, run.stdout + run.stderr
