"""`make docs`: redraws what the docs show of the code: the rooms in ARCHITECTURE.md and docs/rooms.md, the state diagrams in
docs/states.md, the table of errors in docs/errors.md. A tidy test fails when they are out of date, so that docs and code cannot
drift apart.
"""

import ast
import sys
from pathlib import Path

from firepool_broker.core import jobs, pods
from firepool_wire import errors

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- rooms:begin -->", "<!-- rooms:end -->"

#: Folders whose rooms ARCHITECTURE.md lists, with their title.
FLOORS = {
    "broker/firepool_broker/core": "core",
    "broker/firepool_broker/shell": "shell",
    "broker/firepool_broker/api": "api",
    "broker/firepool_broker/sim": "sim",
    "agent/firepool_agent": "agent",
    "agent/firepool_wire": "wire",
}


def summary(path: Path) -> str:
    """First sentence of a module's docstring, on one line."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(doc.split("\n\n")[0].split())
    head, dot, _ = text.partition(". ")
    return head.rstrip(".:") if dot else text.rstrip(".:")


def rooms(folder: Path) -> list[tuple[str, str]]:
    """Name and summary of every room: modules, and packages by their `__init__`."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            found.append((path.stem, summary(path)))
        elif (path / "__init__.py").exists():
            found.append((path.name, summary(path / "__init__.py")))
    return found


def rooms_page() -> str:
    """docs/rooms.md: every room with what lives there, from the docstrings."""
    lines = [
        "# Rooms",
        "",
        "Drawn from the modules' docstrings by `make docs`.",
        "",
        "| floor | room | what lives there |",
        "|---|---|---|",
    ]
    for folder, title in FLOORS.items():
        for n, (name, text) in enumerate(rooms(ROOT / folder)):
            lines.append(f"| {title if n == 0 else ''} | `{name}` | {text.replace('|', '/')} |")
    return "\n".join([*lines, ""])


def architecture(text: str) -> str:
    """ARCHITECTURE.md with its lists of rooms redrawn."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lists = [
        f"- **{title}**: {' '.join(f'`{name}`' for name, _ in rooms(ROOT / folder))}"
        for folder, title in FLOORS.items()
    ]
    return "\n".join([before + BEGIN, *lists, END + after])


def errors_page() -> str:
    """docs/errors.md, from the one table."""
    lines = [
        "# Errors",
        "",
        "Drawn from `firepool_wire/errors.py` by `make docs`. `firepool.is_infra(error)` is true where a reward must be masked.",
        "",
    ]
    lines += ["| code | fault | retry can help | HTTP | meaning |", "|---|---|---|---|---|"]
    for code, cls in errors.TABLE.items():
        meaning = " ".join((cls.__doc__ or "").split())
        lines.append(
            f"| `{code}` | {cls.fault.value} | {'yes' if cls.retryable else 'no'} | {cls.status} | {meaning} |"
        )
    return "\n".join([*lines, ""])


def pages() -> dict[str, str]:
    """Every drawn page by its path, as it should be now."""
    return {
        "ARCHITECTURE.md": architecture((ROOT / "ARCHITECTURE.md").read_text()),
        "docs/rooms.md": rooms_page(),
        "docs/states.md": states(),
        "docs/errors.md": errors_page(),
    }


def states() -> str:
    """docs/states.md, drawn from the transition tables."""
    parts = ["# States\n\nDrawn from the transition tables in `core/jobs.py` and `core/pods.py` by `make docs`.\n"]
    job_edges = [(str(before or "[*]"), str(after), why) for (before, after), why in jobs.EDGES.items()]
    pod_edges = [(str(before), str(after), why) for (before, after), why in pods.EDGES.items()]
    for title, edges in (("Jobs", job_edges), ("Pods", pod_edges)):
        lines = [f"## {title}\n", "```mermaid", "stateDiagram-v2"]
        lines += [f"    {before} --> {after}: {why}" for before, after, why in edges]
        parts.append("\n".join([*lines, "```", ""]))
    return "\n".join(parts)


def main() -> None:
    """Write every page; say which changed."""
    for name, text in pages().items():
        path = ROOT / name
        changed = not path.exists() or path.read_text() != text
        path.write_text(text)
        sys.stdout.write(f"{name}: {'redrawn' if changed else 'up to date'}\n")


if __name__ == "__main__":
    main()
