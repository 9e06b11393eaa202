"""The preloaded interpreter: what it imports, what it must not run, and when a fresh one takes its place."""

import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from firepool_wire.errors import DependencyInstallError, NotFound, PackageError
from tests.agent.driver import Agent


def _package(agent: Agent, files: dict[str, str]) -> str:
    path = agent.folder / "package.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return agent.put_blob(path.read_bytes())


def _wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    """A wheel with these files, made by hand."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/RECORD",
            "".join(f"{path},,\n" for path in (*files, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")),
        )


def test_preloaded_modules_are_there_without_an_import(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["decimal", "numpy"])
    assert agent.run_function(lambda: "numpy" in sys.modules and "decimal" in sys.modules).value()


def test_a_preload_that_fails_does_not_take_the_pod_with_it(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["no_such_module", "decimal"])
    assert agent.run_function(lambda: "decimal" in sys.modules).value()
    assert "no_such_module" in agent.call("GET", "/v1/hello")["preload_failed"]


def test_the_zygote_stays_single_threaded_with_numpy_in_it(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["numpy"])

    def body() -> tuple[int, int]:
        import numpy as np

        before = len(os.listdir("/proc/self/task"))
        return before, int((np.ones((300, 300)) @ np.ones((300, 300))).sum())

    assert agent.run_function(body, run_timeout_s=20.0).value() == (1, 300**3)


def test_code_in_pth_files_and_sitecustomize_of_the_base_never_runs_in_the_zygote(
    make_agent: Callable[..., Agent],
) -> None:
    agent_folder = make_agent().folder
    venv = agent_folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    seen = agent_folder / "seen"
    (site / "mark.pth").write_text(f"import os; open({str(seen)!r}, 'a').write('pth %d\\n' % os.getpid())\n")
    (site / "sitecustomize.py").write_text(f"open({str(seen)!r}, 'a').write('sitecustomize\\n')\n")
    (site / "extra").mkdir()
    (site / "extra/beside.py").write_text("X = 1\n")
    (site / "paths.pth").write_text("extra\n")
    agent = make_agent(python=str(venv / "bin/python"))
    assert not seen.exists()

    def body() -> tuple[int, int]:
        import beside  # type: ignore[import-not-found]

        return os.getpid(), beside.X

    pid, x = agent.run_function(body).value()
    assert x == 1
    assert seen.read_text() == f"pth {pid}\n"


def test_the_agents_cloudpickle_serves_an_interpreter_that_has_none(make_agent: Callable[..., Agent]) -> None:
    folder = make_agent().folder
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "bare")], check=True)
    agent = make_agent(python=str(folder / "bare/bin/python"))
    captured = 3
    assert agent.run_function(lambda x: x + captured, 4).value() == 7
    assert agent.run_function(lambda: [p for p in sys.path if "site-packages" in p and "bare" not in p]).value() == []
    assert agent.run_function(lambda x: x + captured, 4, env={"PYTHONHASHSEED": "1"}).value() == 7


def test_a_package_is_the_work_dir_and_comes_first_on_the_path(agent: Agent) -> None:
    package = _package(
        agent, {"mine/__init__.py": "WHO = 'package'\n", "data.txt": "42", "main.py": "import mine; print(mine.WHO)"}
    )

    def body() -> tuple[str, str, bool]:
        import mine  # type: ignore[import-not-found]

        Path("new.txt").write_text("x")
        return mine.WHO, Path("data.txt").read_text(), os.access("mine/__init__.py", os.W_OK)

    for _ in range(2):
        assert agent.run_function(body, package=package).value() == ("package", "42", True)
    ended = agent.run(["python", "main.py"], package=package)
    assert ended.out == "package\n"
    assert agent.run(["ls"], package=package).out.split() == ["data.txt", "main.py", "mine"]


def test_a_package_that_is_not_here_or_not_a_package_fails_the_launch(agent: Agent) -> None:
    for digest, error in (("sha256:" + "0" * 64, NotFound), (agent.put_blob(b"no zip"), PackageError)):
        attempt = agent.new_id()
        agent.prepare(attempt)
        with pytest.raises(error):
            agent.launch(attempt, argv=["true"], package=digest)
        ended = agent.finish(attempt)
        assert isinstance(ended.error, error)
        assert ended.exit.exit_code is None


def test_a_package_that_shadows_a_loaded_module_is_what_gets_imported(agent: Agent) -> None:
    package = _package(agent, {"cloudpickle_extra.py": "", "stat.py": "MINE = True\n"})

    def body() -> bool:
        import stat

        return hasattr(stat, "MINE")

    # `stat` is loaded in every interpreter before any path of ours counts: there even a fresh one cannot help.
    assert agent.run_function(body, package=package).exit.exit_code == 0
    package = _package(agent, {"fractions.py": "MINE = True\n"})
    preloaded = agent.run_function(_fractions_are_mine, package=package)
    assert preloaded.value() is True


def _fractions_are_mine() -> bool:
    import fractions

    return hasattr(fractions, "MINE")


def test_a_layer_over_a_preloaded_module_gets_a_fresh_interpreter(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["fractions"])
    wheels = agent.folder / "wheels"
    _wheel(wheels, "fractions", {"fractions.py": "MINE = True\n"})
    told = agent.run_function(
        _fractions_are_mine, requirements={"text": "fractions==1.0"}, installer={"wheelhouse": str(wheels)}
    )
    assert told.value() is True
    assert agent.run_function(_fractions_are_mine).value() is False


def test_a_layer_with_a_pth_file_is_honoured(agent: Agent) -> None:
    wheels = agent.folder / "wheels"
    _wheel(wheels, "hooked", {"hooked.pth": "import os; os.environ['HOOKED'] = 'yes'\n", "hooked_mod.py": "X = 2\n"})

    def body() -> tuple[str | None, int]:
        import hooked_mod  # type: ignore[import-not-found]

        return os.environ.get("HOOKED"), hooked_mod.X

    told = agent.run_function(body, requirements={"text": "hooked==1.0"}, installer={"wheelhouse": str(wheels)})
    assert told.value() == ("yes", 2)


def test_a_plain_layer_is_seen_by_the_job_and_its_children_and_by_nobody_else(agent: Agent) -> None:
    wheels = agent.folder / "wheels"
    _wheel(wheels, "plainlayer", {"plainlayer.py": "X = 3\n"})

    def body() -> tuple[int, str]:
        import plainlayer  # type: ignore[import-not-found]

        code = "import plainlayer; print(plainlayer.X)"
        return plainlayer.X, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

    wanted = {"requirements": {"text": "plainlayer==1.0"}, "installer": {"wheelhouse": str(wheels)}}
    assert agent.run_function(body, **wanted).value() == (3, "3")
    assert agent.run(["python", "-c", "import plainlayer; print(plainlayer.X)"], **wanted).out == "3\n"
    assert agent.run(["python", "-c", "import plainlayer"]).exit.exit_code == 1


def test_requirements_that_do_not_exist_fail_the_launch_with_the_installers_words(agent: Agent) -> None:
    attempt = agent.new_id()
    agent.prepare(attempt)
    (agent.folder / "empty").mkdir()
    with pytest.raises(DependencyInstallError) as refused:
        agent.launch(
            attempt,
            argv=["true"],
            requirements={"text": "nosuch==9"},
            installer={"wheelhouse": str(agent.folder / "empty")},
        )
    assert "nosuch" in refused.value.details["log"]
    assert isinstance(agent.finish(attempt).error, DependencyInstallError)


def test_discarding_a_process_that_never_came_harms_nobody() -> None:
    code = """
        import os, socket
        from firepool_agent.cells import Cell
        from firepool_agent.scratch import Slot
        ours, theirs = socket.socketpair()
        ends = [os.pipe()[0] for _ in range(4)]
        slot = Slot.__new__(Slot)
        Cell(slot, 0, 0, 0, ours, *ends).discard()
        print("alive")
    """
    house = str(Path(__file__).resolve().parents[2] / "agent")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": house},
        capture_output=True,
        text=True,
        start_new_session=True,  # a signal to "our process group" must not end the tests
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done
