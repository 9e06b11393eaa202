"""`.gitignore`: which files of a tree do not travel. The rules of git for patterns, nested files and `!` exceptions.

Not read: `.git/info/exclude` and a user's global file, since equal trees shall make equal packages on every machine.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

#: Never part of a package, whatever `.gitignore` says.
ALWAYS = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox"}
)

#: Pattern, folders only, and whether it takes back what an earlier one ignored.
Rule = tuple[re.Pattern[str], bool, bool]


def walk(root: Path, *, above: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Files below `root` that are not ignored, as (name with `/`, path), sorted. Links are left out.

    Args:
        root: folder to walk.
        above: topmost folder whose `.gitignore` counts as well (the project's root), if `root` lies below it.
    """
    rules: list[tuple[str, Rule]] = []
    base = ""
    if above is not None and above != root and above in root.parents:
        inner = root.relative_to(above).as_posix()
        base = inner + "/"
        for depth, folder in enumerate([above, *reversed([p for p in root.parents if above in p.parents])]):
            prefix = "/".join(inner.split("/")[:depth])
            rules += [(prefix + "/" if prefix else "", rule) for rule in read(folder)]
    yield from _walk(root, base, len(base), rules)


def _walk(folder: Path, name: str, cut: int, rules: list[tuple[str, Rule]]) -> Iterator[tuple[str, Path]]:
    rules = rules + [(name, rule) for rule in read(folder)]
    with os.scandir(folder) as entries:
        inner = sorted(entries, key=lambda e: e.name)
    for entry in inner:
        if entry.name in ALWAYS or entry.is_symlink():
            continue
        is_dir = entry.is_dir()
        if ignored(name + entry.name, is_dir, rules):
            continue
        if is_dir:
            yield from _walk(Path(entry.path), f"{name}{entry.name}/", cut, rules)
        elif entry.is_file() and not entry.name.endswith((".pyc", ".pyo")):
            yield (name + entry.name)[cut:], Path(entry.path)


def read(folder: Path) -> list[Rule]:
    """The rules of a folder's `.gitignore`, in order."""
    path = folder / ".gitignore"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [rule for line in lines if (rule := parse(line)) is not None]


def parse(line: str) -> Rule | None:
    """One line of a `.gitignore`."""
    line = re.sub(r"(?<!\\) +$", "", line.rstrip("\r"))
    if not line or line.startswith("#"):
        return None
    back = line.startswith("!")
    line = line.removeprefix("!") if back else line.removeprefix("\\")
    only_dirs = line.endswith("/")
    line = line.rstrip("/")
    if not line:
        return None
    anchored = "/" in line
    body = _regex(line.removeprefix("/"))
    return re.compile(body if anchored else f"(?:.*/)?{body}"), only_dirs, back


def _regex(glob: str) -> str:
    out, n = "", 0
    while n < len(glob):
        char = glob[n]
        if glob.startswith("**/", n) and (n == 0 or glob[n - 1] == "/"):
            out, n = out + "(?:.*/)?", n + 3
            continue
        if glob.startswith("/**", n) and n + 3 == len(glob):
            return out + "/.*"
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := glob.find("]", n + 2)) > 0:
            inner = glob[n + 1 : end].replace("\\", "\\\\")
            out += f"[{'^' + inner[1:] if inner[0] == '!' else inner}]"
            n = end
        elif char == "\\" and n + 1 < len(glob):
            n += 1
            out += re.escape(glob[n])
        else:
            out += re.escape(char)
        n += 1
    return out


def ignored(name: str, is_dir: bool, rules: list[tuple[str, Rule]]) -> bool:
    """Whether the last rule that matches says so."""
    for base, (pattern, only_dirs, back) in reversed(rules):
        if only_dirs and not is_dir:
            continue
        if name.startswith(base) and pattern.fullmatch(name[len(base) :]):
            return not back
    return False
