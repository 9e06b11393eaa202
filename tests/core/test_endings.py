"""How attempts end: success, retries by rule, infrastructure re-queues, gangs, resets (spec §2–§4; S16, S40, S41, S47, F13)."""

import pytest

from firepool_broker.core.effects import CommitEnd, DeletePod, MarkReleased, PrepareLease, ResetPod, StopAttempt
from firepool_broker.core.events import AttemptEnded, EndCommitted, ResetClean
from firepool_broker.core.ids import AttemptId, JobId, PodName
from firepool_wire.words import JobState, PodState
from tests.builders import a_bad_exit, a_good_exit, a_pool, an_ask
from tests.core.world import World


def running(**fields: object) -> World:
    """A world with job j running."""
    world = World([a_pool()])
    world.submit(an_ask("j", **fields))  # type: ignore[arg-type]
    world.settle()
    assert world.row("j").state is JobState.RUNNING
    return world


def test_a_good_end_is_written_and_the_pod_is_reset_at_once_and_apart() -> None:
    world = running()
    world.do("end")
    assert len(world.of(CommitEnd)) == 1 and len(world.of(ResetPod)) == 1
    world.do("reset")
    assert set(world.states().values()) == {PodState.HELD}
    assert world.row("j").state is JobState.RUNNING
    world.do("write")
    assert world.row("j").state is JobState.SUCCEEDED
    assert world.row("j").exit == a_good_exit()
    assert world.engine.job_view(JobId("j")) is None


def test_the_end_carries_the_milestones_in_order() -> None:
    world = running()
    world.advance(1.0)
    world.do("end")
    [end] = world.of(CommitEnd)
    times = dict(end.times)  # type: ignore[attr-defined]
    expected = ["submitted", "accepted", "queued", "claimed", "prepared", "committed", "gate_open", "launched", "ended"]
    assert [name for name, _ in end.times if name in expected] == expected  # type: ignore[attr-defined]
    assert times["ended"] - times["first_instruction"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("retries", "retry_on", "code", "attempts"),
    [
        pytest.param(0, (), "NonZeroExit", 1, id="no retries"),
        pytest.param(2, (), "NonZeroExit", 3, id="F13.1: j:0, j:1, j:2, then FAILED"),
        pytest.param(2, ("OOM",), "NonZeroExit", 1, id="another class"),
        pytest.param(2, ("OOM", "NonZeroExit"), "NonZeroExit", 3, id="this class"),
    ],
)
def test_f13_retries_are_bounded_and_filtered_by_class(
    retries: int, retry_on: tuple[str, ...], code: str, attempts: int
) -> None:
    world = running(max_retries=retries, retry_on=retry_on)
    seen = []
    for _ in range(attempts):
        world.settle()
        seen.append(world.row("j").attempt)
        world.do("end", "fail")
        world.settle()
    row = world.row("j")
    assert (row.state, row.failure.code if row.failure else None) == (JobState.FAILED, code)
    assert seen == [f"j:{n}" for n in range(attempts)]
    assert (row.retry_count, row.infra_retries) == (attempts - 1, 0)


def test_a_lost_host_does_not_use_up_retries_but_raises_the_count() -> None:
    world = running(max_retries=0)
    for expected in (1, 2):
        world.send_all(world.die(PodName(world.row("j").pods[0])))
        world.settle()
        world.advance(1.0)
        world.settle()
        row = world.row("j")
        assert (row.state, row.retry_count, row.infra_retries) == (JobState.RUNNING, expected, expected)


def test_infrastructure_requeues_are_bounded_too() -> None:
    world = World([a_pool(max_infra_retries=2)])
    world.submit(an_ask("j"))
    for _ in range(3):
        world.settle()
        world.advance(20.0)
        world.settle()
        world.send_all(world.die(PodName(world.row("j").pods[0])))
    world.settle()
    row = world.row("j")
    assert row.state is JobState.FAILED
    assert row.failure is not None and row.failure.code == "HostLost"
    assert row.exit is None, "S51 no process exited"


def test_a_pod_that_was_killed_for_its_memory_is_the_users_oom() -> None:
    world = running()
    world.send_all(world.die(PodName(world.row("j").pods[0]), oom=True))
    world.settle()
    row = world.row("j")
    assert row.state is JobState.FAILED
    assert row.failure is not None and row.failure.code == "OOM"


def test_an_exit_record_counts_even_when_the_pod_dies_next() -> None:
    world = running(max_retries=0)
    pod = PodName(world.row("j").pods[0])
    world.do("end", "fail")
    world.send_all(world.die(pod))
    world.settle()
    assert world.row("j").failure == a_bad_exit().failure


def test_s40_a_failed_launch_of_one_pod_fails_and_resets_the_set() -> None:
    world = World([a_pool(min_count=2)])
    world.settle()
    world.submit(an_ask("j", pods=2))
    while not any(work.kind == "launch" for work in world.work):
        assert world.write("ok") or world.do("prepare")
    world.do("launch", "fail")
    assert len(world.of(StopAttempt)) == 1 and len(world.of(ResetPod)) == 1
    assert not world.of(CommitEnd), "not over before the reset proves that nothing of it runs"
    world.settle()
    row = world.row("j")
    assert row.state is JobState.FAILED
    assert row.failure is not None and row.failure.code == "RankFailed"
    assert len(world.of(ResetPod)) == 2


def test_a_failed_rank_stops_the_others_and_is_named() -> None:
    world = World([a_pool(min_count=3)])
    world.settle()
    world.submit(an_ask("j", pods=3))
    world.settle()
    last = world.row("j").pods[2]
    world.do("end", "fail", last)
    assert {effect.pod for effect in world.of(StopAttempt)} == set(world.row("j").pods) - {last}  # type: ignore[attr-defined]
    world.settle()
    row = world.row("j")
    assert row.state is JobState.FAILED and row.failure is not None
    assert dict(row.failure.details) == {"rank": "2", "code": "NonZeroExit"}
    assert row.exit is not None and row.exit.signal == 15, "rank 0's exit: the stop by us, coded as the signal"


def test_a_gang_succeeds_when_every_rank_did() -> None:
    world = World([a_pool(min_count=2)])
    world.settle()
    world.submit(an_ask("j", pods=2))
    world.settle()
    world.do("end")
    assert not world.of(CommitEnd)
    world.do("end")
    world.settle()
    assert world.row("j").state is JobState.SUCCEEDED
    assert list(world.states().values()) == [PodState.HELD, PodState.HELD]


def test_s16_an_unclean_reset_retires_the_pod_and_the_job_keeps_its_result() -> None:
    world = running()
    world.do("end")
    world.do("reset", "fail")
    world.settle()
    assert world.row("j").state is JobState.SUCCEEDED
    assert not world.states()


def test_a_settling_pod_is_held_but_claimable_only_when_its_bytes_are_free() -> None:
    world = running()
    world.do("end")
    world.do("reset", "settling")
    world.do("write")
    [pod] = world.engine.pod_views()
    assert pod.state is PodState.HELD
    world.submit(an_ask("k"))
    assert world.engine.job_view(JobId("k")).waiting  # type: ignore[union-attr]
    world.do("settle")
    assert world.engine.job_view(JobId("k")).pods == (pod.pod,)  # type: ignore[union-attr]


def test_s16_a_pod_whose_space_does_not_come_back_retires_and_the_job_goes_elsewhere() -> None:
    world = running()
    world.do("end")
    world.do("reset", "settling")
    world.do("write")
    [pod] = world.engine.pod_views()
    world.submit(an_ask("k"))
    world.do("settle", "fail")
    assert [effect.pod for effect in world.of(DeletePod)] == [pod.pod]  # type: ignore[attr-defined]
    world.settle()
    assert world.row("k").state is JobState.RUNNING
    assert pod.pod not in world.engine.job_view(JobId("k")).pods  # type: ignore[union-attr]


def test_s11_a_pod_retires_after_it_ran_once_across_a_tag() -> None:
    world = World([a_pool()])
    world.run(an_ask("a", tag="x"))
    world.run(an_ask("b", tag="y"))
    assert world.row("b").path is not None and world.row("b").path.value == "recycled"
    assert not world.states()


def test_s20_a_single_use_pod_is_deleted_at_its_release() -> None:
    world = World([a_pool()])
    world.run(an_ask("j", single_use=True))
    assert world.row("j").path is not None and world.row("j").path.value == "single_use"
    assert not world.of(ResetPod) and len(world.of(DeletePod)) == 1
    assert not world.states()


def test_an_end_that_was_not_written_is_written_again() -> None:
    world = running()
    world.do("end")
    world.do("write", "fail")
    assert world.row("j").state is JobState.RUNNING
    world.advance(0.3)
    world.do("write", "fail")
    world.advance(0.6)
    world.do("write")
    assert world.row("j").state is JobState.SUCCEEDED


def test_a_released_pod_may_serve_before_the_end_of_its_last_job_is_durable() -> None:
    world = running()
    [pod] = world.agents
    world.do("end")
    world.do("reset")
    world.submit(an_ask("k"))
    assert [effect.pod for effect in world.of(PrepareLease)][-1] == pod  # type: ignore[attr-defined]
    world.run_out()
    assert world.row("j").state is world.row("k").state is JobState.SUCCEEDED


def test_the_hold_clock_starts_at_the_proven_reset() -> None:
    world = running()
    world.do("end")
    world.advance(3.0)
    world.do("reset")
    [mark] = world.of(MarkReleased)
    assert (mark.released_at, mark.hold_deadline) == (world.now, world.now + 120.0)  # type: ignore[attr-defined]


def test_s41_answers_twice_or_too_late_change_nothing() -> None:
    world = running()
    [pod] = world.agents
    world.do("end")
    world.settle()
    effects = len(world.effects)
    attempt = AttemptId("j:0")
    for event in (AttemptEnded(attempt, pod, a_bad_exit()), EndCommitted(attempt), ResetClean(pod, attempt)):
        world.send(event)
    assert len(world.effects) == effects
    assert world.row("j").state is JobState.SUCCEEDED


def test_a_requeued_job_goes_before_later_ones() -> None:
    world = World([a_pool(ceiling=1)])
    world.submit(an_ask("old", caller="ann", max_retries=1, submitted_at=1.0))
    world.settle()
    world.submit(an_ask("young", caller="bob", submitted_at=2.0))
    world.settle()
    world.send_all(world.die(PodName(world.row("old").pods[0])))
    world.settle()
    assert world.row("old").state is JobState.RUNNING
    assert world.row("young").state is JobState.QUEUED
