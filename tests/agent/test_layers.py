"""Requirement layers from a wheelhouse that the test built: complete or absent, never half, and honest about failing."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from firepool_agent import layers
from firepool_agent.layers import Layers
from firepool_wire.errors import DependencyInstallError
from firepool_wire.jobspec import Requirements
from tests.agent.test_unpack import config
from tests.agent.wheels import source, wheel


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    wheel(folder, "alpha", "1.0", {"alpha.py": "version = 1\n"})
    wheel(folder, "alpha", "2.0", {"alpha.py": "version = 2\n"})
    wheel(folder, "beta", "1.0", {"beta/__init__.py": "import alpha\n"})
    wheel(folder, "shadow", "1.0", {"json/__init__.py": "fake = True\n"})
    wheel(folder, "pathy", "1.0", {"pathy.py": "", "pathy.pth": "import os\n"})
    return folder


@pytest.fixture(params=["uv", "pip"])
def settings(request: pytest.FixtureRequest, house: Path) -> dict[str, str]:
    return {"wheelhouse": str(house), "installer": request.param}


@pytest.fixture
def kept(tmp_path: Path) -> Layers:
    pod = config(tmp_path)
    pod.python = sys.executable
    return Layers(pod)


def needs(text: str, mode: str | None = None) -> Requirements:
    return Requirements(text=text, mode=mode)  # type: ignore[arg-type]


def imported(path: str, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or done.stderr


async def test_a_layer_holds_what_was_asked_for(kept: Layers, settings: dict[str, str]) -> None:
    layer = await kept.ensure(needs("alpha==1.0  # pinned\n\n# nothing else\n"), settings)
    assert imported(layer.path, "import alpha; print(alpha.version)") == "1"
    assert kept.present() == [layer.digest]
    assert not layer.needs_exec


async def test_two_layers_with_different_pins_live_beside_each_other(kept: Layers, settings: dict[str, str]) -> None:
    one = await kept.ensure(needs("alpha==1.0"), settings)
    two = await kept.ensure(needs("alpha==2.0\nbeta"), settings)
    again = await kept.ensure(needs("alpha==1.0"), {"wheelhouse": "/gone", "installer": "pip"})
    assert again == one
    assert [imported(each.path, "import alpha; print(alpha.version)") for each in (one, two)] == ["1", "2"]


async def test_asked_for_twice_at_once_it_is_installed_once(kept: Layers, settings: dict[str, str]) -> None:
    first, second = await asyncio.gather(*(kept.ensure(needs("alpha"), settings) for _ in range(2)))
    assert first == second
    assert len(kept.present()) == 1


@pytest.mark.parametrize("mode", ["layer", "in_place"])
async def test_a_requirement_that_does_not_exist_is_the_callers_fault_with_the_logs_end(
    mode: str, kept: Layers, settings: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(DependencyInstallError) as refused:
        await kept.ensure(needs("alpha\nno-such-package==9", mode), settings)
    assert refused.value.fault == "user"
    assert "no-such-package" in refused.value.details["log"]
    assert kept.present() == []
    assert markers(tmp_path) == []


async def test_a_source_archive_is_built_and_installed(kept: Layers, settings: dict[str, str], house: Path) -> None:
    source(house, "built")
    layer = await kept.ensure(needs("built"), settings)
    assert imported(layer.path, "import built; print(built.builder)") == str(os.getuid())


async def test_a_build_that_fails_tells_why_and_leaves_nothing(
    kept: Layers, settings: dict[str, str], house: Path
) -> None:
    source(house, "broken", "raise SystemExit('the compiler is on strike')")
    with pytest.raises(DependencyInstallError) as refused:
        await kept.ensure(needs("broken"), settings)
    assert "the compiler is on strike" in refused.value.details["log"]
    assert kept.present() == []


async def test_without_a_uid_for_it_a_build_is_refused_and_says_so(
    kept: Layers, settings: dict[str, str], house: Path
) -> None:
    source(house, "built")
    kept._config.nested = True
    with pytest.raises(DependencyInstallError) as refused:
        await kept.ensure(needs("built"), settings)
    assert "source builds need a uid of their own" in refused.value.details["log"]


async def test_a_layer_that_shadows_a_loaded_module_needs_a_fresh_interpreter(
    kept: Layers, settings: dict[str, str]
) -> None:
    layer = await kept.ensure(needs("shadow"), settings, loaded=["os", "json.decoder"])
    assert layer.shadows == ("json",)
    assert layer.needs_exec


async def test_a_layer_with_a_pth_file_needs_a_fresh_interpreter(kept: Layers, settings: dict[str, str]) -> None:
    layer = await kept.ensure(needs("pathy"), settings)
    assert (layer.has_pth, layer.shadows, layer.needs_exec) == (True, (), True)


def markers(root: Path) -> list[str]:
    return sorted(p.name for p in root.rglob("firepool-*.complete"))


async def test_in_place_there_is_one_marker_and_it_names_the_last_install(
    kept: Layers, settings: dict[str, str], tmp_path: Path
) -> None:
    one = await kept.ensure(needs("alpha==1.0", "in_place"), settings)
    assert markers(tmp_path) == [f"firepool-{one.digest[7:]}.complete"]
    two = await kept.ensure(needs("alpha==2.0\nbeta", "in_place"), settings)
    assert (two.path, markers(tmp_path)) == (one.path, [f"firepool-{two.digest[7:]}.complete"])
    assert imported(two.path, "import alpha, beta; print(alpha.version)") == "2"
    with pytest.raises(DependencyInstallError):
        await kept.ensure(needs("nowhere", "in_place"), settings)
    assert markers(tmp_path) == [], "a failed install leaves no completion marker"
    assert imported(two.path, "import beta; print('still there')") == "still there"


async def test_in_place_the_same_requirements_are_not_installed_again(kept: Layers, settings: dict[str, str]) -> None:
    one = await kept.ensure(needs("alpha==1.0", "in_place"), settings)
    assert await kept.ensure(needs("alpha==1.0", "in_place"), {"wheelhouse": "/gone"}) == one


async def test_an_install_that_is_cancelled_leaves_no_process_and_no_layer(
    kept: Layers, settings: dict[str, str], house: Path
) -> None:
    source(house, "slow", "import time; open(os.path.join(wheel_directory, 'begun'), 'w').close(); time.sleep(600)")
    task = asyncio.create_task(kept.ensure(needs("slow"), settings))
    room = Path(kept._config.caches_dir) / "install"
    async with asyncio.timeout(60):
        while not list(room.glob("built/**/begun")):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kept.present() == []
    seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(room) not in seen


def test_a_digest_depends_on_lines_and_python_and_not_on_comments() -> None:
    same = [needs("a==1\nb"), needs("# hello\n a==1 # why\n\nb  \n")]
    assert len({layers.digest_of(r, "3.11") for r in same}) == 1
    assert layers.digest_of(same[0], "3.12") != layers.digest_of(same[0], "3.11")
    assert layers.digest_of(needs("b\na==1"), "3.11") != layers.digest_of(same[0], "3.11")


async def test_installed_files_are_readable_by_the_jobs_uid_and_not_writable(
    kept: Layers, settings: dict[str, str]
) -> None:
    layer = await kept.ensure(needs("alpha"), settings)
    for path in Path(layer.path).rglob("*.py"):
        mode = path.stat().st_mode
        assert mode & stat.S_IROTH and not mode & stat.S_IWOTH
