"""Maps: many calls in few jobs, results and failures each in their place."""

import os

import pytest

import firepool
from firepool import errors
from firepool_ray._map import DEPTH, FIRST_CHUNK, Plan
from tests.sdk.fake_broker import FakeBroker, until


@firepool.remote
def square(x: int) -> int:
    return x * x


@firepool.remote
def judge(x: int) -> int:
    import os
    import signal

    if x == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if x == 2:
        raise ValueError("two")
    if x == 3:
        os._exit(0)
    return x


def test_results_come_in_the_order_of_the_arguments(connected: FakeBroker) -> None:
    results = square.map(range(40))
    assert len(results) == 40
    assert list(results) == [x * x for x in range(40)]
    assert len(connected.jobs) < 40, "many calls travel in one job"


def test_an_empty_map_needs_no_broker() -> None:
    assert list(square.map([])) == [] and not firepool.is_initialized()


def test_starmap_spreads_arguments(connected: FakeBroker) -> None:
    @firepool.remote
    def minus(a: int, b: int) -> int:
        return a - b

    assert list(minus.starmap([(3, 1), (5, 2)])) == [2, 3]


def test_each_call_runs_in_a_process_of_its_own(connected: FakeBroker) -> None:
    @firepool.remote
    def pid(x: int) -> int:
        import os

        return os.getpid()

    assert len(set(pid.map(range(6), chunk=6))) == 6
    assert len(connected.jobs) == 1


def test_a_crashed_item_fails_alone(connected: FakeBroker) -> None:
    found = list(judge.map(range(5), chunk=5, return_exceptions=True))
    assert found[0] == 0 and found[4] == 4
    assert isinstance(found[1], errors.Signaled) and found[1].details["signal"] == 11
    assert isinstance(found[2], ValueError) and isinstance(found[2], firepool.TaskError)
    assert isinstance(found[3], errors.NonZeroExit)
    assert not any(firepool.is_infra(e) for e in found[1:4])  # type: ignore[arg-type]


def test_the_first_failure_is_raised_and_the_rest_cancelled(connected: FakeBroker) -> None:
    connected.hold()
    results = judge.map([2, 4, 4, 4], chunk=1, concurrency=1)
    connected.release()
    with pytest.raises(ValueError):
        next(results)
    until(lambda: all(job.state in ("FAILED", "CANCELLED", "SUCCEEDED") for job in connected.jobs.values()))
    assert len(connected.jobs) < 4


def test_unordered_results_come_as_they_are_ready(connected: FakeBroker) -> None:
    assert sorted(square.map(range(10), order=False, chunk=2)) == [x * x for x in range(10)]


def test_concurrency_bounds_the_jobs_in_flight(connected: FakeBroker) -> None:
    connected.hold()
    results = square.map(range(10), chunk=1, concurrency=2)
    until(lambda: len(connected.jobs) == 2)
    connected.release()
    assert list(results) == [x * x for x in range(10)]


def test_a_call_lost_to_the_infrastructure_is_made_again_once(connected: FakeBroker) -> None:
    connected.doom["tests_flaky"] = [errors.HostLost("gone")]
    flaky = square.options(name="tests_flaky")
    assert list(flaky.map([1, 2, 3], chunk=3)) == [1, 4, 9]
    assert [job.state for job in connected.jobs.values()] == ["FAILED", "SUCCEEDED"]


def test_what_stays_lost_is_an_error_or_nothing(connected: FakeBroker) -> None:
    def doomed() -> "firepool.RemoteFunction[[int], int]":
        connected.doom["doomed"] = [errors.HostLost("gone") for _ in range(4)]
        return square.options(name="doomed")

    with pytest.raises(errors.HostLost):
        list(doomed().map([1, 2], chunk=2))
    assert list(doomed().map([1, 2], chunk=2, on_infra="none")) == [None, None]
    with pytest.raises(errors.HostLost):
        list(doomed().map([1, 2], chunk=2, on_infra="raise", return_exceptions=True))
    lost = list(doomed().map([1, 2], chunk=2, return_exceptions=True))
    assert all(firepool.is_infra(e) for e in lost)  # type: ignore[arg-type]


def test_chunks_grow_with_what_is_learned_and_shrink_towards_the_end(connected: FakeBroker) -> None:
    results = square.options(name="fresh").map(range(300))
    assert list(results) == [x * x for x in range(300)]
    sizes = [job.spec["entrypoint"]["function"].get("items", 1) for job in connected.jobs.values()]
    assert max(sizes[: 2 * DEPTH]) <= FIRST_CHUNK
    assert sizes[0] == FIRST_CHUNK and sizes[-1] < max(sizes)


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunk": "x"}, {"concurrency": 0}, {"on_infra": "maybe"}])
def test_an_impossible_plan_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Plan(**wrong)  # type: ignore[arg-type]


def test_wrong_arguments_are_found_before_anything_is_sent(connected: FakeBroker) -> None:
    with pytest.raises(TypeError):
        square.starmap([(1, 2)])
    assert not connected.jobs


async def test_a_map_is_an_async_iterator_too(connected: FakeBroker) -> None:
    assert [x async for x in square.map(range(5))] == [0, 1, 4, 9, 16]


def test_a_map_in_an_untrusted_pool_gives_plain_values(connected: FakeBroker) -> None:
    verdicts = list(judge.options(sku="wild").map([0, 2], return_exceptions=True))
    assert verdicts[0] == 0 and isinstance(verdicts[1], ValueError) and verdicts[1].cause is None


# -- generators --


@firepool.remote
def count(n: int, gate: str = "", fail_at: int = -1):  # type: ignore[no-untyped-def]
    import os
    import threading

    for i in range(n):
        while gate and i == 1 and not os.path.exists(gate):  # noqa: PTH110
            threading.Event().wait(0.01)
        if i == fail_at:
            raise ValueError(f"at {i}")
        yield i


def test_values_are_streamed_while_the_generator_runs(connected: FakeBroker, tmp_path: os.PathLike[str]) -> None:
    gate = f"{tmp_path}/gate"
    stream = count.remote(3, gate)
    assert next(stream) == 0
    assert connected.jobs["j1"].state == "RUNNING"
    open(gate, "w").close()  # noqa: PTH123
    assert list(stream) == [1, 2]


def test_an_error_surfaces_behind_the_last_good_value(connected: FakeBroker) -> None:
    stream = count.remote_gen(3, fail_at=2)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ValueError, match="at 2"):
        next(stream)


def test_a_broker_that_cannot_stream_gives_the_values_at_the_end(broker: FakeBroker) -> None:
    broker.version["capabilities"] = []
    firepool.init(broker.address)
    assert list(count.remote(3)) == [0, 1, 2]
    with pytest.raises(ValueError):
        list(count.remote(3, fail_at=1))


async def test_the_async_twin_of_a_generator(connected: FakeBroker) -> None:
    assert [x async for x in count.aio(3)] == [0, 1, 2]


def test_a_stream_can_be_cancelled(connected: FakeBroker, tmp_path: os.PathLike[str]) -> None:
    stream = count.remote(3, f"{tmp_path}/never")
    assert next(stream) == 0
    stream.cancel()
    with pytest.raises(errors.Cancelled):
        list(stream)
