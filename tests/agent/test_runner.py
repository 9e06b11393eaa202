"""Functions inside an attempt: values, errors, exits, maps and generators, by a real agent."""

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firepool_wire.errors import (
    OOM,
    NonZeroExit,
    ResultTooLarge,
    ResultUnpicklable,
    SerializationMismatch,
    Signaled,
    UserError,
)
from firepool_wire.frames import ItemStatus
from tests.agent.driver import Agent


def test_a_function_returns_its_value(agent: Agent) -> None:
    ended = agent.run_function(lambda a, b: {"sum": a + b}, 40, 2)
    assert ended.value() == {"sum": 42}
    assert (ended.exit.exit_code, ended.exit.signal, ended.error) == (0, None, None)
    assert ended.exit.launched_at_s < ended.exit.first_instruction_at_s < ended.exit.ended_at_s


def test_what_a_function_raises_comes_back_with_its_traceback(agent: Agent) -> None:
    def failing() -> None:
        raise ValueError("no such move")

    ended = agent.run_function(failing)
    assert isinstance(ended.error, UserError)
    assert ended.error.details["type"] == "ValueError"
    assert "in failing" in ended.error.details["traceback"]
    assert "firepool_agent" not in ended.error.details["traceback"]
    assert ended.exit.exit_code == 1
    assert "ValueError: no such move" in ended.err


def test_an_exception_that_does_not_survive_pickling_still_tells_its_story(agent: Agent) -> None:
    class Locked(Exception):
        def __init__(self, what: str, why: str) -> None:
            super().__init__(f"{what}: {why}")
            self.lock = threading.Lock()

    def failing() -> None:
        raise Locked("door", "closed")

    ended = agent.run_function(failing)
    assert isinstance(ended.error, UserError)
    assert "door: closed" in ended.error.message
    assert ended.error.details["type"].endswith("Locked")
    assert b"\0" not in ended.items[0][2]


def test_an_exception_that_cannot_be_printed_is_still_told(agent: Agent) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def failing() -> None:
        raise Mute

    ended = agent.run_function(failing)
    assert isinstance(ended.error, UserError)
    assert ended.error.details["type"].endswith("Mute")


def test_the_pickled_exception_travels_only_from_trusted_pools(agent: Agent) -> None:
    def failing() -> None:
        raise KeyError("x")

    assert b"\0" in agent.run_function(failing).items[0][2]
    assert b"\0" not in agent.run_function(failing, untrusted=True).items[0][2]


def test_a_lambda_comes_back_from_a_trusted_pool_and_is_refused_by_an_untrusted_one(agent: Agent) -> None:
    def maker() -> Callable[[int], int]:
        return lambda x: x * 2

    assert agent.run_function(maker).value()(21) == 42
    refused = agent.run_function(maker, untrusted=True)
    assert isinstance(refused.error, ResultUnpicklable)
    assert "untrusted" in refused.error.message


def test_plain_values_come_back_from_an_untrusted_pool_without_a_pickle(agent: Agent) -> None:
    value = {"score": 0.5, "tags": ("a", b"b"), "seen": {1, 2}}
    assert agent.run_function(lambda: value, untrusted=True).value(loads=None) == value


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_own(agent: Agent) -> None:
    ended = agent.run_function(threading.Lock)
    assert isinstance(ended.error, ResultUnpicklable)
    assert ended.exit.exit_code == 1


def test_a_result_over_the_limit_is_refused_with_its_size(agent: Agent) -> None:
    ended = agent.run_function(lambda: b"x" * 2_000_000, max_result_bytes=1_000_000)
    assert isinstance(ended.error, ResultTooLarge)
    assert ended.error.details["limit_bytes"] == 1_000_000
    assert ended.exit.result_bytes < 10_000


def test_a_large_result_comes_back_whole(agent: Agent) -> None:
    ended = agent.run_function(lambda: bytes(range(256)) * 20_000)
    assert ended.value() == bytes(range(256)) * 20_000


@pytest.mark.parametrize(("code", "told"), [(3, 3), (None, 0), ("words", 1), (256 + 7, 7)])
def test_sys_exit_means_what_it_means_to_a_process(agent: Agent, code: object, told: int) -> None:
    ended = agent.run_function(lambda: sys.exit(code))  # type: ignore[arg-type]
    assert isinstance(ended.error, NonZeroExit)
    assert ended.exit.exit_code == told
    assert ended.error.details["exit_code"] == told


def test_os_exit_without_a_result_is_a_failure_even_with_code_zero(agent: Agent) -> None:
    for code in (0, 5):
        ended = agent.run_function(lambda code=code: os._exit(code))
        assert isinstance(ended.error, NonZeroExit)
        assert ended.exit.exit_code == code


def test_a_crash_is_told_as_its_signal(agent: Agent) -> None:
    ended = agent.run_function(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert isinstance(ended.error, Signaled)
    assert (ended.exit.exit_code, ended.exit.signal) == (139, signal.SIGSEGV)
    assert "Segmentation fault" in ended.err  # faulthandler shows where it was


def test_a_memory_error_is_out_of_memory(agent: Agent) -> None:
    ended = agent.run_function(lambda: bytearray(1 << 60))
    assert isinstance(ended.error, OOM)


def test_a_coroutine_function_is_run_to_its_value(agent: Agent) -> None:
    async def body() -> str:
        await asyncio.sleep(0)
        return "done"

    assert agent.run_function(body).value() == "done"


def test_the_body_runs_on_the_main_thread_with_default_signals(agent: Agent) -> None:
    def body() -> tuple[bool, bool]:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        heard = []
        signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
        signal.pause()
        return threading.current_thread() is threading.main_thread(), bool(heard)

    assert agent.run_function(body).value() == (True, True)


def test_a_body_may_use_a_process_pool(agent: Agent) -> None:
    def body() -> list[int]:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, -3])

    assert agent.run_function(body).value() == [1, 2, 3]


def test_nothing_of_one_job_is_left_for_the_next(agent: Agent) -> None:
    def spoil() -> None:
        import json

        os.environ["SPOILED"] = "1"
        json.spoiled = True  # type: ignore[attr-defined]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.chdir("/")

    def look() -> tuple[bool, bool, bool, bool]:
        import json

        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return "SPOILED" in os.environ, hasattr(json, "spoiled"), ignored, str(Path.cwd()) == "/"

    agent.run_function(spoil)
    assert agent.run_function(look).value() == (False, False, False, False)


def test_jobs_do_not_share_random_numbers(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["numpy.random"])

    def draw() -> tuple[float, float]:
        import numpy as np

        return random.random(), float(np.random.rand())

    first, second = agent.run_function(draw).value(), agent.run_function(draw).value()
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_our_modules_are_not_in_the_way_of_the_users(agent: Agent) -> None:
    names = agent.run_function(lambda: [n for n in sys.modules if n.startswith("firepool")]).value()
    assert names == []


def test_a_function_by_import_path_needs_no_payload(agent: Agent) -> None:
    entry = {**agent.entry(len, [(("abc",), {})]), "payload": None, "import_path": "builtins:len", "python": "2.7"}
    assert agent.finish(agent.begin(function=entry)).value() == 3


def test_an_import_path_that_is_not_there_is_the_users_error(agent: Agent) -> None:
    entry = {**agent.entry(len, [((), {})]), "payload": None, "import_path": "no_such_module:f"}
    ended = agent.finish(agent.begin(function=entry))
    assert isinstance(ended.error, UserError)
    assert ended.error.details["type"] == "ModuleNotFoundError"


def test_another_python_minor_is_refused_before_anything_runs(agent: Agent) -> None:
    entry = {**agent.entry(len, [((), {})]), "python": "3.8"}
    attempt = agent.new_id()
    agent.prepare(attempt)
    with pytest.raises(SerializationMismatch) as refused:
        agent.launch(attempt, function=entry)
    assert refused.value.details["client_python"] == "3.8"
    ended = agent.finish(attempt)
    assert isinstance(ended.error, SerializationMismatch)
    assert ended.exit.exit_code is None


def test_results_of_other_jobs_become_arguments(agent: Agent) -> None:
    import base64

    from firepool_wire.frames import Kind, pack

    first = agent.run_function(lambda: [1, 2])
    frames = b"".join(pack(f.kind, f.payload) for f in first.frames if f.kind is Kind.RESULT)
    import cloudpickle

    from firepool_wire import codec

    entry = agent.entry(lambda xs, y: (xs, y), [])
    packed = codec.pack_args([(("REF", 3), {})], cloudpickle.dumps, lambda v: 0 if v == "REF" else None)
    entry["args"] = base64.b64encode(packed).decode()
    attempt = agent.begin(function=entry, depends=[base64.b64encode(frames).decode()])
    assert agent.finish(attempt).value() == ([1, 2], 3)


# -- maps -----------------------------------------------------------------------------------------------------------


def test_a_map_delivers_every_item_in_its_own_process(agent: Agent) -> None:
    ended = agent.run_map(lambda x: (x * x, os.getpid()), list(range(8)))
    values = [ended.value(i) for i in range(8)]
    assert [v[0] for v in values] == [x * x for x in range(8)]
    assert len({v[1] for v in values}) == 8
    assert (ended.exit.exit_code, ended.error) == (0, None)


def test_a_crashing_item_fails_alone(agent: Agent) -> None:
    def body(x: int) -> int:
        if x == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if x == 2:
            os._exit(9)
        if x == 3:
            raise ValueError(x)
        return x

    ended = agent.run_map(body, list(range(5)))
    assert [status for _, status, _ in ended.items] == [
        ItemStatus.VALUE,
        *[ItemStatus.ERROR] * 3,
        ItemStatus.VALUE,
    ]
    for index, kind in ((1, Signaled), (2, NonZeroExit), (3, UserError)):
        with pytest.raises(kind):
            ended.value(index)
    assert ended.value(4) == 4
    assert ended.error is None


def test_an_item_cannot_spoil_the_next_one(agent: Agent) -> None:
    def body(x: int) -> tuple[bool, bool]:
        import json

        seen = "SPOILED" in os.environ, hasattr(json, "spoiled")
        os.environ["SPOILED"] = "1"
        json.spoiled = True  # type: ignore[attr-defined]
        return seen

    ended = agent.run_map(body, [0, 1])
    assert [ended.value(i) for i in (0, 1)] == [(False, False), (False, False)]


def test_an_item_whose_child_keeps_its_pipe_open_still_ends(agent: Agent) -> None:
    def body(x: int) -> int:
        if os.fork() == 0:
            signal.pause()
        os._exit(4)

    ended = agent.run_map(body, [0])
    with pytest.raises(NonZeroExit):
        ended.value(0)


# -- generators -----------------------------------------------------------------------------------------------------


def test_a_generator_delivers_each_value_as_it_comes(agent: Agent) -> None:
    def counting(n: int) -> Iterator[int]:
        yield from range(n)

    ended = agent.run_generator(counting, 3)
    assert [ended.value(i) for i in range(3)] == [0, 1, 2]
    assert ended.items[-1][1] is ItemStatus.STOP


def test_a_generator_that_raises_keeps_what_it_had_yielded(agent: Agent) -> None:
    def breaking() -> Iterator[int]:
        yield 1
        raise RuntimeError("torn")

    ended = agent.run_generator(breaking)
    assert ended.value(0) == 1
    assert isinstance(ended.error, UserError)


def test_an_async_generator_is_one_too(agent: Agent) -> None:
    async def counting():  # type: ignore[no-untyped-def]
        for n in range(2):
            await asyncio.sleep(0)
            yield n

    ended = agent.run_generator(counting)
    assert [ended.value(i) for i in range(2)] == [0, 1]


# -- commands -------------------------------------------------------------------------------------------------------


def test_a_command_ends_with_its_code(agent: Agent) -> None:
    ended = agent.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (ended.out, ended.err, ended.exit.exit_code) == ("out\n", "err\n", 3)
    assert isinstance(ended.error, NonZeroExit)


def test_a_command_that_is_not_there_ends_as_in_a_shell(agent: Agent) -> None:
    ended = agent.run(["no-such-command"])
    assert ended.exit.exit_code == 127
    assert "no-such-command: not found" in ended.err


def test_a_command_finds_the_pods_python_and_a_closed_stdin(agent: Agent) -> None:
    ended = agent.run(["python", "-c", "import sys; print(sys.executable); print(repr(sys.stdin.read()))"])
    assert ended.out.splitlines() == [sys.executable, "''"]


def test_items_do_not_print_what_their_parent_had_not_flushed(agent: Agent) -> None:
    class Noisy:
        def __reduce__(self) -> tuple[object, ...]:
            return eval, ("__import__('sys').stdout.write('once')",)

    noisy = Noisy()
    ended = agent.run_map(lambda x: (x, noisy) and x, [1, 2, 3, 4])
    assert [ended.value(i) for i in range(4)] == [1, 2, 3, 4]
    assert ended.out == "once"


def test_items_draw_different_random_numbers(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(preload=["random"])
    ended = agent.run_map(lambda x: random.random(), list(range(6)))
    assert len({ended.value(i) for i in range(6)}) == 6


def test_hooks_of_the_users_run_in_items_too(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()

    class Hook:
        def __reduce__(self) -> tuple[object, ...]:
            code = (
                "__import__('os').register_at_fork(after_in_child=lambda: __import__('os').environ.update(HOOKED='1'))"
            )
            return eval, (code,)

    hook = Hook()
    ended = agent.run_map(lambda x: (hook, os.environ.get("HOOKED"))[1], [1, 2])
    assert [ended.value(i) for i in range(2)] == ["1", "1"]


def test_threads_of_an_item_work_and_know_who_they_are(agent: Agent) -> None:
    def body(x: int) -> tuple[bool, bool, list[int]]:
        done: list[int] = []
        threads = [threading.Thread(target=done.append, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        main = threading.main_thread()
        return main is threading.current_thread(), main.native_id == os.getpid(), sorted(done)

    for value in (agent.run_map(body, [0]).value(), agent.run_function(body, 0).value()):
        assert value == (True, True, [0, 1, 2, 3])
