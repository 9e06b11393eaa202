"""The command line against a real broker on this machine: what it prints, how it exits, what it says when it cannot."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

Run = subprocess.CompletedProcess[str]


class Shell:
    """Runs `firepool …` as a user would, in a home and a working directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("FIREPOOL_")}
        self.env |= {"FIREPOOL_HOME": str(folder / "home"), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}

    def __call__(self, *words: str, timeout: float = 60) -> Run:
        command = [sys.executable, "-c", "from firepool_ray.cli import main; main()", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def json(self, *words: str) -> object:
        done = self(*words, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    found = Shell(tmp_path_factory.mktemp("cli"))
    up = found("up", "--simulate", "h200")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield found
    finally:
        down = found("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert "no broker runs here" in found("down").stdout


@pytest.fixture
def alone(tmp_path: Path) -> Shell:
    """A home without a broker."""
    return Shell(tmp_path)


def test_up_says_where_the_broker_is_and_a_second_up_that_it_already_runs(shell: Shell) -> None:
    again = shell("up")
    assert again.returncode == 0
    assert re.search(r"already runs at http://127\.0\.0\.1:\d+", again.stdout), again.stdout


def test_submit_follows_the_output_and_leaves_with_the_jobs_exit_code(shell: Shell) -> None:
    done = shell("submit", "--", "sh", "-c", "echo to out; echo to err >&2; exit 7")
    assert done.returncode == 7, done.stderr
    assert "to out" in done.stdout
    assert "to err" in done.stdout
    assert "NonZeroExit" in done.stderr


def test_a_job_ended_by_a_signal_leaves_with_128_and_the_signal(shell: Shell) -> None:
    assert shell("submit", "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_submit_without_waiting_prints_only_the_id_and_the_log_can_be_read_later(shell: Shell) -> None:
    submitted = shell("submit", "--no-wait", "--", "echo", "later")
    job = submitted.stdout.strip()
    assert re.fullmatch(r"[\w-]+", job), submitted
    assert shell("logs", "-f", job).stdout == "later\n"


def test_a_working_dir_travels_and_gitignored_files_stay(shell: Shell) -> None:
    project = shell.folder / "project"
    project.mkdir()
    (project / "main.py").write_text("import helper; print(helper.WORD)")
    (project / "helper.py").write_text("WORD = 'found'")
    (project / ".gitignore").write_text("secret.txt\n")
    (project / "secret.txt").write_text("stay")
    done = shell("submit", "--working-dir", str(project), "--", "sh", "-c", "python main.py; ls")
    assert "found" in done.stdout, done.stdout + done.stderr
    assert "secret.txt" not in done.stdout


def test_jobs_lists_what_ran_and_json_is_one_document(shell: Shell) -> None:
    shell("submit", "--run", "listed", "--", "true")
    page = shell.json("jobs", "--run", "listed")
    assert isinstance(page, dict)
    assert [j["state"] for j in page["jobs"]] == ["SUCCEEDED"]
    assert "SUCCEEDED" in shell("jobs", "--run", "listed").stdout


def test_explain_tells_the_path_and_why_not_a_warmer_one(shell: Shell) -> None:
    job = shell("submit", "--no-wait", "--single-use", "--", "true").stdout.strip()
    shell("logs", "-f", job)
    told = shell("explain", job)
    assert told.returncode == 0, told.stderr
    assert "single_use" in told.stdout


def test_cancel_ends_a_running_job(shell: Shell) -> None:
    job = shell("submit", "--no-wait", "--", "sleep", "600").stdout.strip()
    assert shell("cancel", job).returncode == 0
    shell("logs", "-f", job)
    body = shell.json("jobs", "--limit", "5")
    assert isinstance(body, dict)
    assert next(j for j in body["jobs"] if j["id"] == job)["state"] == "CANCELLED"


def test_unknown_pools_are_answered_with_the_known_ones(shell: Shell) -> None:
    done = shell("submit", "--sku", "h100x8", "--", "true")
    assert done.returncode == 66
    assert "UnknownSku" in done.stderr
    assert "h200" in done.stderr


def test_a_foreign_job_is_not_there(shell: Shell) -> None:
    done = shell("logs", "j-nothing")
    assert done.returncode == 66
    assert "NotFound" in done.stderr


def test_errors_as_json_are_json_too(shell: Shell) -> None:
    done = shell("explain", "j-nothing", "--json")
    assert done.returncode == 66
    assert json.loads(done.stdout)["error"]["code"] == "NotFound"


def test_applying_a_pools_file_shows_the_difference_and_a_dry_run_changes_nothing(shell: Shell) -> None:
    before = shell.json("pools")
    assert isinstance(before, dict)
    lines = []
    for pool in before["pools"]:
        knobs = {k: v for k, v in pool["pool"].items() if k in ("min_count", "max_count", "idle_timeout_s", "provider")}
        lines.append(f"[pools.{pool['sku']}]")
        knobs["idle_timeout_s"] = 77.0 if pool["sku"] == "cpu" else knobs["idle_timeout_s"]
        lines += [f"{k} = {json.dumps(v)}" for k, v in knobs.items() if v is not None]
        lines.append(f"[pools.{pool['sku']}.shape]")
        lines += [f"{k} = {json.dumps(v)}" for k, v in pool["pool"]["shape"].items()]
    file = shell.folder / "pools.toml"
    file.write_text("\n".join(lines))
    dry = shell("pools", "apply", str(file), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "cpu.idle_timeout_s" in dry.stdout
    assert "77.0" in dry.stdout
    assert shell.json("pools") == before or "77.0" not in shell("pools").stdout


def test_a_pools_file_with_errors_lists_every_one_and_changes_nothing(shell: Shell) -> None:
    file = shell.folder / "wrong.toml"
    file.write_text("[pools.cpu]\nmin_cuont = 1\n[pools.gpu]\nmin_count = 9\nmax_count = 2\n")
    done = shell("pools", "apply", str(file))
    assert done.returncode == 64, done.stdout + done.stderr
    assert "min_cuont" in done.stderr
    assert "min_count" in done.stderr


def test_a_pools_file_that_is_not_toml_says_where(shell: Shell) -> None:
    file = shell.folder / "broken.toml"
    file.write_text("[pools.cpu\n")
    done = shell("pools", "apply", str(file))
    assert done.returncode == 64
    assert "line 1" in done.stderr


def test_status_pods_and_top_show_the_pool(shell: Shell) -> None:
    shell("submit", "--", "true")
    for words in (("status",), ("pods",), ("top", "--once")):
        done = shell(*words)
        assert done.returncode == 0, done.stderr
        assert "cpu" in done.stdout


def test_a_simulated_accelerator_is_labelled(shell: Shell) -> None:
    assert "simulated" in shell("pools").stdout


def test_doctor_names_the_isolation_level(alone: Shell) -> None:
    done = alone("doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"isolation: (namespaces|uid|process|portable)", done.stdout), done.stdout


def test_without_a_broker_every_command_says_how_to_get_one(alone: Shell) -> None:
    done = alone("jobs")
    assert done.returncode == 69
    assert "firepool up" in done.stderr


def test_wrong_use_is_64_and_help_is_0(alone: Shell) -> None:
    assert alone("submit", "--pods", "none", "--", "true").returncode == 64
    assert alone("submit", "-e", "NOT_A_PAIR", "--", "true").returncode == 64
    assert alone("--help").returncode == 0


def test_completion_can_be_had(alone: Shell) -> None:
    alone.env["SHELL"] = "/bin/bash"
    done = alone("--show-completion", "bash")
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout
