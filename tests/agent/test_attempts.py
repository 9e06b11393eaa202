"""The life of an attempt as its caller sees it: idempotent calls, deadlines, records that survive, one attempt at a time."""

import os
import signal
import time
from pathlib import Path

import pytest

from firepool_wire.errors import Cancelled, Conflict, HostLost, NotFound
from firepool_wire.frames import Kind
from tests.agent.driver import Agent, Ended, eventually


def test_a_repeated_prepare_gets_the_first_answer(agent: Agent) -> None:
    first = agent.prepare("job-1:0")
    assert agent.prepare("job-1:0") == first
    assert agent.call("GET", agent.path("job-1:0"))["state"] == "prepared"


def test_a_second_attempt_waits_for_the_reset(agent: Agent) -> None:
    attempt = agent.begin(argv=["true"])
    ended = Ended(list(agent.events(attempt)))
    assert ended.exit.exit_code == 0
    with pytest.raises(Conflict) as refused:
        agent.prepare("other:0")
    assert refused.value.details["holder"] == attempt
    assert agent.reset(attempt)["clean"]
    agent.prepare("other:0")


def test_calls_behind_their_deadline_are_refused_and_change_nothing(agent: Agent) -> None:
    with pytest.raises(Conflict):
        agent.prepare("late:0", deadline_s=-0.001)
    assert agent.call("GET", agent.path("late:0"))["state"] == "unknown"
    assert agent.call("GET", "/v1/hello")["last_user"] is None
    agent.prepare("job:0")
    with pytest.raises(Conflict):
        agent.launch("job:0", deadline_s=-0.001, argv=["true"])
    assert agent.call("GET", agent.path("job:0"))["state"] == "prepared"


def test_an_attempt_that_was_not_prepared_cannot_be_launched(agent: Agent) -> None:
    with pytest.raises(NotFound):
        agent.launch("stranger:0", argv=["true"])


def test_a_repeated_launch_runs_once(agent: Agent) -> None:
    mark = agent.folder / "ran"
    attempt = agent.new_id()
    agent.prepare(attempt)
    argv = ["sh", "-c", f"echo x >> {mark}"]
    first = agent.launch(attempt, argv=argv)
    assert agent.launch(attempt, argv=argv) == first
    ended = agent.finish(attempt)
    assert ended.exit.exit_code == 0
    assert mark.read_text() == "x\n"


def test_an_abandoned_prepare_leaves_no_trace_and_its_process_serves_the_next(agent: Agent) -> None:
    first = agent.prepare("job-1:0", caller="team-a")
    for _ in range(2):
        agent.call("POST", agent.path("job-1:0", "/abandon"))
    assert agent.call("GET", agent.path("job-1:0"))["state"] == "unknown"
    assert agent.call("GET", "/v1/hello")["last_user"] is None
    assert agent.prepare("job-2:0", caller="team-b") == first
    agent.launch("job-2:0", argv=["true"])
    assert agent.finish("job-2:0").exit.exit_code == 0


def test_an_attempt_that_runs_cannot_be_abandoned_or_reset(agent: Agent) -> None:
    attempt = agent.begin(argv=["sleep", "60"])
    with pytest.raises(Conflict):
        agent.call("POST", agent.path(attempt, "/abandon"))
    with pytest.raises(Conflict):
        agent.reset(attempt)
    with pytest.raises(Conflict):
        agent.call("POST", agent.path(attempt, "/ack"))


def test_a_stop_ends_a_command_with_the_error_it_brought(agent: Agent) -> None:
    attempt = agent.begin(argv=["sleep", "60"])
    stop = {"grace_s": 5, "error": Cancelled("by ann").to_json()}
    for _ in range(3):
        agent.call("POST", agent.path(attempt, "/stop"), stop)
    ended = agent.finish(attempt)
    assert isinstance(ended.error, Cancelled)
    assert (ended.exit.exit_code, ended.exit.signal) == (143, signal.SIGTERM)


def test_what_ignores_sigterm_is_killed_after_its_grace(agent: Agent) -> None:
    attempt = agent.begin(argv=["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"])
    _wait_for_log(agent, attempt)
    began = time.monotonic()
    agent.call("POST", agent.path(attempt, "/stop"), {"grace_s": 0.3})
    ended = agent.finish(attempt)
    assert (ended.exit.exit_code, ended.exit.signal) == (137, signal.SIGKILL)
    assert time.monotonic() - began >= 0.3


def test_a_prepared_attempt_that_is_stopped_ends_without_an_exit_code(agent: Agent) -> None:
    attempt = agent.new_id()
    agent.prepare(attempt)
    agent.call("POST", agent.path(attempt, "/stop"), {"grace_s": 0})
    ended = agent.finish(attempt)
    assert isinstance(ended.error, Cancelled)
    assert ended.exit.exit_code is None
    with pytest.raises((Conflict, NotFound)):
        agent.launch(attempt, argv=["true"])


def test_killing_its_own_parent_ends_the_attempt(agent: Agent) -> None:
    ended = agent.run(["sh", "-c", "kill -9 $PPID; sleep 60"])
    assert ended.error is not None
    assert (ended.exit.exit_code, ended.exit.signal) == (137, signal.SIGKILL)


def test_processes_that_a_command_leaves_behind_are_gone_after_the_reset(agent: Agent) -> None:
    mark = agent.folder / "pid"
    ended = agent.run(["sh", "-c", f"setsid sleep 61 & echo $! > {mark}; exit 0"])
    assert ended.exit.exit_code == 0
    assert ended.exit.leftovers == 1
    pid = int(mark.read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the leftover process")


def test_events_can_be_read_again_from_every_offset(agent: Agent) -> None:
    attempt = agent.begin(argv=["sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.02; done"])
    whole = list(agent.events(attempt))
    assert whole[-1].kind is Kind.END
    for n, frame in enumerate(whole):
        assert list(agent.events(attempt, frame.end)) == whole[n + 1 :]
    agent.finish(attempt)


def test_a_log_that_is_followed_from_the_middle_misses_nothing(agent: Agent) -> None:
    attempt = agent.begin(argv=["sh", "-c", "echo a; sleep 0.3; echo b"])
    first = []
    for frame in agent.events(attempt):  # hangs up in the middle
        first.append(frame)
        if frame.kind is Kind.LOG:
            break
    rest = list(agent.events(attempt, first[-1].end))
    assert Ended(first + rest).out == "a\nb\n"


def test_an_offset_beyond_the_log_is_refused(agent: Agent) -> None:
    attempt = agent.begin(argv=["true"])
    for offset in (10_000, "x"):
        status, _ = agent.raw("GET", agent.path(attempt, f"/events?from={offset}"))
        assert status == 422


def test_the_exit_record_stays_until_it_is_acknowledged(agent: Agent) -> None:
    attempt = agent.begin(argv=["sh", "-c", "echo kept; exit 4"])
    ended = Ended(list(agent.events(attempt)))
    assert agent.reset(attempt)["clean"]
    assert agent.run(["true"]).exit.exit_code == 0
    status = agent.call("GET", agent.path(attempt))
    assert status["state"] == "ended"
    assert status["exit"] == ended.exit.to_json()
    assert Ended(list(agent.events(attempt))).out == "kept\n"
    for _ in range(2):
        agent.call("POST", agent.path(attempt, "/ack"))
    assert agent.call("GET", agent.path(attempt))["state"] == "unknown"


def test_records_survive_the_agent(agent: Agent) -> None:
    done = agent.begin(argv=["sh", "-c", "echo before"])
    record = Ended(list(agent.events(done))).exit
    agent.reset(done)
    lost = agent.begin(argv=["sleep", "60"])
    agent.wait_started(lost)
    agent.kill_and_restart()
    hello = agent.call("GET", "/v1/hello")
    assert set(hello["attempts"]) == {done, lost}
    assert hello["last_user"]["caller"] == "team-a"
    assert Ended(list(agent.events(done))).exit == record
    after = Ended(list(agent.events(lost)))
    assert isinstance(after.error, HostLost)
    assert after.exit.exit_code is None


def test_who_used_the_pod_last_is_told_with_queue_and_tag(agent: Agent) -> None:
    agent.prepare("job:0", caller="team-b", person="bob", queue="evals", tag="t1")
    assert agent.call("GET", "/v1/hello")["last_user"] == {
        "caller": "team-b",
        "person": "bob",
        "queue": "evals",
        "tag": "t1",
    }


def test_a_launch_with_neither_function_nor_command_fails_the_attempt(agent: Agent) -> None:
    attempt = agent.new_id()
    agent.prepare(attempt)
    status, _ = agent.raw("PUT", agent.path(attempt, "/launch"), b'{"deadline_s": 1e12}')
    assert status == 422
    ended = agent.finish(attempt)
    assert ended.exit.exit_code is None


def test_the_pod_gets_a_new_interpreter_when_its_zygote_dies(agent: Agent) -> None:
    assert agent.run(["true"]).exit.exit_code == 0
    zygote = _zygote_of(agent)
    os.kill(zygote, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{zygote}").exists(), "the agent has seen to its zygote")
    assert agent.run(["true"]).exit.exit_code == 0
    assert _zygote_of(agent) not in (0, zygote)


def test_an_attempt_whose_zygote_dies_is_an_infrastructure_fault(agent: Agent) -> None:
    attempt = agent.new_id()
    agent.prepare(attempt)
    os.kill(_zygote_of(agent), signal.SIGKILL)
    try:
        agent.launch(attempt, argv=["sleep", "60"])
    except HostLost:
        pass  # it was already known
    ended = agent.finish(attempt)
    assert ended.error is not None
    assert ended.error.fault == "infra"


def _zygote_of(agent: Agent) -> int:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == agent.process.pid and b"-S" in words:
            return pid
    return 0


def _wait_for_log(agent: Agent, attempt: str) -> None:
    for frame in agent.events(attempt):
        if frame.kind is Kind.LOG:
            return
