"""Functions as jobs: submitting, waiting, values and errors, as Ray's users expect them."""

import asyncio
import inspect
import os
import pickle
import sys
import threading
import time

import pytest

import firepool
from firepool import errors
from tests.sdk.fake_broker import FakeBroker, until


@firepool.remote
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@firepool.remote
def fail(text: str) -> None:
    raise ValueError(text)


@firepool.remote
def wait_for_ever() -> None:
    import threading

    threading.Event().wait()


class Odd(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code} {why}")
        self.code_given = code


@firepool.remote
def fail_oddly() -> None:
    raise Odd(7, "seven")


def test_a_call_comes_back(connected: FakeBroker) -> None:
    assert firepool.get(add.remote(1, b=2)) == 3


def test_a_list_comes_back_in_its_order(connected: FakeBroker) -> None:
    assert firepool.get([add.remote(n) for n in range(4)]) == [1, 2, 3, 4]
    assert firepool.get([]) == []


def test_submitting_never_waits_for_the_network(broker: FakeBroker) -> None:
    firepool.init(broker.address)
    firepool.get(add.remote(1))
    with broker.lock:  # no submission can be taken while we hold this
        started = time.monotonic()
        refs = [add.remote(n) for n in range(50)]
        assert time.monotonic() - started < 2.0
        assert not any(ref.job_id for ref in refs)
    for ref in refs:
        ref.cancel()


def test_what_gathers_while_a_request_is_in_flight_goes_as_one_batch(connected: FakeBroker) -> None:
    connected.hold()
    with connected.lock:
        refs = [add.remote(n) for n in range(20)]
        until(lambda: connected.count("POST", "/v1/jobs") == 1)
    until(lambda: len(connected.jobs) == 20)
    assert sum(connected.batches) >= 18 and connected.count("POST", "/v1/jobs") <= 3
    for ref in refs:
        ref.cancel()


def test_a_full_queue_raises_too_many_requests(broker: FakeBroker) -> None:
    firepool.init(broker.address, max_unsent=3)
    broker.hold()
    with broker.lock:
        with pytest.raises(errors.TooManyRequests, match="max_unsent"):
            for n in range(20):
                add.remote(n)


def test_a_full_queue_blocks_where_that_was_asked_for(broker: FakeBroker) -> None:
    firepool.init(broker.address, max_unsent=2, when_full="block")
    broker.hold()
    done = threading.Event()

    def submit() -> None:
        for n in range(6):
            add.remote(n)
        done.set()

    with broker.lock:
        threading.Thread(target=submit, daemon=True).start()
        assert not done.wait(0.3)
    assert done.wait(20)


def test_the_users_exception_is_itself_and_a_task_error(connected: FakeBroker) -> None:
    with pytest.raises(ValueError) as caught:
        firepool.get(fail.remote("bad"))
    error = caught.value
    assert isinstance(error, firepool.TaskError) and error.fault == "user" and not firepool.is_infra(error)
    assert isinstance(error.cause, ValueError) and error.args == (error.cause,)
    assert "raise ValueError(text)" in error.remote_traceback and "ValueError: bad" in str(error)
    assert isinstance(error.__cause__, firepool.RemoteTraceback) and "test_remote.py" in str(error.__cause__)
    assert error.job_id == "j1"


def test_an_exception_that_cannot_be_pickled_keeps_its_name_and_traceback(connected: FakeBroker) -> None:
    with pytest.raises(firepool.TaskError) as caught:
        firepool.get(fail_oddly.remote())
    assert "Odd" in caught.value.type_name and "7 seven" in str(caught.value)
    assert "fail_oddly" in caught.value.remote_traceback


def test_an_error_can_be_pickled_with_its_cause(connected: FakeBroker) -> None:
    with pytest.raises(ValueError) as caught:
        firepool.get(fail.remote("bad"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ValueError) and isinstance(again, firepool.TaskError)
    assert again.remote_traceback == caught.value.remote_traceback


def test_of_a_list_the_first_failure_is_raised_without_waiting_for_the_rest(connected: FakeBroker) -> None:
    slow = wait_for_ever.remote()
    with pytest.raises(ValueError):
        firepool.get([slow, fail.remote("x")])
    assert not slow.done()
    slow.cancel(wait=True)


def test_a_time_out_leaves_the_job_running(connected: FakeBroker) -> None:
    ref = wait_for_ever.remote()
    with pytest.raises(firepool.GetTimeoutError) as caught:
        firepool.get(ref, timeout=0.05)
    assert isinstance(caught.value, TimeoutError) and firepool.is_infra(caught.value)
    with pytest.raises(firepool.GetTimeoutError):
        firepool.get([ref], timeout=0)
    ref.cancel(wait=True)


def test_cancelling_a_running_job_ends_it(connected: FakeBroker) -> None:
    ref = wait_for_ever.remote()
    until(lambda: ref.state == "RUNNING")
    firepool.cancel(ref, wait=True)
    with pytest.raises(errors.Cancelled):
        ref.result()
    ref.cancel()  # twice is once


def test_a_job_that_was_not_sent_yet_is_cancelled_without_the_broker(connected: FakeBroker) -> None:
    connected.hold()
    with connected.lock:
        first = add.remote(1)
        until(lambda: connected.count("POST", "/v1/jobs") == 1)
        second = add.remote(2)
        second.cancel()
    with pytest.raises(errors.Cancelled, match="before it was sent"):
        second.result(20)
    connected.release()
    assert first.result() == 2
    assert len(connected.jobs) == 1


@pytest.mark.parametrize("wrong", [(1,), "x", None, [1]])
def test_get_takes_references_only(connected: FakeBroker, wrong: object) -> None:
    with pytest.raises(ValueError, match="reference"):
        firepool.get(wrong)  # type: ignore[call-overload]


def test_wait_splits_in_the_order_given(connected: FakeBroker) -> None:
    slow, quick, failing = wait_for_ever.remote(), add.remote(1), fail.remote("x")
    ready, rest = firepool.wait([slow, quick, failing], num_returns=2)
    assert ready == [quick, failing] and rest == [slow]
    ready, rest = firepool.wait([slow, quick, failing], num_returns=1)
    assert len(ready) == 1 and len(rest) == 2
    assert firepool.wait([slow], timeout=0.01) == ([], [slow])
    slow.cancel(wait=True)


def test_wait_refuses_what_makes_no_sense(connected: FakeBroker) -> None:
    ref = add.remote(1)
    with pytest.raises(ValueError, match="twice"):
        firepool.wait([ref, ref])
    with pytest.raises(ValueError, match="num_returns"):
        firepool.wait([ref], num_returns=2)
    with pytest.raises(TypeError):
        firepool.wait(ref)  # type: ignore[arg-type]
    assert firepool.wait([]) == ([], [])
    ref.result()


def test_as_completed_gives_the_quick_ones_first(connected: FakeBroker) -> None:
    slow, quick = wait_for_ever.remote(), add.remote(1)
    over = firepool.as_completed([slow, quick])
    assert next(over) == quick
    slow.cancel()
    assert next(over) == slow
    with pytest.raises(firepool.GetTimeoutError):
        next(firepool.as_completed([wait_for_ever.remote()], timeout=0.05))


def test_a_reference_as_argument_becomes_its_value(connected: FakeBroker) -> None:
    assert firepool.get(add.remote(add.remote(1), b=add.remote(2))) == 5  # type: ignore[arg-type]
    spec = connected.jobs["j3"].spec
    assert spec["entrypoint"]["function"]["depends"] == ["j1", "j2"]


def test_a_failed_argument_fails_the_call_with_the_same_type(connected: FakeBroker) -> None:
    with pytest.raises(ValueError):
        firepool.get(add.remote(fail.remote("no input")))  # type: ignore[arg-type]


def test_a_value_is_put_once_and_passed_to_many(connected: FakeBroker) -> None:
    put = firepool.put([1, 2])

    @firepool.remote
    def total(xs: list[int]) -> int:
        return sum(xs)

    assert firepool.get([total.remote(put), total.remote(put)]) == [3, 3]  # type: ignore[arg-type]
    assert firepool.get(put) == [1, 2]
    with pytest.raises(TypeError):
        firepool.put(put)


def test_large_arguments_and_results_go_through_the_blob_store(connected: FakeBroker) -> None:
    @firepool.remote
    def double(data: bytes) -> bytes:
        return data * 2

    data = os.urandom(1 << 20)
    assert firepool.get(double.remote(data)) == data * 2
    function = connected.jobs["j1"].spec["entrypoint"]["function"]
    assert "args" not in function and function["args_blob"] in connected.blobs


def test_a_large_argument_lets_small_jobs_overtake(connected: FakeBroker) -> None:
    @firepool.remote
    def size(data: bytes) -> int:
        return len(data)

    refs = [size.remote(os.urandom(1 << 20)), size.remote(b"x")]
    assert firepool.get(refs) == [1 << 20, 1]


def test_wrong_arguments_fail_where_the_call_is_written(connected: FakeBroker) -> None:
    with pytest.raises(TypeError, match="missing a required argument"):
        add.remote()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"add\.remote"):
        add(1)
    assert add.local(1) == 2


def test_an_argument_that_cannot_be_pickled_is_named(connected: FakeBroker) -> None:
    with pytest.raises(TypeError, match=r"argument 'b', a lock"):
        add.remote(1, b=threading.Lock())  # type: ignore[arg-type]


def test_a_function_that_cannot_be_pickled_names_the_culprit(connected: FakeBroker) -> None:
    lock = threading.Lock()

    @firepool.remote
    def uses_lock() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match="lock: TypeError"):
        uses_lock.remote()


def test_options_do_not_change_the_handle(connected: FakeBroker) -> None:
    named = add.options(lease_tag="t", labels={"a": "b"}, run_timeout_s=5)
    named.remote(1).result()
    add.remote(1).result()
    first, second = connected.jobs["j1"].spec, connected.jobs["j2"].spec
    assert first["lease_tag"] == "t" and first["labels"] == {"a": "b"} and first["run_timeout_s"] == 5
    assert "lease_tag" not in second and first["client_lease_s"] == 120


def test_only_what_differs_from_the_default_is_sent(connected: FakeBroker) -> None:
    add.remote(1).result()
    assert set(connected.jobs["j1"].spec) == {"entrypoint", "client_lease_s", "idempotency_key"}
    add.options(detach=True).remote(1).result()
    assert set(connected.jobs["j2"].spec) == {"entrypoint", "idempotency_key"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lease_tags", "lease_tag"), ("num_gpus", "sku="), ("runtime_env", "requirements="), ("xyz", "sku")],
)
def test_an_unknown_option_is_refused_with_what_to_write(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        firepool.remote(**{name: 1})  # type: ignore[call-overload]


async def test_the_async_twin_is_a_real_async_function(connected: FakeBroker) -> None:
    assert inspect.iscoroutinefunction(add.aio)
    assert add.aio.__name__ == "add" and add.aio.__doc__ == "Add two numbers."
    assert list(inspect.signature(add.aio).parameters) == ["a", "b"]
    assert await add.aio(1, b=4) == 5


async def test_awaiting_references(connected: FakeBroker) -> None:
    refs = [add.remote(n) for n in range(3)]
    with pytest.raises(ValueError):
        await fail.remote("x")
    assert await asyncio.gather(*refs) == [1, 2, 3]


async def test_cancelling_the_awaiting_task_cancels_the_job(connected: FakeBroker) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_for_ever.aio(), 0.2)
    await asyncio.to_thread(until, lambda: connected.jobs["j1"].state == "CANCELLED")


async def test_a_blocking_call_in_a_running_loop_warns(connected: FakeBroker) -> None:
    with pytest.warns(firepool.BlockingInEventLoopWarning, match="await") as seen:
        assert firepool.get(add.remote(1)) == 2
    assert seen[0].filename == __file__


def test_futures(connected: FakeBroker) -> None:
    assert add.remote(1).future().result(20) == 2
    assert isinstance(fail.remote("x").future().exception(20), ValueError)
    ref = wait_for_ever.remote()
    until(lambda: ref.state == "RUNNING")
    future = ref.future()
    assert future.cancel() and future.cancelled()
    until(lambda: connected.jobs["j3"].state == "CANCELLED")


def test_an_async_function_runs_to_its_end(connected: FakeBroker) -> None:
    @firepool.remote
    async def later(x: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return x

    assert firepool.get(later.remote(3)) == 3


def test_output_is_printed_with_a_prefix(broker: FakeBroker, capfd: pytest.CaptureFixture[str]) -> None:
    @firepool.remote
    def speak() -> None:
        print("hello from the pod")

    firepool.init(broker.address, log_to_driver=True)
    speak.remote().result()
    seen: list[str] = []
    until(lambda: (seen.append(capfd.readouterr().err), "hello from the pod" in "".join(seen))[1])
    assert "speak j1) hello from the pod" in "".join(seen)


def test_an_untrusted_pool_gives_plain_values_and_no_pickles(connected: FakeBroker) -> None:
    @firepool.remote(sku="wild")
    def plain() -> dict[str, float]:
        return {"score": 0.5}

    @firepool.remote(untrusted=True)
    def fancy() -> object:
        return object

    assert plain.remote().result() == {"score": 0.5}
    with pytest.raises(errors.ResultUnpicklable):
        fancy.remote().result()


def test_a_pickle_from_an_untrusted_job_is_never_loaded(connected: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker (or whoever forged the frames) says it is a value: the client itself refuses."""

    @firepool.remote(untrusted=True)
    def plain() -> int:
        return 1

    monkeypatch.setattr(connected, "_untrusted", lambda job: False)

    @firepool.remote(untrusted=True)
    def fancy() -> object:
        import re

        return re.compile("x")

    with pytest.raises(errors.ResultUnpicklable, match="untrusted"):
        fancy.remote().result()

    @firepool.remote(untrusted=True)
    def fails() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError) as caught:  # recognised by name among the builtins; nothing was unpickled
        fails.remote().result()
    assert caught.value.cause is None


def test_context_in_a_job(connected: FakeBroker) -> None:
    @firepool.remote
    def who() -> tuple[str | None, int, bool]:
        import firepool

        here = firepool.context()
        return here.job_id, here.world_size, here.cancelled

    assert who.remote().result() == ("j1", 1, False)
    assert not firepool.context().in_job


def test_jobs_inside_run_carry_its_name(connected: FakeBroker) -> None:
    with firepool.run("exp") as run:
        add.remote(1).result()
        assert run.status()["jobs"] == 1
    add.remote(1).result()
    assert connected.jobs["j1"].spec["run"] == "exp" and "run" not in connected.jobs["j2"].spec


def test_a_callers_own_key_makes_one_job(connected: FakeBroker) -> None:
    connected.hold()
    keyed = add.options(idempotency_key="once")
    first, second = keyed.remote(1), keyed.remote(1)
    with pytest.raises(errors.Conflict):
        keyed.remote(2)
    connected.release()
    assert first.result() == second.result() == 2
    assert keyed.remote(1).result() == 2
    assert len(connected.jobs) == 1 and connected.jobs["j1"].runs == 1


def test_a_function_runs_on_the_main_thread(connected: FakeBroker) -> None:
    @firepool.remote
    def alarm() -> str:
        import signal

        signal.signal(signal.SIGALRM, lambda *a: None)
        signal.alarm(0)
        return "ok"

    assert alarm.remote().result() == "ok"


def test_the_executor_is_one_of_concurrent_futures(connected: FakeBroker) -> None:
    def double(x: int) -> int:
        return 2 * x

    with firepool.Executor(lease_tag="e") as executor:
        assert executor.submit(double, 4).result() == 8
        assert list(executor.map(double, range(3))) == [0, 2, 4]
    with pytest.raises(RuntimeError):
        executor.submit(double, 1)


def test_a_python_that_cannot_read_the_function_is_found_before_anything_is_sent(broker: FakeBroker) -> None:
    broker.version["interpreters"][0] |= {"version": "3.9", "pickle": 5}
    firepool.init(broker.address)
    with pytest.raises(errors.SerializationMismatch) as caught:
        add.remote(1)
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "3.9" in str(caught.value) and mine in str(caught.value)
    assert caught.value.details["pools"][0]["version"] == "3.9" and not broker.jobs
