"""What an operator says before anything runs: flags, pools files, template digests, what this machine offers."""

import dataclasses
import sys
from pathlib import Path

import pytest

from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape, problems
from firepool_broker.main import settings_of
from firepool_broker.settings import cores, default_pools, interpreter_version, model_of, read_pools, stamp, template_of
from firepool_wire.errors import BadRequest, UnknownField

PY = sys.executable


def write(folder: Path, text: str) -> Path:
    file = folder / "pools.toml"
    file.write_text(text)
    return file


def test_a_pools_file_is_read_as_it_says(tmp_path: Path) -> None:
    pools = read_pools(
        write(
            tmp_path,
            """
            [pools.reward]
            untrusted = true
            idle_timeout_s = 5
            preload = ["json", "math"]
            [pools.reward.shape]
            cpus = 2
            memory_mib = 512
            [pools.reward.settings]
            python = "/usr/bin/python3"
            """,
        )
    )
    assert pools == [
        Pool(
            sku=Sku("reward"),
            untrusted=True,
            idle_timeout_s=5.0,
            preload=("json", "math"),
            shape=Shape(cpus=2.0, memory_mib=512),
            settings=(("python", "/usr/bin/python3"),),
        )
    ]


def test_a_misspelt_knob_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownField, match="max_count"):
        read_pools(write(tmp_path, "[pools.a]\nmax_cout = 3\n"))


@pytest.mark.parametrize("text", ["[[pools]\n", "[pool.a]\n", "pools = 3\n", '[pools.a]\nmax_count = "many"\n'])
def test_what_is_no_pools_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRequest):
        read_pools(write(tmp_path, text))
    with pytest.raises(BadRequest):
        read_pools(tmp_path / "nowhere.toml")


def test_the_template_digest_changes_with_what_a_pod_is_made_from_and_with_nothing_else() -> None:
    pool = Pool(sku=Sku("a"))
    base = template_of(pool, PY)
    assert base == template_of(dataclasses.replace(pool, max_count=99, idle_timeout_s=1.0), PY)
    for change in (
        {"preload": ("json",)},
        {"shape": Shape(memory_mib=7)},
        {"settings": (("python", "/elsewhere/python"),)},
        {"isolation": "namespaces"},
    ):
        assert template_of(dataclasses.replace(pool, **change), PY) != base  # type: ignore[arg-type]
    assert template_of(pool, "/elsewhere/python") != base


def test_stamping_twice_changes_nothing() -> None:
    once = stamp([Pool(sku=Sku("a"))], PY)
    assert stamp(once, PY) == once


def test_an_interpreter_that_does_not_run_has_no_version() -> None:
    assert interpreter_version(PY).startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert interpreter_version("/nowhere/python") == ""


def test_the_pools_of_a_machine_that_nobody_described_are_valid() -> None:
    pools = default_pools("h200")
    assert {"cpu", "h200"} <= {p.sku for p in pools}
    assert not problems(pools, {})
    cpu = next(p for p in pools if p.sku == "cpu")
    assert cpu.max_count >= cores()
    h200 = next(p for p in pools if p.sku == "h200")
    assert h200.shape.simulated
    assert h200.shape.gpus == 1


def test_only_known_cards_can_be_simulated() -> None:
    with pytest.raises(BadRequest, match="h200"):
        default_pools("h9000")


@pytest.mark.parametrize(
    ("name", "sku"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla T4", "t4")],
)
def test_a_cards_name_becomes_a_sku(name: str, sku: str) -> None:
    assert model_of(name) == sku


def test_the_command_line_becomes_settings(tmp_path: Path) -> None:
    settings = settings_of(["--home", str(tmp_path), "--simulate", "h200", "--embedded-parent", "12", "--leave-pods"])
    assert (settings.home, settings.simulate, settings.embedded_parent, settings.leave_pods) == (
        tmp_path,
        "h200",
        12,
        True,
    )
    assert settings.token_file == tmp_path / "token"


def test_bad_flags_end_with_their_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_of(["--port", "many"])
    assert caught.value.code == 64
    assert "--port" in capsys.readouterr().err
