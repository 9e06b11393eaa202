"""The agent inside a real pod: what a job can reach there, and that the same jobs end the same way as outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from firepool_wire.errors import OOM, RunTimeout
from tests.agent.driver import Client
from tests.agent.podkit import CAN_NAMESPACE

pytestmark = [
    pytest.mark.linux,
    pytest.mark.skipif(
        not CAN_NAMESPACE, reason="this machine allows no namespaces: pods of level `process` are tested elsewhere"
    ),
]

MakePod = Callable[..., Client]


def test_a_job_cannot_reach_its_agent(make_pod: MakePod) -> None:
    pod = make_pod()
    socket_path = pod.socket_path

    def body() -> dict[str, object]:
        import socket

        seen: dict[str, object] = {
            "uid": os.getuid(),
            "pids": sorted(int(n) for n in os.listdir("/proc") if n.isdigit()),
        }
        seen["capabilities"] = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
        found = []
        for folder, dirs, names in os.walk("/"):
            dirs[:] = [
                d
                for d in dirs
                if f"{folder.rstrip('/')}/{d}" not in ("/proc", "/sys", "/usr", "/dev", "/work", "/root", "/lib")
            ]
            found += [f"{folder}/{n}" for n in names if n.endswith(".sock") or n in ("journal",)]
        seen["found"] = found
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(socket_path)
                seen["connected"] = True
            except OSError as why:
                seen["connected"] = type(why).__name__
        try:
            os.kill(1, signal.SIGKILL)
            seen["killed"] = True
        except PermissionError:
            seen["killed"] = False
        return seen

    seen = pod.run_function(body).value()
    assert seen["found"] == []
    assert seen["connected"] is not True
    assert seen["killed"] is False
    assert int(seen["capabilities"], 16) == 0
    assert max(seen["pids"]) < 10  # its own PID namespace: guard and itself
    if os.geteuid() == 0:
        assert seen["uid"] != 0
    assert pod.call("GET", "/v1/hello")["isolation"] == "namespaces"


def test_every_attempt_has_a_user_of_its_own_in_a_pod_of_root(make_pod: MakePod) -> None:
    pod = make_pod()
    attempt = pod.new_id()
    uid = pod.prepare(attempt)["uid"]
    pod.launch(attempt, argv=["sh", "-c", "id -u; echo $USER; cd ~ && pwd; ls -A; touch x"])
    first = pod.finish(attempt).out.split()
    second = pod.run(["sh", "-c", "id -u; echo $USER; cd ~ && pwd; ls -A"]).out.split()
    assert first[0] == str(uid)
    assert first[1:3] == second[1:3] == ["job", first[2]]
    if os.geteuid() == 0:
        assert first[0] != second[0]
    assert "x" not in second[3:]


def test_jobs_end_in_a_pod_as_they_do_outside(make_pod: MakePod) -> None:
    pod = make_pod()
    assert pod.run_function(lambda x: x + 1, 1).value() == 2
    assert pod.run(["sh", "-c", "exit 3"]).exit.exit_code == 3
    assert pod.run_function(lambda: os.kill(os.getpid(), signal.SIGSEGV)).exit.signal == signal.SIGSEGV
    assert [pod.run_map(lambda x: x * x, [1, 2, 3]).value(i) for i in range(3)] == [1, 4, 9]
    stuck = pod.run_function(_spin, run_timeout_s=0.3, grace_s=0.1)
    assert isinstance(stuck.error, RunTimeout)
    assert "_spin" in stuck.error.details["stacks"]


def _spin() -> None:
    while True:
        pass


def test_a_fresh_interpreter_needs_nothing_of_ours_in_the_pod(make_pod: MakePod) -> None:
    pod = make_pod()
    assert pod.run_function(lambda x: x + 1, 1, env={"PYTHONHASHSEED": "3"}).value() == 2


def test_fifty_escapees_end_with_their_attempt(make_pod: MakePod) -> None:
    pod = make_pod()

    def body() -> None:
        for n in range(50):
            if os.fork() == 0:
                if n % 2:
                    os.setsid()
                if n % 3 == 0 and os.fork():
                    os._exit(0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.pause()

    ended = pod.run_function(body)
    assert ended.exit.exit_code == 0
    assert ended.exit.leftovers >= 40


def test_a_job_that_kills_everything_it_can_kills_only_itself(make_pod: MakePod) -> None:
    pod = make_pod()
    ended = pod.run(["sh", "-c", "while :; do kill -9 -1; done"], run_timeout_s=5.0, grace_s=0)
    assert ended.error is not None
    assert pod.run_function(lambda: 1).value() == 1


def test_a_hog_is_out_of_memory_and_the_agent_lives(make_pod: MakePod) -> None:
    pod = make_pod(memory_limit_bytes=256 << 20)

    def hog() -> None:
        held = []
        while True:
            held.append(bytearray(32 << 20))

    for _ in range(2):
        ended = pod.run_function(hog, run_timeout_s=30.0)
        assert isinstance(ended.error, OOM), ended.error
    assert pod.run_function(lambda: 1).value() == 1


def test_written_files_do_not_count_as_used_memory(make_pod: MakePod) -> None:
    pod = make_pod(memory_limit_bytes=256 << 20)
    target = Path(sys.executable)
    ended = pod.run(
        ["sh", "-c", f"for i in 1 2 3 4 5 6 7 8; do cat {target} /usr/bin/* 2>/dev/null | wc -c >&2; done"],
        run_timeout_s=60.0,
    )
    assert ended.exit.exit_code == 0, ended.error


def test_packages_outputs_and_output_dir_work_through_the_overlay(make_pod: MakePod, tmp_path: Path) -> None:
    import zipfile

    pod = make_pod()
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        archive.writestr("mine.py", "X = 5\n")
    package = pod.put_blob((tmp_path / "p.zip").read_bytes())
    attempt = pod.begin(
        argv=[
            "sh",
            "-c",
            "python -c 'import mine; print(mine.X)'; echo r > r.json; echo o > $FIREPOOL_OUTPUT_DIR/o; echo s >> mine.py",
        ],
        package=package,
        outputs=["*.json", "*.py"],
    )
    list(pod.events(attempt))
    for path, content in (("r.json", b"r\n"), ("o", b"o\n"), ("mine.py", b"X = 5\ns\n")):
        assert pod.raw("GET", pod.path(attempt, f"/outputs/{path}")) == (200, content)
    assert pod.finish(attempt).out == "5\n"
    assert pod.run(["cat", "mine.py"], package=package).out == "X = 5\n"


def test_a_child_process_of_a_job_finds_the_same_interpreter(make_pod: MakePod) -> None:
    pod = make_pod()

    def body() -> str:
        return subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout

    assert pod.run_function(body).value() == "child\n"
