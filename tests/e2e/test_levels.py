"""The same jobs at all four isolation levels (`design.md` §4.6): each is reported as what it is and never quietly lowered."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firepool_wire.words import STRENGTH, Isolation
from tests.e2e.process import BrokerProcess, broker

pytestmark = [pytest.mark.linux, pytest.mark.slow]

LEVELS = [Isolation.NAMESPACES, Isolation.UID, Isolation.PROCESS, Isolation.PORTABLE]

#: Leaves a daemon behind that has left its session, ignores SIGTERM and holds no pipe of ours.
LEAVES_A_DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep(600) # {sys.argv[1]}"])
print("done", flush=True)
"""


def pools(level: Isolation) -> str:
    return f"[pools.cpu]\nmax_count = 1\nisolation = '{level}'\n[pools.cpu.shape]\nmemory_mib = 256\n"


def cap(level: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the ceiling to the level; skip where this user and interpreter cannot even reach that (doctor says why)."""
    monkeypatch.setenv("FIREPOOL_ISOLATION_MAX", level)
    probe = subprocess.run(
        [sys.executable, "-m", "firepool_agent", "probe"], capture_output=True, text=True, check=True
    )
    found = json.loads(probe.stdout)
    if found["isolation"] != level:
        pytest.skip(f"{level} is not to be had here: {found['why']}")


def run(one: BrokerProcess, *argv: str, **fields: Any) -> Any:
    return one.done(one.submit({"entrypoint": {"argv": list(argv)}, **fields}))


def daemons(mark: str) -> list[int]:
    """Processes of this machine whose command line carries the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it ended while we looked
            if b"time.sleep(600)" in line and mark.encode() in line:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_jobs_run_warm_at_every_level_and_the_level_is_told(
    level: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap(level, monkeypatch)
    (tmp_path / "pools.toml").write_text(pools(level))
    with broker(tmp_path, "--pools", str(tmp_path / "pools.toml")) as one:
        first = run(one, sys.executable, "-c", "print('hello')")
        assert (first["state"], first["exit_code"]) == ("SUCCEEDED", 0), first
        failed = run(one, "/bin/sh", "-c", "exit 3")
        assert (failed["state"], failed["error"]["code"], failed["exit_code"]) == ("FAILED", "NonZeroExit", 3)
        assert failed["path"] == "warm"
        slow = run(one, "/bin/sleep", "600", run_timeout_s=0.3, grace_s=0.1)
        assert slow["error"]["code"] == "RunTimeout"
        assert {pod["isolation"] for pod in one.json("GET", "/v1/pods")["pods"]} == {level}


@pytest.mark.parametrize("level", LEVELS[:3])
def test_a_daemon_that_a_job_leaves_behind_is_gone_after_the_reset(
    level: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap(level, monkeypatch)
    (tmp_path / "pools.toml").write_text(pools(level))
    mark = f"left-{os.getpid()}-{level}"
    with broker(tmp_path, "--pools", str(tmp_path / "pools.toml")) as one:
        left = run(one, sys.executable, "-c", LEAVES_A_DAEMON, mark)
        assert left["state"] == "SUCCEEDED", left
        again = run(one, sys.executable, "-c", "print('next')")
        assert again["state"] == "SUCCEEDED"
        # The next job has run on a pod that was proved clean, or on a new one: either way the daemon is dead.
        assert not daemons(mark)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_pool_that_demands_more_than_the_machine_gives_is_refused_not_lowered(
    level: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = LEVELS[LEVELS.index(level) - 1]
    assert STRENGTH[wanted] > STRENGTH[level]
    monkeypatch.setenv("FIREPOOL_ISOLATION_MAX", level)
    (tmp_path / "pools.toml").write_text(pools(wanted))
    with broker(tmp_path, "--pools", str(tmp_path / "pools.toml")) as one:
        body = run(one, "/bin/true")
        assert (body["state"], body["error"]["code"]) == ("FAILED", "IsolationUnavailable"), body
        assert body["error"]["fault"] == "infra"
        assert body["exit_code"] is None
        assert not [pod for pod in one.json("GET", "/v1/pods")["pods"] if pod["state"] in ("idle", "running", "held")]
