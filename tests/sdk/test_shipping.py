"""How code travels: by value, by import path, with exactly the first-party modules that it needs; equal trees, equal bytes."""

import asyncio
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType

import pytest

import firepool
from firepool import errors
from firepool_ray import _ignore, _package, _pickling, _source
from firepool_ray._options import Options
from firepool_ray._payload import MAX_VALUE_BYTES, Shipper
from tests.sdk.fake_broker import FakeBroker


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], Path]]:
    """Writes files into a project that is on `sys.path`, and forgets its modules afterwards."""
    root = tmp_path / "project"
    before = set(sys.modules)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return root

    root.mkdir()
    (root / "pyproject.toml").write_text("")
    monkeypatch.syspath_prepend(str(root))
    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(root) in str(sys.modules[name].__file__):
            del sys.modules[name]


def load_as(path: Path, name: str, *, registered: bool = False) -> ModuleType:
    """As verl loads a reward file: under a name of its own, in `sys.modules` or not."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def ship(function: Callable[..., object], **options: object) -> Shipper:
    shipper = Shipper(function, Options.of(options), "call")  # type: ignore[arg-type]
    shipper.ship()
    return shipper


# -- the five facts that decide whether adapters work --


def test_fact_1_the_async_twin_is_seen_as_async_also_behind_partial(project: Callable[[dict[str, str]], Path]) -> None:
    import functools

    @firepool.remote
    def reward(prompt: str, answer: str) -> float:
        """Score an answer."""
        return 0.0

    assert inspect.iscoroutinefunction(reward.aio)
    assert inspect.iscoroutinefunction(functools.partial(reward.aio, prompt="p"))
    assert isinstance(reward.aio, type(lambda: 0))


def test_fact_2_a_framework_that_passes_arguments_by_name_finds_the_names() -> None:
    @firepool.remote
    def reward(prompt: str, completion: str, **info: object) -> float:
        return 1.0

    assert list(inspect.signature(reward.aio).parameters) == ["prompt", "completion", "info"]
    assert reward.aio.__wrapped__ is reward.__firepool_function__  # type: ignore[attr-defined]
    assert list(inspect.signature(reward).parameters) == ["prompt", "completion", "info"]


async def test_fact_3_arguments_may_be_given_by_keyword(connected: FakeBroker) -> None:
    @firepool.remote
    def execute(command: str, cwd: str = "/", timeout_sec: int = 1) -> str:
        return f"{command} {cwd} {timeout_sec}"

    assert await execute.aio(timeout_sec=3, command="ls") == "ls / 3"


REWARD = """
    import firepool
    LIMIT = 3

    def helper(x):
        return x + LIMIT

    @firepool.remote
    def reward(x):
        return helper(x)
"""


@pytest.mark.parametrize("registered", [False, True])
def test_fact_4_a_file_loaded_under_a_made_up_name_runs(
    connected: FakeBroker, tmp_path: Path, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(REWARD))
    name = f"custom_module_{os.getpid()}"
    module = load_as(path, name, registered=registered)
    try:
        assert module.reward.remote(1).result() == 4
    finally:
        sys.modules.pop(name, None)


def test_fact_4_and_has_the_same_bytes_under_every_name(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(REWARD))
    digests = {
        ship(load_as(path, name).reward.__firepool_function__).ship().entry["payload"]
        for name in ("one", "two", "three")
    }
    assert len(digests) == 1


def test_fact_4_also_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(REWARD))
    code = f"""
        import sys, importlib.util
        from firepool_ray._payload import Shipper
        from firepool_ray._options import Options
        spec = importlib.util.spec_from_file_location(sys.argv[1], {str(path)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(Shipper(module.reward.__firepool_function__, Options(), "call").ship().entry["payload"])
    """
    told = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), name], capture_output=True, text=True, check=True
        ).stdout
        for name in ("custom_1", "custom_2")
    }
    assert len(told) == 1 and told.pop().startswith("sha256:")


def test_fact_4_a_file_loaded_twice_gives_two_handles_that_both_work(connected: FakeBroker, tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text(textwrap.dedent(REWARD))
    first, second = load_as(path, "same"), load_as(path, "same")
    assert firepool.get([first.reward.remote(1), second.reward.remote(2)]) == [4, 5]
    assert len([b for b in connected.blobs.values() if b"helper" in b]) == 1


@firepool.remote(lease_tag="t")
def module_level(x: int) -> int:
    return x + 1


def test_fact_5_handles_survive_plain_pickle(connected: FakeBroker) -> None:
    again = pickle.loads(pickle.dumps(module_level))
    assert again.remote(1).result() == 2 and connected.jobs["j1"].spec["lease_tag"] == "t"
    assert pickle.loads(pickle.dumps(module_level.options(lease_tag="u")))._options.lease_tag == "u"
    assert pickle.loads(pickle.dumps(module_level.aio)) is module_level.aio

    @firepool.remote
    def local(x: int) -> int:
        return 2 * x

    assert pickle.loads(pickle.dumps(local)).remote(4).result() == 8


def test_fact_5_a_handle_made_in_main_survives_the_way_to_another_process(connected: FakeBroker) -> None:
    code = """
        import pickle, sys, firepool
        @firepool.remote
        def f(x):
            return x * 3
        sys.stdout.buffer.write(pickle.dumps(f))
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=True)
    assert pickle.loads(told.stdout).remote(5).result() == 15


# -- by value, by import --


def test_a_closed_function_of_a_module_travels_alone_and_its_module_is_not_imported(
    connected: FakeBroker, project: Callable[[dict[str, str]], Path]
) -> None:
    project(
        {
            "closed.py": "import firepool\nassert 'FIREPOOL_JOB_ID' not in __import__('os').environ\n"
            + textwrap.dedent(REWARD)
        }
    )
    import closed  # type: ignore[import-not-found]

    assert closed.reward.remote(1).result() == 4
    assert "package" not in connected.jobs["j1"].spec


def test_what_a_function_uses_of_the_users_modules_travels_with_it(
    connected: FakeBroker, project: Callable[[dict[str, str]], Path]
) -> None:
    project(
        {
            "rewards_a.py": """
                import firepool
                from lib_a.score import score

                @firepool.remote
                def reward(x):
                    return score(x)

                @firepool.remote
                def lazy(x):
                    import other_a
                    return other_a.twice(x)
            """,
            "lib_a/__init__.py": "",
            "lib_a/score.py": "from lib_a import table\n\ndef score(x):\n    return table.TABLE[x]\n",
            "lib_a/table.py": "import pathlib\nTABLE = {1: pathlib.Path(__file__).with_name('data.txt').read_text()}\n",
            "lib_a/data.txt": "from a data file",
            "lib_a/junk.log": "ignored",
            "other_a.py": "def twice(x):\n    return 2 * x\n",
            "unrelated_a.py": "",
            ".gitignore": "*.log\n",
        }
    )
    import rewards_a  # type: ignore[import-not-found]

    assert rewards_a.reward.remote(1).result() == "from a data file"
    assert rewards_a.lazy.remote(4).result() == 8
    names = [names_in(connected, f"j{n}") for n in (1, 2)]
    assert names[0] == ["lib_a/__init__.py", "lib_a/data.txt", "lib_a/score.py", "lib_a/table.py"]
    assert names[1] == ["other_a.py"]


def names_in(broker: FakeBroker, job: str) -> list[str]:
    return zipfile.ZipFile(BytesIO(broker.blobs[broker.jobs[job].spec["package"]])).namelist()


def test_arguments_of_the_users_classes_bring_their_modules(
    connected: FakeBroker, project: Callable[[dict[str, str]], Path]
) -> None:
    project({"shapes_b.py": "class Box:\n    def __init__(self, x):\n        self.x = x\n"})
    import shapes_b  # type: ignore[import-not-found]

    @firepool.remote
    def open_box(box: object) -> int:
        return box.x  # type: ignore[attr-defined,no-any-return]

    assert open_box.remote(shapes_b.Box(3)).result() == 3
    assert names_in(connected, "j1") == ["shapes_b.py"]


def test_a_result_of_the_users_own_class_comes_back_as_that_class(connected: FakeBroker) -> None:
    @firepool.remote
    def make() -> Verdict:
        return Verdict(0.5)

    found = make.remote().result()
    assert type(found) is Verdict and found.score == 0.5


class Verdict:
    def __init__(self, score: float) -> None:
        self.score = score


def test_a_module_that_is_imported_back_travels_by_import_path(
    connected: FakeBroker, project: Callable[[dict[str, str]], Path]
) -> None:
    project(
        {
            "circle_c.py": """
                import firepool
                import helper_c

                class Mark: ...

                @firepool.remote
                def check():
                    return isinstance(helper_c.make(), Mark)
            """,
            "helper_c.py": "def make():\n    import circle_c\n    return circle_c.Mark()\n",
        }
    )
    import circle_c  # type: ignore[import-not-found]

    assert circle_c.check.remote().result() is True
    function = connected.jobs["j1"].spec["entrypoint"]["function"]
    assert function["import_path"] == "circle_c:check" and "python" not in function


def test_a_function_that_caught_something_large_travels_by_import_path(
    project: Callable[[dict[str, str]], Path],
) -> None:
    project({"heavy_d.py": f"MODEL = b'x' * {MAX_VALUE_BYTES + 1}\n\ndef f():\n    return len(MODEL)\n"})
    import heavy_d  # type: ignore[import-not-found]

    assert ship(heavy_d.f).ship().entry["import_path"] == "heavy_d:f"
    assert "payload" in ship(heavy_d.f, ship="value").ship().entry


def test_a_function_that_caught_far_too_much_is_refused() -> None:
    big = bytes(65 * 1024 * 1024)

    def f() -> int:
        return len(big)

    with pytest.raises(errors.PackageError, match="captures something large"):
        ship(f)


def test_an_installed_function_is_named_not_sent(connected: FakeBroker) -> None:
    dumps = firepool.remote(textwrap.dedent)
    assert dumps.remote("  x").result() == "x"
    assert connected.jobs["j1"].spec["entrypoint"]["function"]["import_path"] == "textwrap:dedent"
    assert not connected.blobs


def test_a_function_by_import_path_needs_no_common_python(broker: FakeBroker) -> None:
    broker.version["interpreters"][0]["version"] = "3.9"
    firepool.init(broker.address)
    assert firepool.remote(textwrap.dedent).remote("  x").result() == "x"


def test_import_is_refused_for_what_no_import_finds() -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="ship='value'"):
        ship(inner, ship="import")


def test_recursion_and_handles_inside_functions_travel(connected: FakeBroker) -> None:
    @firepool.remote
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial.local(n - 1)

    assert factorial.remote(5).result() == 120


# -- pickled again only when something may have changed --


def test_an_unchanged_function_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = _pickling.dumps

    def counting(*args: object) -> object:
        nonlocal count
        count += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_pickling, "dumps", counting)
    factor, table = 2, {"a": 1}

    def plain(x: int) -> int:
        return factor * x

    def uses_table() -> dict[str, int]:
        return table

    shipper = ship(plain)
    for _ in range(5):
        shipper.ship()
    assert count == 1
    factor = 3
    shipper.ship()
    assert count == 2
    mutable = ship(uses_table)
    first = mutable.ship()
    assert mutable.ship() is first, "pickled again, but the bytes are the same: nothing to upload"
    table["a"] = 2
    assert mutable.ship().entry["payload"] != first.entry["payload"]


def test_two_closures_of_one_source_are_two_blobs() -> None:
    def make(n: int) -> Callable[[], int]:
        return lambda: n

    assert ship(make(1)).ship().entry["payload"] != ship(make(2)).ship().entry["payload"]


def test_a_payload_is_uploaded_once(connected: FakeBroker) -> None:
    firepool.get([module_level.remote(n) for n in range(3)])
    module_level.remote(1).result()
    assert connected.count("PUT", "/v1/blobs") == 1


# -- packages --


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FILES = {"b.py": "b", "a/x.py": "x", "a/deep/y.txt": "y", ".gitignore": "*.bin\n/out\n", "z.bin": "no", "out/o": "no"}


def test_equal_trees_give_equal_bytes(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one", FILES), tree(tmp_path / "two", dict(reversed(FILES.items())))
    os.utime(two / "b.py", (1, 1))
    first, second = _package.of_folder(one), _package.of_folder(two)
    assert first.digest == second.digest
    archive = zipfile.ZipFile(BytesIO(first.read()))
    assert archive.namelist() == [".gitignore", "a/deep/y.txt", "a/x.py", "b.py"]
    assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_tree_that_was_packed_before_is_neither_built_nor_uploaded_again(
    connected: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path / "code", FILES)
    firepool.submit([sys.executable, "-c", "pass"], package=str(folder)).wait(30)
    uploads = connected.count("PUT", "/v1/blobs")
    monkeypatch.setattr(_package, "_cache", {})  # another program, later
    monkeypatch.setattr(_package, "zip_bytes", lambda entries: pytest.fail("built again"))
    firepool.submit([sys.executable, "-c", "pass"], package=str(folder)).wait(30)
    assert connected.count("PUT", "/v1/blobs") == uploads == 1


def test_a_changed_tree_is_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_package, "FRESH_S", 0.0)
    folder = tree(tmp_path / "code", FILES)
    before = _package.of_folder(folder).digest
    (folder / "b.py").write_text("changed")
    assert _package.of_folder(folder).digest != before


def test_a_tree_that_is_too_large_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_package, "MAX_BYTES", 10)
    with pytest.raises(errors.PackageError, match=r"big\.txt"):
        _package.of_folder(tree(tmp_path / "code", {"big.txt": "x" * 100}))
    with pytest.raises(errors.PackageError, match="not a folder"):
        _package.of_folder(tmp_path / "missing")


def test_links_do_not_travel(tmp_path: Path) -> None:
    folder = tree(tmp_path / "code", {"a.py": ""})
    (folder / "link.py").symlink_to("/etc/passwd")
    assert [name for name, _ in _ignore.walk(folder)] == ["a.py"]


@pytest.mark.parametrize(
    ("pattern", "name", "is_dir", "expected"),
    [
        ("*.log", "a/b.log", False, True),
        ("/top", "top", False, True),
        ("/top", "a/top", False, False),
        ("build/", "build", True, True),
        ("build/", "build", False, False),
        ("a/**/z", "a/z", False, True),
        ("a/**/z", "a/b/c/z", False, True),
        ("**/cache", "x/y/cache", True, True),
        ("data/**", "data/x", False, True),
        ("[!a].py", "b.py", False, True),
        ("[!a].py", "a.py", False, False),
        ("?.py", "ab.py", False, False),
        (r"\#x", "#x", False, True),
        ("a b ", "a b", False, True),
        ("# comment", "# comment", False, False),
    ],
)
def test_gitignore_patterns(pattern: str, name: str, is_dir: bool, expected: bool) -> None:
    rule = _ignore.parse(pattern)
    assert _ignore.ignored(name, is_dir, [("", rule)] if rule else []) is expected


def test_a_later_exclamation_mark_takes_back_what_was_ignored(tmp_path: Path) -> None:
    folder = tree(
        tmp_path, {".gitignore": "*.txt\n!keep.txt\n", "keep.txt": "", "x.txt": "", "d/.gitignore": "y\n", "d/y": ""}
    )
    assert [name for name, _ in _ignore.walk(folder)] == [".gitignore", "d/.gitignore", "keep.txt"]


def test_git_agrees_with_what_is_ignored(tmp_path: Path) -> None:
    """The referee is git itself."""
    files = {
        ".gitignore": "*.pyx\n/a/only\nlogs/\n!logs/keep\n**/tmp\nx/**/y\n[ab]?.dat\n",
        **dict.fromkeys(
            ("f.pyx", "a/only", "b/a/only", "logs/keep", "logs/l", "c/tmp", "x/y", "x/1/2/y", "a1.dat", "c1.dat"), ""
        ),
        "a/.gitignore": "!f.pyx\n",
        "a/f.pyx": "",
    }
    folder = tree(tmp_path, files)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    told = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    assert [name for name, _ in _ignore.walk(folder)] == sorted(told.stdout.split())


def test_installed_modules_never_travel() -> None:
    assert _source.closure(["json", "pytest", "numpy"]) == {}
    assert _source.is_installed(asyncio.__file__) and not _source.is_installed(__file__)
