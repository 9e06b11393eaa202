"""The runner's small rooms: ids, clock, timers, subscriptions, annotations, words."""

import asyncio
import time

import pytest

from firepool_broker.core.effects import MarkReleased, MarkRunning
from firepool_broker.core.ids import AttemptId, Caller, PodName, Queue, ReuseTag
from firepool_broker.shell.metrics import Metrics
from firepool_broker.shell.runner import clock as clock_room
from firepool_broker.shell.runner import marks
from firepool_broker.shell.runner.clock import Clock
from firepool_broker.shell.runner.intake import JobIds
from firepool_broker.shell.runner.wake import Wake
from firepool_broker.shell.runner.watch import Change, Subscription, Watch
from firepool_broker.shell.runner.words import error_of, failure_of
from firepool_wire.errors import TABLE, CapacityUnavailable, FirepoolError
from firepool_wire.words import JobState


def test_job_ids_are_distinct_and_sort_by_their_making() -> None:
    ids = JobIds()
    made = [ids.new(1_800_000_000.0 + n // 1000 / 1000) for n in range(20_000)]
    assert made == sorted(set(made))
    assert {len(j) for j in made} == {14}


def test_job_ids_sort_also_when_the_clock_stands_still() -> None:
    ids = JobIds()
    made = [ids.new(1_800_000_000.0) for _ in range(1000)]
    assert made == sorted(set(made))


def test_the_clock_follows_the_wall_forward_and_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    wall = time.time()
    before = clock.now()
    monkeypatch.setattr(clock_room.time, "time", lambda: wall - 3600)
    assert clock.follow_wall() == 0.0
    assert clock.now() >= before
    monkeypatch.setattr(clock_room.time, "time", lambda: wall + 3600)
    assert clock.follow_wall() == pytest.approx(3600, abs=5)
    assert clock.now() >= before + 3590


def test_a_monotonic_stamp_is_translated_to_the_same_moment() -> None:
    clock = Clock()
    assert clock.of_monotonic(time.monotonic()) == pytest.approx(clock.now(), abs=0.05)


async def test_only_the_earliest_wake_up_fires_and_never_early() -> None:
    clock, woken = Clock(), asyncio.Queue[float]()
    wake = Wake(clock, lambda: woken.put_nowait(clock.now()), lambda: None)
    began = clock.now()
    wake.at(began + 30)
    wake.at(began + 0.01)
    wake.at(began + 20)
    async with asyncio.timeout(5):
        at = await woken.get()
    assert 0.01 <= at - began < 5
    for n in range(20):  # also where the loop's whole milliseconds would round it down
        due = clock.now() + 0.0003 * n
        wake.at(due)
        async with asyncio.timeout(5):
            assert await woken.get() >= due
    wake.stop()


async def test_a_subscriber_hears_its_own_callers_changes_in_order() -> None:
    watch = Watch(Metrics())
    async with Subscription(watch, "alice") as mine:
        for n in range(3):
            watch.told("alice", Change(f"j{n}", JobState.RUNNING, n, None))
            watch.told("bob", Change("other", JobState.RUNNING, n, None))
        assert [c.job for c in await mine.take(1.0)] == ["j0", "j1", "j2"]
        assert await mine.take(0.001) == []
        assert not mine.overflowed()


async def test_a_slow_subscriber_loses_the_oldest_changes_and_is_told_once() -> None:
    watch = Watch(Metrics())
    async with Subscription(watch, "alice", max_behind=2) as mine:
        for n in range(5):
            watch.told("alice", Change(f"j{n}", JobState.RUNNING, n, None))
        assert [c.job for c in await mine.take(1.0)] == ["j3", "j4"]
        assert mine.overflowed()
        assert not mine.overflowed()


async def test_a_stream_ends_with_the_broker_and_waiters_get_nothing() -> None:
    watch = Watch(Metrics())
    async with Subscription(watch, "alice") as mine:
        waiting = asyncio.ensure_future(watch.terminal("j", 30))
        taking = asyncio.ensure_future(mine.take(30))
        await asyncio.sleep(0)
        watch.end()
        assert await taking == []
        assert mine.ended
        assert await waiting is None


def test_annotations_read_back_what_was_written() -> None:
    running = MarkRunning(
        AttemptId("j:0"), PodName("p"), Caller("alice"), Queue("q"), ReuseTag("tag"), retire_after=True
    )
    written = {k: v for k, v in marks.running(running).items() if v is not None}
    use = marks.last_use(written)
    assert use is not None
    assert (use.caller, use.queue, use.tag, use.retire_after, use.released_at) == ("alice", "q", "tag", True, None)
    released = marks.released(MarkReleased(PodName("p"), 12.5, 99.25))
    use = marks.last_use({**written, **{k: v for k, v in released.items() if v is not None}})
    assert use is not None
    assert (use.released_at, use.hold_deadline) == (12.5, 99.25)
    assert marks.last_use({}) is None
    assert marks.last_use({marks.PREFIX + "caller": "a", marks.PREFIX + "released-at": "soon"}) is not None


@pytest.mark.parametrize("cls", TABLE.values())
def test_every_error_of_the_table_survives_the_way_through_the_engine(cls: type[FirepoolError]) -> None:
    back = error_of(failure_of(cls("words", limit="3", retry_after_s=2.0)), "j1")
    assert type(back) is cls
    assert back.message == "words"
    assert back.details["limit"] == "3"
    assert back.retry_after_s == 2.0


def test_a_failure_keeps_whose_fault_it_is() -> None:
    failure = failure_of(CapacityUnavailable("full"))
    assert (failure.fault, failure.retryable) == (CapacityUnavailable.fault, True)
