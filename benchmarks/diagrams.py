"""`make docs`: redraws what the docs show of the code: the table of rooms in ARCHITECTURE.md and the state diagrams in
docs/states.md. A tidy test fails when they are out of date, so pictures and code cannot drift apart.
"""

import ast
import sys
from pathlib import Path

from firepool_broker.core.jobs import JOB_EDGES
from firepool_broker.core.pods import POD_EDGES

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


def rooms_table() -> str:
    """All floors as one Markdown table."""
    lines = ["| floor | room | what lives there |", "|---|---|---|"]
    for folder, title in FLOORS.items():
        for n, (name, text) in enumerate(rooms(ROOT / folder)):
            lines.append(f"| {title if n == 0 else ''} | `{name}` | {text.replace('|', '/')} |")
    return "\n".join(lines)


def architecture(text: str) -> str:
    """ARCHITECTURE.md with its table of rooms redrawn."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rooms_table()}\n{END}{after}"


def states() -> str:
    """docs/states.md, drawn from the transition tables."""
    parts = ["# States\n\nDrawn from the transition tables in `core/jobs.py` and `core/pods.py` by `make docs`.\n"]
    for title, edges in (("Jobs", JOB_EDGES), ("Pods", POD_EDGES)):
        lines = [f"## {title}\n", "```mermaid", "stateDiagram-v2"]
        for (before, after), why in edges.items():
            lines.append(f"    {before or '[*]'} --> {after}: {why}")
        parts.append("\n".join([*lines, "```", ""]))
    return "\n".join(parts)


def main() -> None:
    """Write both files; say which changed."""
    targets = {
        ROOT / "docs/states.md": states(),
        ROOT / "ARCHITECTURE.md": architecture((ROOT / "ARCHITECTURE.md").read_text()),
    }
    for path, text in targets.items():
        changed = not path.exists() or path.read_text() != text
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {'redrawn' if changed else 'up to date'}\n")


if __name__ == "__main__":
    main()
