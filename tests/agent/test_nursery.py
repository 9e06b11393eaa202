"""The nursery: pods come, go and are seen out, whoever dies first; and nothing of them stays on the machine."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from firepool_agent import procfs
from tests.agent.podkit import CAN_NAMESPACE, House, Nest, until
from tests.agent.wheels import source, wheel

pytestmark = [
    pytest.mark.linux,
    pytest.mark.skipif(not CAN_NAMESPACE, reason="needs namespaces"),
]
as_root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
SYSTEM_PYTHON = "/usr/bin/python3"


def traces(nest: Nest) -> list[str]:
    """What a nursery leaves on the machine outside of its directories."""
    import zlib

    tag = f"{zlib.crc32(nest.run_dir.encode()):08x}"
    found = [str(p) for p in Path("/sys/fs/cgroup").glob(f"**/firepool-{tag}")]
    found += [name for _, name in socket.if_nameindex() if name.startswith(f"fp{tag}")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if tag in line]
    found += [path for path in (f"/run/firepool-{tag}", f"/tmp/firepool-{tag}") if os.path.exists(path)]
    return found


def wait_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 10)[0], f"{pid} did not end"
        finally:
            os.close(fd)


@pytest.fixture
def nest() -> Iterator[Nest]:
    with Nest() as made:
        yield made


def test_a_pod_is_made_once_however_often_it_is_asked_for(nest: Nest) -> None:
    first = nest.make()
    nest.say(do="make", wish={"name": "pod", "sku": "cpu", "template": "t0"})
    assert nest.hear("made", "pod")["pod"]["incarnation"] == first["incarnation"]
    nest.say(do="list")
    assert [p["name"] for p in nest.hear("pods")["pods"]] == ["pod"]


def test_an_unmade_pod_ends_with_the_reason_given(nest: Nest) -> None:
    pid = nest.make()["pid"]
    nest.say(do="unmake", name="pod", why="scaled down")
    ended = nest.hear("ended", "pod")
    assert (ended["why"], ended["oom"]) == ("scaled down", False)
    assert procfs.read_process(pid) is None


def test_a_job_that_runs_dies_with_its_pod(nest: Nest) -> None:
    nest.make()
    nest.attempt(
        "import os, signal\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid(); break\nsignal.pause()",
        timeout_s=0.3,
    )
    agent = nest.process.pid
    below = {p.pid for p in procfs.descendants(agent, procfs.processes())}
    assert len(below) >= 7
    nest.say(do="unmake", name="pod", why="x")
    nest.hear("ended", "pod")
    assert not [p for p in procfs.processes() if p.pid in below and p.state not in procfs.DEAD]


def test_an_agent_that_dies_is_told_with_how_it_died(nest: Nest) -> None:
    state = nest.make()
    with contextlib.suppress(AssertionError):
        nest.ask("pod", "exit", code=3)
    assert nest.hear("ended", "pod")["why"] == "the agent ended with exit code 3"
    assert not os.path.exists(state["socket"])


def test_a_pod_that_cannot_be_built_says_why_and_leaves_nothing(nest: Nest) -> None:
    nest.say(do="make", wish={"name": "big", "sku": "cpu", "template": "t", "scratch_bytes": -5})
    nest.hear("made", "big")
    ended = nest.hear("ended", "big")
    assert ended["error"]["code"] == "Internal"
    assert "mount tmpfs" in ended["error"]["message"]
    nest.make("good")


def test_an_end_that_no_broker_saw_is_kept_until_one_forgets_it(nest: Nest) -> None:
    pid = nest.make()["pid"]
    nest.say(do="annotate", name="pod", set={"caller": "alice"})
    nest.peer.close()
    nest._stream.close()
    os.kill(pid, signal.SIGKILL)
    nest.peer = socket.socket(socket.AF_UNIX)
    nest.peer.settimeout(30)
    nest.peer.connect(f"{nest.run_dir}/nursery.sock")
    nest._stream = nest.peer.makefile("rwb")

    def ended() -> list[dict[str, object]]:
        nest.say(do="list")
        return nest.hear("pods")["ended"]  # type: ignore[no-any-return]

    assert until(ended, "the end to be known")[0]["name"] == "pod"
    nest.say(do="forget", names=["pod"])
    assert ended() == []


def test_annotations_live_as_long_as_the_pod(nest: Nest) -> None:
    nest.make(annotations={"a": "1"})
    nest.say(do="annotate", name="pod", set={"b": "2", "a": None})
    nest.say(do="annotate", name="nobody", set={"b": "2"})
    nest.say(do="list")
    assert nest.hear("pods")["pods"][0]["annotations"] == {"b": "2"}


def test_without_a_broker_it_ends_its_pods_and_itself_in_time() -> None:
    nest = Nest(orphan_s=0.5)
    try:
        pid = nest.make()["pid"]
        nest._stream.close()
        nest.peer.close()
        assert nest.process.wait(20) == 0
        assert procfs.read_process(pid) is None
        assert traces(nest) == []
    finally:
        nest.close()


def test_when_it_is_killed_its_pods_die_and_the_next_one_clears_up() -> None:
    nest = Nest()
    try:
        pids = [nest.make(name)["pid"] for name in ("one", "two")]
        os.kill(nest.process.pid, signal.SIGKILL)
        nest.process.wait()
        for pid in pids:
            wait_gone(pid)
    finally:
        nest.close()
    again = Nest(directories=(nest.home, nest.run_dir))
    try:
        again.make("one")
    finally:
        again.close()
    assert traces(again) == []


def test_nothing_of_it_stays_on_the_machine(nest: Nest) -> None:
    for name in ("one", "two"):
        nest.make(name)
    assert traces(nest)
    nest.close()
    assert traces(nest) == []


def test_what_it_cannot_give_is_refused_and_not_lowered() -> None:
    with Nest(env={"FIREPOOL_ISOLATION_MAX": "process"}) as nest:
        nest.say(do="make", wish={"name": "pod", "sku": "cpu", "template": "t", "isolation": "namespaces"})
        error = nest.hear("refused", "pod")["error"]
        assert error["code"] == "IsolationUnavailable"
        assert "FIREPOOL_ISOLATION_MAX=process is set" in error["message"]
        assert error["details"]["fix"]


def test_a_request_that_makes_no_sense_is_answered_and_harms_nobody(nest: Nest) -> None:
    nest.make()
    nest.say(do="dance")
    assert "dance" in nest.hear("refused")["error"]["message"]
    nest._stream.write(b"not json\n")
    nest._stream.flush()
    assert nest.hear("refused")["error"]["code"] == "Internal"
    nest.say(do="make", wish={"nonsense": 1})
    assert nest.hear("refused")["error"]["code"] == "Internal"
    assert nest.attempt("print(1)")["out"] == "1\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for uids of a builder's own")
def test_requirements_are_installed_inside_a_pod_and_built_as_somebody_else(nest: Nest, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    wheel(tmp_path, "alpha", "1.0", {"alpha.py": "version = 1\n"})
    source(tmp_path, "built")
    nest.make(settings={"wheelhouse": str(tmp_path)}, network="none")
    digest = nest.look(
        f"""
import asyncio
from firepool_agent.layers import Layers
from firepool_wire.jobspec import Requirements
agent.layers = Layers(agent.config, agent.janitor)
async def install():
    return await agent.layers.ensure(Requirements(text="alpha\\nbuilt"), {{"wheelhouse": {str(tmp_path)!r}}})
agent.layer = asyncio.run(install())
result = agent.layer.path
"""
    )
    code = "import sys; sys.path.insert(0, '/layers/site'); import alpha, built; print(alpha.version, built.builder)"
    answer = nest.attempt(code, layers=[digest])
    version, builder = answer["out"].split()
    assert version == "1"
    assert int(builder) not in (0, answer["uid"])
    assert nest.reset()["clean"], "installing changes nothing that a reset compares"


def test_an_interpreter_below_tmp_is_visible_to_jobs_whose_tmp_is_their_own(nest: Nest, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/found.py").write_text("x = 5\n")
    nest.make(settings={"wheelhouse": str(tmp_path / "lib")})  # shown like an interpreter's directories
    code = f"import sys, os; sys.path.insert(0, {str(tmp_path / 'lib')!r}); import found; print(found.x, os.listdir('/tmp') != [])"
    assert nest.attempt(code)["out"] == "5 True\n"
    assert nest.reset()["clean"]
    assert (tmp_path / "lib/found.py").exists()


# -- weaker levels --------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_house() -> Iterator[str]:
    """The agent's code where any user can read it."""
    root = Path(tempfile.mkdtemp(prefix="fp-house-", dir="/var/tmp"))
    for name in ("firepool_agent", "firepool_wire"):
        shutil.copytree(f"agent/{name}", root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree("tests/agent", root / "tests/agent", ignore=shutil.ignore_patterns("__pycache__"))
    for directory, _, files in os.walk(root):
        os.chmod(directory, 0o755)
        for name in files:
            os.chmod(f"{directory}/{name}", 0o644)
    try:
        yield str(root)
    finally:
        shutil.rmtree(root)


def fresh_enough(python: str) -> bool:
    return (
        os.path.exists(python)
        and subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 11)"]).returncode == 0
    )


needs_system_python = pytest.mark.skipif(
    os.geteuid() != 0 or not fresh_enough(SYSTEM_PYTHON),
    reason="needs root and a system Python 3.11+ that every user can read",
)
LITTER = """
import os, subprocess, sys, time
for n in range(6):
    subprocess.Popen([sys.executable, '-c', 'import signal,os; os.setsid() if %d %% 2 else None; signal.signal(15, signal.SIG_IGN); signal.pause()' % n])
for place in ('.', os.environ.get('TMPDIR', '.')):
    open(place + '/left', 'w').close()
print(os.getuid(), os.listdir('.'))
"""


def clean_and_empty(nest: Nest, level: str) -> None:
    assert nest.ask("pod", "config")["isolation"] == level
    for _ in range(2):
        answer = nest.attempt(LITTER)
        assert answer["exit"] == 0, answer
        assert answer["out"].strip().endswith("['left']"), "the work dir was not empty"
        report = nest.reset()
        assert report["clean"], report["problems"]
    assert nest.ask("pod", "settled")["problems"] == []

    def only_agent_and_janitor() -> bool:
        return (
            len([p for p in procfs.descendants(nest.process.pid, procfs.processes()) if p.state not in procfs.DEAD])
            <= 2
        )

    until(only_agent_and_janitor, "only the agent and its janitor to be left")


@needs_system_python
def test_user_namespaces_without_root_give_the_same_level_with_one_uid(plain_house: str) -> None:
    with Nest(house=House(plain_house, SYSTEM_PYTHON, 1234)) as nest:
        state = nest.make()
        assert "not root" in state["isolation_why"]
        clean_and_empty(nest, "namespaces")
        code = "import os; print(os.access('/run/firepool', os.R_OK), open('/proc/self/status').read().count('CapEff:\\t0000000000000000'))"
        assert nest.attempt(code)["out"] == "False 1\n"
        assert nest.reset()["clean"]
        loop = "import os\nwhile True:\n  try: os.kill(-1, 9)\n  except OSError: pass\n  if os.fork() == 0: os.setsid()"
        nest.attempt(loop, timeout_s=0.2)
        assert nest.reset()["clean"]
        clean_and_empty(nest, "namespaces")


@needs_system_python
def test_uids_without_namespaces_are_swept_by_their_number(plain_house: str) -> None:
    with Nest(env={"FIREPOOL_ISOLATION_MAX": "uid"}, house=House(plain_house, SYSTEM_PYTHON)) as nest:
        nest.make()
        clean_and_empty(nest, "uid")
        answer = nest.attempt("open('/dev/shm/fp-left-by-a-test', 'w').close(); import os; print(os.getuid())")
        assert int(answer["out"]) > 1 << 29
        assert nest.reset()["clean"]
        assert not os.path.exists("/dev/shm/fp-left-by-a-test")
        loop = "import os\nwhile True:\n  try: os.kill(-1, 9)\n  except OSError: pass\n  if os.fork() == 0: os.setsid()"
        nest.attempt(loop, timeout_s=0.2)
        assert nest.reset()["clean"]
        clean_and_empty(nest, "uid")


def test_processes_alone_are_found_by_their_descent() -> None:
    with Nest(env={"FIREPOOL_ISOLATION_MAX": "process"}) as nest:
        nest.make()
        clean_and_empty(nest, "process")
        nest.say(do="unmake", name="pod", why="x")
        nest.hear("ended", "pod")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare to hide /proc")
def test_where_proc_is_hidden_pods_are_portable_and_say_why() -> None:
    hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh")
    with Nest(house=House(before=hidden)) as nest:
        nest.say(do="hello")
        assert "no /proc" in nest.hear("hello")["why"]
        state = nest.make(isolation="portable")
        assert state["isolation"] == "portable"
        for _ in range(2):
            answer = nest.attempt("import os; print(os.listdir('.')); open('left', 'w').close()")
            assert answer["out"] == "[]\n"
            assert nest.reset()["clean"]
        assert not nest.attempt("import signal; signal.pause()", timeout_s=0.2)["ended"]
        assert nest.reset()["clean"]
        nest.say(do="unmake", name="pod", why="x")
        nest.hear("ended", "pod")


def test_pods_are_made_in_milliseconds(nest: Nest) -> None:
    made = [nest.make(f"pod{n}")["made_ms"] for n in range(5)]
    assert min(made) < 100


def test_the_event_loop_of_a_pod_is_its_own(nest: Nest) -> None:
    """An agent is forked from the nursery's image: whatever loop or selector that had must not be shared."""
    nest.make()
    assert nest.look("import asyncio; result = asyncio.run(asyncio.sleep(0, 5))") == 5


def test_a_termination_signal_ends_it_with_and_without_pods() -> None:
    for pods in ((), ("one",)):
        nest = Nest()
        try:
            for name in pods:
                nest.make(name)
            os.kill(nest.process.pid, signal.SIGTERM)
            assert nest.process.wait(20) == 0
            assert traces(nest) == []
        finally:
            nest.close()
