"""Who is next: priority, then first submission; who cannot be placed is skipped without looking at everybody."""

import time

from hypothesis import given
from hypothesis import strategies as st

from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.queue import PoolQueue
from firepool_broker.core.quota import Quota
from firepool_broker.core.racks import PoolRecord
from tests.builders import a_pool, an_ask

POOL = PoolRecord(a_pool())
QUOTA = Quota()


def a_job(name: str, **fields: object) -> JobRecord:
    ask = an_ask(name, **fields)  # type: ignore[arg-type]
    return JobRecord(ask, POOL, QUOTA.of(ask.caller))


def drain(queue: PoolQueue, supply: int = 99) -> list[str]:
    """Names in the order in which idle pods would be given to them."""
    order = []
    while (job := queue.first(supply)) is not None:
        order.append(job.id)
        queue.remove(job)
    return order


def test_priority_goes_before_first_submission() -> None:
    queue = PoolQueue()
    for name, priority, at in (("late", 0, 2.0), ("early", 0, 1.0), ("urgent", 5, 3.0)):
        queue.push(a_job(name, priority=priority, submitted_at=at), None)
    assert drain(queue) == ["urgent", "early", "late"]


def test_a_requeued_job_keeps_its_first_submission_order() -> None:
    queue = PoolQueue()
    old = a_job("old", submitted_at=1.0)
    queue.push(old, None)
    queue.remove(old)
    for at in (2.0, 3.0):
        queue.push(a_job(f"at{at}", caller="bob", submitted_at=at), None)
    queue.push(old, None)
    assert drain(queue) == ["old", "at2.0", "at3.0"]


def test_s9_a_gang_that_does_not_fit_is_skipped() -> None:
    queue = PoolQueue()
    queue.push(a_job("gang", pods=4, submitted_at=1.0), None)
    queue.push(a_job("small", submitted_at=2.0), None)
    assert queue.first(3) is not None and queue.first(3).id == "small"  # type: ignore[union-attr]
    assert queue.first(4) is not None and queue.first(4).id == "gang"  # type: ignore[union-attr]


def test_a_parked_caller_is_skipped_until_it_comes_back() -> None:
    queue = PoolQueue()
    full = a_job("full", caller="full", submitted_at=1.0)
    queue.push(full, None)
    queue.push(a_job("other", submitted_at=2.0), None)
    lane = full.lane
    assert lane is not None
    queue.park(lane)
    assert queue.first(9).id == "other"  # type: ignore[union-attr]
    queue.push(a_job("full2", caller="full", submitted_at=0.5), None)
    assert queue.first(9).id == "other"  # type: ignore[union-attr]
    queue.unpark(lane)
    assert drain(queue) == ["full2", "full", "other"]


def test_a_lane_that_was_set_aside_comes_back() -> None:
    queue = PoolQueue()
    first = a_job("first", submitted_at=1.0)
    queue.push(first, None)
    queue.push(a_job("second", caller="bob", submitted_at=2.0), None)
    lane = first.lane
    assert lane is not None and queue.first(1) is first
    queue.set_aside(lane)
    assert queue.first(1).id == "second"  # type: ignore[union-attr]
    queue.restore(lane)
    assert queue.first(1) is first


def test_single_use_jobs_are_another_kind() -> None:
    queue = PoolQueue()
    queue.push(a_job("own", single_use=True, submitted_at=1.0), None)
    assert queue.first(9) is None
    assert queue.first(9, single_use=True).id == "own"  # type: ignore[union-attr]
    assert (queue.warm_pods, queue.single_use_pods, queue.jobs) == (0, 1, 1)


def test_an_empty_lane_is_forgotten() -> None:
    queue = PoolQueue()
    job = a_job("only", pods=2)
    queue.push(job, None)
    queue.remove(job)
    assert not queue.lanes and not queue.by_caller and not queue.pods_by_caller
    assert (queue.jobs, queue.warm_pods) == (0, 0)


jobs_in = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 2), st.integers(0, 9), st.booleans()),
    max_size=40,
)


@given(jobs_in, st.integers(1, 3))
def test_the_first_is_what_a_scan_of_all_would_find(rows: list[tuple[str, int, int, int, bool]], supply: int) -> None:
    queue = PoolQueue()
    waiting: list[JobRecord] = []
    for number, (caller, pods, priority, at, drop) in enumerate(rows):
        job = a_job(f"j{number}", caller=caller, pods=pods, priority=priority, submitted_at=float(at))
        queue.push(job, None)
        waiting.append(job)
        if drop and waiting:
            queue.remove(waiting.pop(at % len(waiting)))
    while True:
        fits = [job for job in waiting if job.pods <= supply]
        expected = min(fits, key=lambda j: (-j.ask.priority, j.ask.submitted_at, j.arrival), default=None)
        assert queue.first(supply) is expected
        if expected is None:
            break
        queue.remove(expected)
        waiting.remove(expected)
    assert queue.jobs == len(waiting)


def test_heaps_do_not_grow_with_jobs_that_come_and_go() -> None:
    queue = PoolQueue()
    queue.push(a_job("blocker", pods=9, submitted_at=0.0), None)
    for number in range(20_000):
        job = a_job(f"j{number}", caller="bob", pods=9, submitted_at=1.0 + number)
        queue.push(job, None)
        queue.remove(job)
    entries = sum(len(order) for order in queue._orders.values())
    assert entries < 5_000


def test_a_hundred_thousand_waiting_jobs_do_not_slow_the_next_one() -> None:
    queue = PoolQueue()
    for number in range(100_000):
        queue.push(a_job(f"j{number}", caller=f"c{number % 1000}", submitted_at=float(number)), None)
    started = time.process_time()
    for _ in range(1_000):
        job = queue.first(1)
        assert job is not None
        queue.remove(job)
    assert (time.process_time() - started) / 1_000 < 0.0005
