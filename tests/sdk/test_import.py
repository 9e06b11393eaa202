"""Importing costs little and changes nothing; types keep the user's signature; names are where they should be."""

import ast
import inspect
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import firepool
import firepool_ray

ROOT = Path(firepool_ray.__file__).parent

#: Loaded by `import firepool` if somebody is careless: each costs more than the whole SDK, or is somebody else's.
HEAVY = {
    *("asyncio", "cloudpickle", "typer", "rich", "http.client", "ssl", "email", "logging", "subprocess", "tempfile"),
    *("concurrent.futures", "tomllib", "zipfile", "multiprocessing", "numpy", "firepool_broker", "firepool_agent"),
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )


def test_importing_loads_nothing_heavy_and_no_third_party() -> None:
    told = run("import sys; before = set(sys.modules); import firepool; print(*(set(sys.modules) - before))")
    loaded = set(told.stdout.split())
    assert not loaded & HEAVY
    third = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert third <= {"firepool", "firepool_ray", "firepool_wire"}


def test_importing_costs_no_more_than_what_it_avoids(tmp_path: Path) -> None:
    """CPU time, the least of several interleaved runs: milliseconds would depend on what else runs here."""
    # As installed: with bytecode, which the first run writes.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": str(tmp_path)
    }

    def cpu(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    codes = ("pass", "import firepool", "import asyncio, http.client, subprocess, zipfile, logging")
    least = [min(took) for took in zip(*([cpu(code) for code in codes] for _ in range(8)), strict=True)]
    bare, ours, avoided = least
    assert ours - bare < max(0.1, avoided - bare)


def test_both_names_are_one_module() -> None:
    assert (
        run("import firepool, firepool_ray; assert firepool is firepool_ray; from firepool import remote").returncode
        == 0
    )


def test_importing_starts_no_thread_and_touches_no_file(tmp_path: Path) -> None:
    told = run("import threading, firepool; print(threading.active_count(), firepool.is_initialized())")
    assert told.stdout.split() == ["1", "False"]


def test_every_public_name_is_there_and_documented() -> None:
    for name in firepool.__all__:
        value = getattr(firepool, name)
        assert name == "__version__" or inspect.getdoc(value), name
    assert set(firepool.__all__) <= set(dir(firepool))
    with pytest.raises(AttributeError):
        firepool.no_such_name


def test_every_error_of_the_table_can_be_caught_by_name() -> None:
    from firepool import errors

    assert set(errors.TABLE) - {"UserError"} <= set(errors.__all__)


def test_no_module_of_the_sdk_needs_linux_to_be_imported() -> None:
    linux_only = {"fcntl", "pwd", "grp", "resource", "termios", "pty", "tty", "syslog", "posix", "curses"}
    for path in ROOT.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not linux_only & {name.partition(".")[0] for name in names}, path


def test_it_imports_where_fork_and_unix_sockets_are_missing() -> None:
    told = run("""
        import os, socket, signal
        del os.register_at_fork, socket.AF_UNIX, os.fork, signal.SIGCHLD
        import firepool
        from firepool_ray import _executor, _jobs, _map, _stream, _embedded, _package, _printer
        print("fine")
    """)
    assert told.stdout == "fine\n", told.stderr


def test_the_bound_of_inline_arguments_is_the_contracts() -> None:
    from firepool_ray import _handle
    from firepool_wire.jobspec import INLINE_ARGS_BYTES

    assert _handle.INLINE_ARGS_BYTES == INLINE_ARGS_BYTES


def test_sync_and_async_faces_have_the_same_options() -> None:
    for name in ("map", "starmap"):
        method = inspect.signature(getattr(firepool.RemoteFunction, name))
        assert {"order", "return_exceptions", "concurrency", "chunk", "on_infra"} <= set(method.parameters)
    for name in ("__iter__", "__next__", "__aiter__", "__anext__", "cancel"):
        assert hasattr(firepool.MapResults, name) and hasattr(firepool.JobStream, name)


SAMPLE = """
    from collections.abc import AsyncIterator, Iterator
    from typing import assert_type
    import firepool
    from firepool import JobRef, JobStream, MapResults, RemoteFunction, RemoteGenerator

    @firepool.remote
    def f(a: int, b: str = "") -> float: return 0.0
    @firepool.remote(sku="cpu", run_timeout_s=3)
    def g(a: int) -> str: return ""
    @firepool.remote
    def values(n: int) -> Iterator[int]: yield n
    @firepool.remote
    async def later(n: int) -> bytes: return b""

    assert_type(f, RemoteFunction[[int, DefaultNamedArg(str, "b")], float]) if False else None
    assert_type(f.remote(1, b="x"), JobRef[float])
    assert_type(firepool.get(f.remote(1)), float)
    assert_type(firepool.get([f.remote(1)]), list[float])
    assert_type(f.remote(1).result(), float)
    assert_type(f.options(sku="x").remote(1), JobRef[float])
    assert_type(f.map([1]), MapResults[float])
    assert_type(g.local(1), str)
    assert_type(values.remote(1), JobStream[int])
    assert_type(next(values.remote(1)), int)
    assert_type(later.remote(1), JobRef[bytes])
    async def use() -> None:
        assert_type(await f.aio(1, "x"), float)
        assert_type(await f.remote(1), float)
        async for v in values.remote(1):
            assert_type(v, int)
    f.remote("wrong")                 # E: arg-type
    f.remote(1, c=2)                  # E: call-arg
    g.remote()                        # E: call-arg
    unused = f.aio("wrong")           # E: arg-type
    firepool.remote(skuu="x")         # E: call-overload
    f.options(lease_tags="x")         # E: call-arg
"""


def test_types_keep_the_users_signature(tmp_path: Path) -> None:
    text = "\n".join(line for line in textwrap.dedent(SAMPLE).splitlines() if "DefaultNamedArg" not in line)
    sample = tmp_path / "sample.py"
    sample.write_text(text)
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            str(tmp_path / "cache"),
            str(sample),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
    )
    found = sorted(
        (int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]"))
        for line in told.stdout.splitlines()
        if ": error:" in line
    )
    expected = sorted(
        (n, line.rpartition("# E: ")[2]) for n, line in enumerate(text.splitlines(), 1) if "# E: " in line
    )
    assert found == expected, told.stdout + told.stderr
