"""Reports have the shape of spec §15, and never a figure that was not measured."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks.harness import Report


def _report() -> Report:
    report = Report("trial", 7)
    report.figure("warm_p50_ms", 4.5, 30)
    report.bar("warm_p50_ms", "<=", 8)
    report.bar("ratio", "<=", 0.6)
    return report


def test_the_json_has_exactly_the_keys_of_the_spec(tmp_path):
    path = tmp_path / "deep" / "trial.json"
    _report().write(path)
    body = json.loads(path.read_text())
    assert set(body) == {"name", "commit", "machine", "seed", "figures", "samples", "bars", "notes"}
    assert set(body["machine"]) == {"cores", "memory_gib", "kernel", "python"}
    assert body["figures"] == {"warm_p50_ms": 4.5}
    assert body["samples"] == {"warm_p50_ms": 30}
    assert body["bars"] == {"warm_p50_ms": {"op": "<=", "value": 8, "holds": True}}


def test_a_bar_without_its_figure_is_noted_and_not_filled_in():
    body = _report().to_json()
    assert "ratio" not in body["figures"]
    assert "ratio" not in body["bars"]
    assert body["notes"][-1] == "ratio: not measured in this run"


@pytest.mark.parametrize(
    ("op", "figure", "holds"),
    [
        ("<=", 8.0, True),
        ("<=", 8.1, False),
        (">=", 8.0, True),
        (">=", 7.9, False),
        ("==", 8.0, True),
        ("==", 7.0, False),
    ],
)
def test_a_bar_is_judged_by_its_operator(op, figure, holds):
    report = Report("trial", 7)
    report.figure("x", figure)
    report.bar("x", op, 8.0)
    assert report.to_json()["bars"]["x"]["holds"] is holds


def test_a_failed_bar_stands_out_on_the_screen():
    report = Report("trial", 7)
    report.figure("x_ms", 9.0)
    report.bar("x_ms", "<=", 8.0)
    console = Console(file=io.StringIO(), width=120)
    report.show(console)
    assert "FAILS" in console.file.getvalue()


def test_latencies_give_p50_and_p99_in_their_unit():
    report = Report("trial", 7)
    report.latencies("warm", [0.001, 0.002, 0.003])
    assert report.figures == {"warm_p50_ms": pytest.approx(2.0), "warm_p99_ms": pytest.approx(2.98)}
    assert report.samples == {"warm_p50_ms": 3, "warm_p99_ms": 3}


def test_an_unknown_name_is_refused_with_the_nearest_one(capsys):
    assert command.main(["trackr"]) == 2
    assert "Did you mean tracker?" in capsys.readouterr().out


def test_names_are_found_without_importing_anything():
    assert {"tracker", "engine"} <= set(command.names())
    assert "harness" not in command.names()
