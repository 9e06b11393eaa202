"""Which variables reach a job: ours, the user's as far as they are allowed, the broker's on top, nothing of the agent's."""

import os
import signal
from collections.abc import Callable

import pytest

from firepool_agent import env
from tests.agent.driver import Agent


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GLIBC_TUNABLES", "GCONV_PATH"),
        *("PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONUSERBASE", "PYTHONEXECUTABLE"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS"),
        *("FIREPOOL_JOB_ID", "FIREPOOL_ANYTHING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_LIMIT_0"),
        *("", "A=B", "NUL\0"),
    ],
)
def test_variables_of_the_loader_the_agent_and_the_topology_are_not_the_users(name: str) -> None:
    assert not env.allowed(name)


@pytest.mark.parametrize(
    "name", ["HF_HOME", "PATH", "HOME", "PYTHONHASHSEED", "PYTHONPATH", "OMP_NUM_THREADS", "RANKING"]
)
def test_other_variables_are(name: str) -> None:
    assert env.allowed(name)


def test_dropped_variables_are_reported_by_name_and_kept_ones_arrive(agent: Agent) -> None:
    wanted = {"LD_PRELOAD": "/tmp/evil.so", "RANK": "7", "FIREPOOL_CALLER": "root", "MINE": "yes", "BAD": "a\0b"}
    ended = agent.run_function(
        lambda: dict(os.environ), env=wanted, injected={"FIREPOOL_CALLER": "team-a", "RANK": "0"}
    )
    seen = ended.value()
    assert ended.exit.dropped_env == ["BAD", "FIREPOOL_CALLER", "LD_PRELOAD", "RANK"]
    assert seen["FIREPOOL_DROPPED_ENV"] == "BAD,FIREPOOL_CALLER,LD_PRELOAD,RANK"
    assert (seen["MINE"], seen["FIREPOOL_CALLER"], seen["RANK"]) == ("yes", "team-a", "0")
    assert "LD_PRELOAD" not in seen


def test_nothing_of_the_agents_own_environment_reaches_a_job(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(env={"AGENT_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret"})
    assert "secret" not in str(agent.run_function(lambda: dict(os.environ)).value())
    assert "secret" not in agent.run(["env"]).out
    assert "secret" not in agent.run(["sh", "-c", "tr '\\0' '\\n' < /proc/self/environ"]).out


def test_the_environment_reaches_c_and_children_too(agent: Agent) -> None:
    def body() -> tuple[str, str]:
        import ctypes

        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        return getenv(b"MINE").decode(), os.popen("echo $MINE").read().strip()

    assert agent.run_function(body, env={"MINE": "yes"}).value() == ("yes", "yes")


def test_home_work_and_tmp_are_the_attempts_own(agent: Agent) -> None:
    def body() -> dict[str, object]:
        return {
            "cwd": os.getcwd() == os.environ["PWD"],
            "writable": [os.access(os.environ[n], os.W_OK) for n in ("HOME", "TMPDIR", "PWD", "FIREPOOL_OUTPUT_DIR")],
        }

    assert agent.run_function(body).value() == {"cwd": True, "writable": [True] * 4}


def test_a_variable_that_is_read_only_at_start_gets_a_fresh_interpreter(agent: Agent) -> None:
    def body() -> tuple[int, str, list[str]]:
        import sys

        return hash("firepool"), sys.modules["__main__"].__name__, [p for p in sys.path if "/proc/" in p]

    first = agent.run_function(body, env={"PYTHONHASHSEED": "7"})
    again = agent.run_function(body, env={"PYTHONHASHSEED": "7"})
    other = agent.run_function(body, env={"PYTHONHASHSEED": "8"})
    assert first.value()[0] == again.value()[0] != other.value()[0]
    assert first.value()[1:] == ("__main__", [])


def test_a_fresh_interpreter_times_out_with_stacks_like_a_forked_one(agent: Agent) -> None:
    def stuck_in_fresh() -> None:
        signal.pause()

    ended = agent.run_function(stuck_in_fresh, env={"PYTHONHASHSEED": "7"}, run_timeout_s=0.4, grace_s=0)
    assert ended.error is not None
    assert "stuck_in_fresh" in ended.error.details["stacks"]
