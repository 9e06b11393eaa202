"""Limits on an attempt: time to start, time to run, memory; what is told when one is met."""

import os
import signal
import threading
import time
from pathlib import Path

from firepool_wire.errors import OOM, RunTimeout, StartTimeout
from tests.agent.driver import Agent, eventually


def test_a_function_that_never_ends_times_out_with_the_stacks_of_all_threads(agent: Agent) -> None:
    def spin_for_ever() -> None:
        threading.Thread(target=wait_in_a_thread, daemon=True).start()
        while True:
            pass

    def wait_in_a_thread() -> None:
        threading.Event().wait()

    began = time.monotonic()
    ended = agent.run_function(spin_for_ever, run_timeout_s=0.5, grace_s=0.1)
    assert isinstance(ended.error, RunTimeout)
    assert ended.error.details["limit_s"] == 0.5
    assert "spin_for_ever" in ended.error.details["stacks"]
    assert "wait_in_a_thread" in ended.error.details["stacks"]
    assert ended.exit.signal in (signal.SIGTERM, signal.SIGKILL)
    assert time.monotonic() - began < 10


def test_the_stacks_of_a_map_are_those_of_the_item_that_hangs(agent: Agent) -> None:
    def body(x: int) -> int:
        if x == 1:
            hang_here()
        return x

    def hang_here() -> None:
        while True:
            pass

    ended = agent.run_map(body, [0, 1, 2], run_timeout_s=0.5, grace_s=0)
    assert isinstance(ended.error, RunTimeout)
    assert "hang_here" in ended.error.details["stacks"]
    assert ended.value(0) == 0  # what was finished stays


def test_a_command_that_times_out_tells_its_processes(agent: Agent) -> None:
    ended = agent.run(["sh", "-c", "echo said; sleep 61 & wait"], run_timeout_s=0.4, grace_s=0)
    assert isinstance(ended.error, RunTimeout)
    assert "sleep 61" in ended.error.details["stacks"]
    assert ended.out == "said\n"
    assert ended.exit.exit_code == 137


def test_a_timed_out_job_has_its_grace_to_save_something(agent: Agent) -> None:
    script = "trap 'echo saving; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    ended = agent.run(["sh", "-c", script], run_timeout_s=0.3, grace_s=5)
    assert isinstance(ended.error, RunTimeout)
    assert "saving" in ended.out
    assert (ended.exit.exit_code, ended.exit.signal) == (143, signal.SIGTERM)


def test_a_function_that_does_not_get_to_its_first_instruction_is_a_start_timeout(agent: Agent) -> None:
    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            return time.sleep, (60,)

    entry = agent.entry(len, [((), {})])
    import cloudpickle

    entry["payload"] = agent.put_blob(cloudpickle.dumps(Slow()))
    ended = agent.finish(agent.begin(function=entry, start_timeout_s=0.3))
    assert isinstance(ended.error, StartTimeout)
    assert ended.exit.first_instruction_at_s is None


def test_a_result_that_is_out_counts_although_its_process_lingers(agent: Agent) -> None:
    def body() -> int:
        import atexit

        atexit.register(time.sleep, 60)
        return 7

    ended = agent.run_function(body)
    assert ended.value() == 7
    assert (ended.exit.exit_code, ended.error) == (0, None)


def test_a_job_that_outgrows_its_memory_is_out_of_memory(agent: Agent) -> None:
    def hog() -> None:
        held = []
        while True:
            held.append(bytearray(16 << 20))
            time.sleep(0.002)

    limit = 300 << 20
    ended = agent.run_function(hog, memory_bytes=limit)
    assert isinstance(ended.error, OOM)
    assert ended.exit.signal == signal.SIGKILL
    assert ended.exit.peak_rss_bytes < limit * 1.5


def test_the_memory_of_all_processes_counts_together(agent: Agent) -> None:
    def family() -> None:
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(80 << 20)
                held[::4096] = b"x" * len(held[::4096])
                signal.pause()
        signal.pause()

    ended = agent.run_function(family, memory_bytes=200 << 20, run_timeout_s=20.0)
    assert isinstance(ended.error, OOM)


def test_memory_shared_with_the_zygote_is_not_counted_for_every_fork(agent: Agent) -> None:
    def many() -> int:
        held = bytearray(60 << 20)
        held[::4096] = b"x" * len(held[::4096])
        children = []
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                time.sleep(0.5)
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        return len(held)

    assert agent.run_function(many, memory_bytes=200 << 20).value() == 60 << 20


def test_usage_is_told_for_the_whole_tree(agent: Agent) -> None:
    def body() -> None:
        if os.fork() == 0:
            until = time.process_time() + 0.2
            while time.process_time() < until:
                pass
            held = bytearray(50 << 20)
            held[::4096] = b"x" * len(held[::4096])
            os._exit(0)
        os.wait()

    ended = agent.run_function(body)
    assert 0.2 <= ended.exit.cpu_s < 5
    assert 50 << 20 <= ended.exit.peak_rss_bytes < 200 << 20


def test_stacks_can_be_asked_for_while_a_job_runs(agent: Agent) -> None:
    def look_at_me() -> None:
        time.sleep(60)

    attempt = agent.begin(function=agent.entry(look_at_me, [((), {})]))
    agent.wait_started(attempt)
    told = eventually(lambda: agent.call("POST", agent.path(attempt, "/stacks"))["stacks"], "stacks")
    assert "look_at_me" in told
    agent.call("POST", agent.path(attempt, "/stop"), {"grace_s": 0})
    agent.finish(attempt)


def test_no_process_of_a_stopped_job_outlives_its_exit_record(agent: Agent) -> None:
    pids = agent.folder / "pids"
    script = f"sleep 62 & echo $! >> {pids}; setsid sleep 62 & echo $! >> {pids}; echo up; wait"
    attempt = agent.begin(argv=["sh", "-c", script], run_timeout_s=0.5, grace_s=0)
    list(agent.events(attempt))
    for pid in pids.read_text().split():
        state = _state(int(pid))
        assert state in ("", "Z", "X"), f"{pid} is {state}"
    agent.finish(attempt)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
