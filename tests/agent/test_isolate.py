"""What an attempt is, sees and may do inside a real pod; how its end is told."""

import os
import signal
from collections.abc import Iterator

import pytest

from firepool_agent import levels, seccomp
from firepool_wire.words import Isolation
from tests.agent.podkit import CAN_NAMESPACE, LISTED, Nest

pytestmark = [
    pytest.mark.linux,
    pytest.mark.root,
    pytest.mark.skipif(not CAN_NAMESPACE or os.geteuid() != 0, reason="needs root and namespaces"),
]


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest() as made:
        made.make(memory_limit_bytes=256 << 20, scratch_bytes=128 << 20)
        yield made


@pytest.fixture
def pod(nest: Nest) -> Iterator[Nest]:
    """The module's pod, clean again after every test."""
    yield nest
    report = nest.reset()
    assert report["clean"], report["problems"]


def run(pod: Nest, code: str, **more: object) -> str:
    answer = pod.attempt(code, **more)
    assert answer["exit"] == 0, answer
    return str(answer["out"]).strip()


def test_every_attempt_has_a_fresh_uid_with_a_name_and_a_home(nest: Nest) -> None:
    code = "import os,pwd; e=pwd.getpwuid(os.getuid()); print(os.getuid(), e.pw_name, e.pw_dir, os.getgroups())"
    seen = []
    for _ in range(3):
        seen.append(run(nest, code).split())
        assert nest.reset()["clean"]
    assert len({words[0] for words in seen}) == 3
    assert all(words[1:] == ["job", "/home/job", "[]"] for words in seen)


def test_an_attempt_starts_in_its_own_empty_directories(pod: Nest) -> None:
    assert run(pod, f"print(__import__('os').getcwd(), {LISTED})") == "/job [[], [], [], []]"


def test_an_attempt_sees_no_process_but_its_own(pod: Nest) -> None:
    code = (
        "import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, os.getpid()], os.getppid())"
    )
    assert run(pod, code) == "True 1"


def test_an_attempt_has_no_privilege_and_cannot_gain_one(pod: Nest) -> None:
    code = """
words = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
print([int(words[c], 16) for c in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')], words['NoNewPrivs'].strip(), words['Seccomp'].strip())
"""
    assert run(pod, code) == "[0, 0, 0, 0, 0] 1 2"


def test_the_agents_directory_and_the_host_are_out_of_reach(pod: Nest) -> None:
    code = """
import os
def tried(action):
    try:
        action()
    except OSError as e:
        return type(e).__name__
    return 'worked'
print(tried(lambda: os.listdir('/run/firepool')))
print(tried(lambda: open('/usr/new', 'w')), tried(lambda: open('/etc/passwd', 'a')), tried(lambda: open('/new', 'w')))
print(tried(lambda: os.kill(1, 9)), tried(lambda: open('/proc/1/environ').read()), tried(lambda: os.setuid(0)))
print(os.path.exists('/work/main/.git') and os.access('/work/main', os.W_OK), os.path.exists('/root/.bashrc'))
"""
    first, second, third, fourth = run(pod, code).splitlines()
    assert first == "PermissionError"
    assert second.split() == ["OSError", "OSError", "OSError"] or "worked" not in second
    assert third.split()[0] == "PermissionError" and "worked" not in third
    assert fourth == "False False"


@pytest.mark.parametrize(
    "call",
    ["mount", "unshare", "setns", "keyctl", "bpf", "perf_event_open", "init_module", "kexec_load", "io_uring_setup"],
)
def test_calls_that_an_escape_would_need_are_denied(call: str, pod: Nest) -> None:
    number = seccomp._DENIED[call][0]
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number}, 0, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert run(pod, code) == "-1 EPERM"


def test_a_new_user_namespace_is_denied_by_every_door(pod: Nest) -> None:
    code = """
import ctypes, errno, subprocess
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
print(libc.syscall(435, 0, 0), errno.errorcode[ctypes.get_errno()])
print(subprocess.run(['true']).returncode)
"""
    assert run(pod, code).splitlines() == ["-1 EPERM", "-1 ENOSYS", "0"]


def test_the_other_abi_of_the_machine_is_no_way_around(pod: Nest) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(0x40000000 + 39), errno.errorcode[ctypes.get_errno()])
"""
    assert run(pod, code) == "-1 ENOSYS"


def test_debuggers_work_inside_the_attempts_own_namespace() -> None:
    denied = seccomp.default_profile(deny_tracing=True)
    allowed = seccomp.default_profile(deny_tracing=False)
    assert denied is not None and allowed is not None
    assert len(denied) > len(allowed)
    assert seccomp.default_profile(deny_tracing=True, machine="sparc64") is None


def test_memory_past_the_limit_kills_the_attempt_and_not_the_agent(pod: Nest) -> None:
    before = pod.look("result = agent.group.oom_kills()")
    answer = pod.attempt("x = bytearray(400 << 20)")
    assert answer["exit"] == -signal.SIGKILL
    assert pod.look("result = agent.group.oom_kills()") == before + 1


def test_peak_memory_is_the_attempts(pod: Nest) -> None:
    assert pod.look("result = agent.group.reset_peak()")
    answer = pod.attempt("x = bytearray(64 << 20)")
    assert 64 << 20 <= answer["end"]["peak_rss_bytes"] < 128 << 20
    assert 64 << 20 <= pod.look("result = agent.group.peak_bytes()") < 128 << 20


def test_processes_past_the_limit_are_refused_to_the_attempt_only(nest: Nest) -> None:
    nest.make("few", pids_limit=20)
    code = """
import os, signal
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            signal.pause()
        made += 1
except BlockingIOError:
    print(made)
"""
    made = int(nest.attempt(code, "few")["out"])
    assert made < 20
    assert nest.reset("few")["clean"]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_the_end_is_told_as_it_was(code: str, exit_code: int, pod: Nest) -> None:
    assert pod.attempt(code)["exit"] == exit_code


def test_sigterm_to_the_guard_reaches_the_attempt(pod: Nest) -> None:
    code = "import signal,sys; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); signal.pause()"
    assert not pod.attempt(code, timeout_s=0.5)["ended"]
    ended = pod.look(
        """
import os, select
os.kill(agent.guard, 15)
select.select([agent.status_r], [], [], 10)
result = os.waitstatus_to_exitcode(isolate.read_end(os.read(agent.status_r, 4096)).status)
"""
    )
    assert ended == 3


def test_a_guard_that_is_killed_takes_the_attempt_along_and_tells_nothing(pod: Nest) -> None:
    assert not pod.attempt("import signal; signal.pause()", timeout_s=0.3)["ended"]
    ended = pod.look(
        """
import os, select
os.kill(agent.guard, 9)
select.select([agent.status_r], [], [], 10)
result = isolate.read_end(os.read(agent.status_r, 4096)) is None
"""
    )
    assert ended is True


def test_a_package_is_the_jobs_own_to_change_and_the_cache_stays_as_it_was(pod: Nest) -> None:
    pod.look(
        """
import os
os.makedirs('/run/firepool/unpack/tree/sub', exist_ok=True)
open('/run/firepool/unpack/tree/mod.py', 'w').write('x = 1')
open('/run/firepool/unpack/tree/sub/data', 'w').write('old')
"""
    )
    code = """
import os, sys
sys.path.insert(0, '/job'); sys.dont_write_bytecode = True
import mod
open('sub/data', 'w').write('new'); open('mod.py', 'a').write('#'); open('sub/more', 'w').write('more'); os.chmod('mod.py', 0o755)
open('new', 'w').close(); os.rename('sub/more', 'more'); os.mkdir('dir')
print(mod.x, sorted(os.listdir('.')))
"""
    assert run(pod, code, package="/run/firepool/unpack/tree") == "1 ['dir', 'mod.py', 'more', 'new', 'sub']"
    assert pod.reset()["clean"]
    after = pod.look(
        "import os; t='/run/firepool/unpack/tree'; result=[open(t+'/mod.py').read(), open(t+'/sub/data').read(), sorted(os.listdir(t))]"
    )
    assert after == ["x = 1", "old", ["mod.py", "sub"]]
    assert run(pod, "print(open('sub/data').read())", package="/run/firepool/unpack/tree") == "old"


def test_layers_are_seen_and_cannot_be_written(pod: Nest) -> None:
    pod.look(
        """
import os
os.makedirs('/run/firepool/caches/layers/abc', exist_ok=True)
os.chmod('/run/firepool/caches/layers/abc', 0o755)
open('/run/firepool/caches/layers/abc/lib.py', 'w').write('y = 2')
"""
    )
    code = """
import sys
sys.path.insert(0, '/layers/abc')
import lib
try:
    open('/layers/abc/forged', 'w')
except OSError as e:
    print(lib.y, type(e).__name__)
"""
    assert run(pod, code, layers=["/run/firepool/caches/layers/abc"]).split()[0] == "2"
    assert pod.look("import os; result = os.listdir('/run/firepool/caches/layers/abc')") == ["lib.py"]


def test_two_pods_share_neither_network_nor_ports_and_reach_each_other(nest: Nest) -> None:
    nest.make("other")
    serve = """
import socket
s = socket.socket(); s.bind(('0.0.0.0', 4711)); s.listen()
print('up', flush=True)
c, _ = s.accept(); c.sendall(b'hello'); c.close()
"""
    assert not nest.attempt(serve, "other", timeout_s=0.5)["ended"]
    address = nest.ask("other", "config")["address"]
    client = f"""
import socket
s = socket.socket(); s.bind(('0.0.0.0', 4711))  # the same fixed port, free here
c = socket.create_connection(('{address}', 4711), 5); print(c.recv(10).decode(), socket.gethostname())
"""
    assert run(nest, client) == "hello pod"
    assert nest.reset()["clean"]
    assert nest.reset("other")["clean"]


# -- levels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["uid", "process", "portable"])
def test_a_lowered_ceiling_is_reported_with_its_reason(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levels.CEILING, level)
    found = levels.probe()
    assert levels.CEILING in found.why and found.fix
    # Where another uid cannot read the interpreter (a Python in a 0700 home), `uid` is not what a job would have.
    assert found.level == level or (level == "uid" and found.level == "process" and "other uids" in found.why)
    assert not found.reaches(Isolation.NAMESPACES)
