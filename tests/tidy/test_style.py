"""The style of the house as a test: sizes, docstrings, parameters, marks of unfinished work."""

import ast
import re

from tests.tidy.source import HOUSES, ROOT, functions, label, modules, tree

MODULE_LINES = 400
FUNCTION_LINES = 70
PARAMETERS = 5


def test_no_module_is_longer_than_the_house_allows() -> None:
    long = [f"{label(p)} ({n})" for p in modules() if (n := len(p.read_text().splitlines())) > MODULE_LINES]
    assert not long, f"over {MODULE_LINES} lines, split the room: {long}"


def test_no_function_is_longer_than_the_house_allows() -> None:
    long = [
        f"{label(p, f)} ({size})"
        for p in modules()
        for f in functions(p)
        if (size := (f.end_lineno or f.lineno) - f.lineno + 1) > FUNCTION_LINES
    ]
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_a_function_takes_few_parameters_or_a_dataclass() -> None:
    def count(f: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args) if a.arg not in ("self", "cls")]
        return len(names)

    # Keyword-only arguments are named at the call and may be more (an options surface such as `init`).
    many = [
        f"{label(p, f)} ({n})"
        for p in modules(*HOUSES)
        for f in functions(p)
        if (n := count(f)) > PARAMETERS and not _is_command(f)
    ]
    assert not many, f"more than {PARAMETERS} positional parameters: {many}"


def _is_command(f: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Commands take one parameter an option, endpoints one a query parameter: typer's and FastAPI's style."""
    options = any("typer." in ast.unparse(a.annotation) for a in f.args.args if a.annotation)
    return options or any(ast.unparse(d).startswith("api.") for d in f.decorator_list)


def test_every_module_says_what_lives_in_it() -> None:
    silent = [label(p) for p in modules() if not ast.get_docstring(tree(p)) and p.read_text().strip()]
    assert not silent, f"no module docstring: {silent}"


def test_every_public_function_and_class_of_the_houses_has_a_docstring() -> None:
    silent = []
    for path in modules(*HOUSES):
        if path.name.startswith("_") and path.name != "__init__.py":
            continue
        for node in tree(path).body:
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(label(path, node))
    assert not silent, f"public and undocumented: {silent}"


def test_nothing_is_marked_as_unfinished() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\b[Nn]ot implemented\b|\b[Ff]or now\b|raise NotImplementedError")
    marks = [
        f"{label(p)}:{i}"
        for p in modules()
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert not marks, f"finish it or say it in an issue: {marks}"


def test_no_broad_exception_is_swallowed() -> None:
    def silent(handler: ast.ExceptHandler) -> bool:
        wide = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
        return wide and all(isinstance(s, ast.Pass | ast.Continue) for s in handler.body)

    found = [
        label(p, n) for p in modules() for n in ast.walk(tree(p)) if isinstance(n, ast.ExceptHandler) and silent(n)
    ]
    assert not found, f"says nothing about a failure: {found}"


def test_plain_agent_and_broker_never_become_import_names() -> None:
    for folder in ("agent", "broker"):
        assert not (ROOT / folder / "__init__.py").exists(), (
            f"{folder}/ would shadow a user's module in a forked worker"
        )
