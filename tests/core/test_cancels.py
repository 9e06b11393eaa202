"""Cancelling in every phase, and the deadlines that ask for it (spec §2; S26, S47)."""

import pytest

from firepool_broker.core.effects import (
    AbandonLease,
    CommitEnd,
    DeletePod,
    LaunchAttempt,
    RecordCancel,
    ResetPod,
    StopAttempt,
)
from firepool_broker.core.events import CancelRequested, ClientRenewed
from firepool_broker.core.ids import JobId, PodName
from firepool_wire.words import JobState, PodState
from tests.builders import a_failure, a_pool, an_ask
from tests.core.world import World


def cancel(world: World, job: str = "j", code: str = "Cancelled") -> None:
    world.send(CancelRequested(JobId(job), a_failure(code), "ann"))


def queued(**fields: object) -> World:
    """A world with job j waiting behind somebody else's."""
    world = World([a_pool(ceiling=1)])
    world.submit(an_ask("other", caller="bob"))
    world.settle()
    world.submit(an_ask("j", **fields))  # type: ignore[arg-type]
    world.settle()
    assert world.row("j").state is JobState.QUEUED
    return world


def running(**fields: object) -> World:
    world = World([a_pool()])
    world.submit(an_ask("j", **fields))  # type: ignore[arg-type]
    world.settle()
    return world


def test_a_waiting_job_is_cancelled_at_once() -> None:
    world = queued()
    cancel(world)
    world.do("write")
    assert world.row("j").state is JobState.CANCELLED
    assert world.row("j").exit is None
    world.run_out()
    assert world.row("other").state is JobState.SUCCEEDED


def test_a_job_whose_row_is_still_on_its_way_is_cancelled_behind_it() -> None:
    world = World([a_pool(ceiling=1)])
    world.submit(an_ask("j"))
    cancel(world)
    world.settle()
    assert world.accepted[JobId("j")] is JobState.QUEUED or JobId("j") in world.accepted
    assert world.row("j").state is JobState.CANCELLED


def test_a_claimed_job_that_nobody_stored_is_refused() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    cancel(world)
    assert world.refused[JobId("j")].code == "Cancelled"
    assert len(world.of(AbandonLease)) == 1 and JobId("j") not in world.rows
    assert set(world.states().values()) == {PodState.IDLE}


def test_a_cancel_during_the_commit_waits_for_its_answer_and_launches_nothing() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    world.do("prepare")
    cancel(world)
    assert JobId("j") not in world.rows
    world.do("write")
    assert not world.of(LaunchAttempt) and len(world.of(ResetPod)) == 1
    assert not world.of(CommitEnd), "not before the reset proved it"
    world.settle()
    assert world.row("j").state is JobState.CANCELLED
    assert world.accepted[JobId("j")] is JobState.RUNNING


def test_a_cancel_during_a_commit_that_is_lost_leaves_nothing() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    world.do("prepare")
    cancel(world)
    world.do("write", "fail")
    assert world.refused[JobId("j")].code == "Cancelled" and JobId("j") not in world.rows


def test_a_running_job_is_cancelled_only_when_its_process_tree_is_proven_gone() -> None:
    world = running()
    cancel(world)
    assert len(world.of(RecordCancel)) == len(world.of(StopAttempt)) == 1
    world.do("write")
    assert world.row("j").state is JobState.RUNNING and world.row("j").cancel_requested
    world.do("stop")
    assert not world.of(CommitEnd)
    world.do("reset")
    world.do("write")
    assert world.row("j").state is JobState.CANCELLED
    assert world.row("j").exit is not None and world.row("j").exit.exit_code == 143


def test_a_cancelled_job_on_an_unclean_pod_waits_for_the_pods_end() -> None:
    world = running()
    cancel(world)
    world.do("write")
    world.do("stop")
    world.do("reset", "fail")
    assert not world.of(CommitEnd) and len(world.of(DeletePod)) == 1
    world.do("delete")
    world.do("write")
    assert world.row("j").state is JobState.CANCELLED


def test_a_job_that_was_done_before_the_stop_came_has_succeeded() -> None:
    world = running()
    cancel(world)
    world.do("end")
    world.settle()
    assert world.row("j").state is JobState.SUCCEEDED


def test_a_stop_that_nobody_confirms_ends_with_the_pod() -> None:
    world = running()
    cancel(world)
    world.do("write")
    world.do("stop", "fail")
    world.advance(59.0)
    assert not world.of(DeletePod)
    world.advance(2.0)
    assert len(world.of(DeletePod)) == 1 and not world.of(CommitEnd)
    world.do("delete")
    world.do("write")
    assert world.row("j").state is JobState.CANCELLED


def test_a_cancelled_job_is_not_retried() -> None:
    world = running(max_retries=3)
    cancel(world)
    world.settle()
    assert world.row("j").state is JobState.CANCELLED


def test_a_cancel_while_a_requeue_is_written_ends_the_job_instead() -> None:
    world = running(max_retries=1)
    world.do("end", "fail")
    cancel(world)
    world.settle()
    assert (world.row("j").state, world.row("j").retry_count) == (JobState.CANCELLED, 1)


def test_the_first_of_two_cancels_counts() -> None:
    world = running()
    cancel(world, code="ClientGone")
    cancel(world, code="Cancelled")
    world.settle()
    failure = world.row("j").failure
    assert failure is not None and failure.code == "ClientGone"
    assert len(world.of(StopAttempt)) == 1


def test_another_reason_than_a_cancel_fails_the_job() -> None:
    world = running()
    cancel(world, code="PolicyViolation")
    world.settle()
    assert world.row("j").state is JobState.FAILED


def test_a_cancel_of_an_unknown_job_is_nothing() -> None:
    world = World([a_pool()])
    cancel(world, "nobody")
    assert not world.of(CommitEnd)


# -- deadlines ------------------------------------------------------------------------------------------------------


def failed_with(world: World, code: str) -> bool:
    failure = world.row("j").failure
    return world.row("j").state is JobState.FAILED and failure is not None and failure.code == code


def test_a_job_that_waits_too_long_times_out_with_its_blocker() -> None:
    world = queued(queue_timeout_s=10.0)
    world.advance(9.9)
    assert world.row("j").state is JobState.QUEUED
    world.advance(0.2)
    world.do("write")
    assert failed_with(world, "QueueTimeout")
    assert dict(world.row("j").failure.details)["blocked_by"] == "pool_at_ceiling"  # type: ignore[union-attr]


def test_an_attempt_whose_first_instruction_does_not_come_is_stopped() -> None:
    world = World([a_pool(start_timeout_s=30.0)])
    world.submit(an_ask("j"))
    while not any(work.kind == "launch" for work in world.work):
        assert world.write("ok") or world.do("create") or world.do("prepare")
    world.do("launch")
    world.advance(31.0)
    assert len(world.of(StopAttempt)) == 1
    world.do("stop")
    world.settle()
    assert failed_with(world, "StartTimeout")


def test_the_run_time_out_is_a_backstop_behind_the_agents_own() -> None:
    world = running(run_timeout_s=10.0)
    world.advance(39.0)
    assert not world.of(StopAttempt)
    world.advance(2.0)
    assert len(world.of(StopAttempt)) == 1
    world.do("stop")
    world.settle()
    assert failed_with(world, "RunTimeout")


@pytest.mark.parametrize("phase", ["waiting", "running"])
def test_a_job_without_a_client_is_ended(phase: str) -> None:
    world = (queued if phase == "waiting" else running)(client_lease_s=20.0)
    world.advance(15.0)
    world.send(ClientRenewed((JobId("j"),)))
    world.advance(15.0)
    assert world.row("j").state in (JobState.QUEUED, JobState.RUNNING)
    assert not world.of(StopAttempt)
    world.advance(6.0)
    world.settle()
    assert world.row("j").state is JobState.CANCELLED
    assert world.row("j").failure.code == "ClientGone"  # type: ignore[union-attr]


def test_a_silent_pod_is_not_a_failed_job() -> None:
    world = running()
    pod = PodName(world.row("j").pods[0])
    for _ in range(2):
        world.unreachable(pod)
    world.advance(100.0)
    assert world.row("j").state is JobState.RUNNING and not world.of(DeletePod)
    assert world.engine.job_view(JobId("j")).unreachable == (pod,)  # type: ignore[union-attr]
    world.unreachable(pod)
    world.advance(31.0)
    assert len(world.of(DeletePod)) == 1
    assert world.row("j").state is JobState.RUNNING, "S47 nothing is re-queued before the pod's verified end"
    world.do("delete")
    world.settle()
    assert (world.row("j").state, world.row("j").infra_retries) == (JobState.RUNNING, 1)
