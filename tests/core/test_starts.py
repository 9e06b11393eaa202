"""The saga of a start, and every way in which one of its steps may fail (spec §3, S3, S5, S6; audit 2.30, 2.31).

Rooms: `starts`, `rows`.
"""

from itertools import pairwise

import pytest

from firepool_broker.core.effects import (
    AbandonLease,
    Accept,
    CommitStart,
    DeletePod,
    LaunchAttempt,
    PrepareLease,
    SettleCommit,
    StoreJob,
)
from firepool_broker.core.events import Committed, CommitUnknown, LeasePrepared, Woke
from firepool_broker.core.ids import AttemptId, JobId, PodName
from firepool_wire.words import JobState, Path, PodState
from tests.builders import a_pool, an_ask
from tests.core.world import World


def a_warm_world(**knobs: object) -> World:
    """A world in which ann has one held pod."""
    world = World([a_pool(**knobs)])  # type: ignore[arg-type]
    world.run(an_ask("first"))
    world.effects.clear()
    return world


def test_a_warm_job_is_written_once_already_running() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    assert len(world.of(PrepareLease)) == 1 and not world.writes
    world.settle()
    [start] = world.of(CommitStart)
    assert start.insert and start.path is Path.WARM and not world.of(StoreJob)  # type: ignore[attr-defined]
    assert world.accepted[JobId("j")] is JobState.RUNNING
    assert world.row("j").version == 1


def test_s3_nothing_is_launched_before_the_commit() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.do("prepare")
    assert world.of(CommitStart) and not world.of(LaunchAttempt)
    world.do("write")
    assert world.of(LaunchAttempt)


def test_a_job_whose_lease_is_not_prepared_in_20_ms_is_stored_first() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.advance(0.019)
    assert not world.of(StoreJob)
    world.advance(0.002)
    assert [effect.state for effect in world.of(StoreJob)] == [JobState.QUEUED]  # type: ignore[attr-defined]
    world.settle()
    [start] = world.of(CommitStart)
    assert not start.insert and start.version == 1  # type: ignore[attr-defined]
    assert world.row("j").state is JobState.RUNNING and world.row("j").version == 2
    assert world.accepted[JobId("j")] is JobState.QUEUED


def test_s6_a_failed_prepare_retires_the_pods_and_uses_no_retry() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.do("prepare", "fail")
    assert len(world.of(DeletePod)) == 1
    world.settle()
    row = world.row("j")
    assert (row.state, row.retry_count, row.attempt) == (JobState.RUNNING, 0, "j:0")
    assert row.path is Path.NEW


def test_new_pods_that_cannot_prepare_are_replaced_ever_more_slowly_and_explain_says_so() -> None:
    """A broken image must not spin: pods that start and then cannot prepare slow their pool down as failed creations do."""
    world = World([a_pool()])
    world.submit(an_ask("j"))
    made = []
    for _ in range(6):
        for _ in range(20_000):
            if any(work.kind == "prepare" for work in world.work):
                break
            world.do("create") if any(work.kind == "create" for work in world.work) else world.advance(0.05)
        made.append(world.now)
        world.do("prepare", "fail")
        while any(work.kind == "delete" for work in world.work):
            world.do("delete")
    gaps = [later - earlier for earlier, later in pairwise(made)]
    assert gaps == sorted(gaps) and gaps[0] >= 1.0 and gaps[-1] >= 16.0, gaps
    told = world.engine.explain(JobId("j"), world.now)
    assert told is not None and told.blocked_by == "pods_failing" and "could not prepare" in told.sentence
    world.settle()
    world.advance(120.0)
    world.settle()
    assert world.row("j").state is JobState.RUNNING and world.row("j").retry_count == 0


def test_s6_one_failed_prepare_of_a_gang_retires_the_set_and_abandons_the_others() -> None:
    world = World([a_pool(min_count=3)])
    world.settle()
    world.submit(an_ask("j", pods=3))
    world.do("prepare")
    world.do("prepare", "fail")
    assert len(world.of(AbandonLease)) == 3 and len(world.of(DeletePod)) == 3
    world.run_out()
    assert world.row("j").state is JobState.SUCCEEDED and world.row("j").retry_count == 0


def test_s5_a_lost_commit_undoes_the_claim_exactly() -> None:
    world = a_warm_world()
    before = world.engine.pod_views()
    world.submit(an_ask("j", tag="other"))
    world.do("prepare")
    world.do("write", "fail")
    assert world.engine.pod_views() == before
    assert len(world.of(AbandonLease)) == 1
    world.do("write")
    assert world.accepted[JobId("j")] is JobState.QUEUED
    assert world.row("j").retry_count == 0


def test_a_lost_commit_is_tried_again_but_not_at_once() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.do("prepare")
    world.do("write", "fail")
    assert not world.do("prepare")
    world.advance(1.0)
    world.settle()
    assert world.row("j").state is JobState.RUNNING
    assert world.row("j").attempt == "j:0"


def test_s5_a_hold_is_not_extended_by_a_lost_commit() -> None:
    world = a_warm_world(caller_hold_s=10.0)
    [held] = world.engine.pod_views()
    world.advance(9.0)
    world.submit(an_ask("j"))
    world.do("prepare")
    world.advance(5.0)
    assert world.states()[held.pod] is PodState.ASSIGNED
    world.do("write", "fail")
    assert world.states()[held.pod] is PodState.RETIRING


@pytest.mark.parametrize(("way", "runs"), [("unknown", True), ("unknown_lost", False)])
def test_an_unknown_commit_is_read_back_before_anything_happens(way: str, runs: bool) -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.do("prepare")
    world.do("write", way)
    assert len(world.of(SettleCommit)) == 1
    world.send(CommitUnknown(AttemptId("j:0")))
    assert len(world.of(SettleCommit)) == 1, "it is being read back already"
    assert not world.of(LaunchAttempt) and not world.of(AbandonLease) and not world.of(Accept)
    assert set(world.states().values()) == {PodState.ASSIGNED}
    world.do("write")
    assert bool(world.of(LaunchAttempt)) is runs
    assert bool(world.of(AbandonLease)) is not runs
    world.run_out()
    assert world.row("j").state is JobState.SUCCEEDED and world.row("j").retry_count == 0


def test_a_pod_that_dies_before_the_commit_costs_the_job_nothing() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    [pod] = world.agents
    for event in world.die(pod):
        world.send(event)
    world.run_out()
    assert (world.row("j").state, world.row("j").retry_count) == (JobState.SUCCEEDED, 0)


def test_a_pod_that_dies_during_the_commit_is_an_infrastructure_requeue() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.do("prepare")
    [pod] = world.agents
    for event in world.die(pod):
        world.send(event)
    world.do("write")
    assert not world.of(LaunchAttempt)
    world.run_out()
    row = world.row("j")
    assert (row.state, row.retry_count, row.infra_retries) == (JobState.SUCCEEDED, 1, 1)


def test_s41_late_answers_of_an_old_attempt_change_nothing() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    [pod] = world.agents
    for event in world.die(pod):
        world.send(event)
    before = world.engine.job_view(JobId("j"))
    for event in (LeasePrepared(AttemptId("j:7"), pod), Committed(AttemptId("j:7")), Woke()):
        world.send(event)
    assert world.engine.job_view(JobId("j")) == before


def test_a_claim_goes_to_the_first_in_order_not_to_the_last_to_ask() -> None:
    world = World([a_pool(ceiling=1)])
    world.submit(an_ask("a", caller="ann", submitted_at=1.0))
    world.submit(an_ask("b", caller="bob", submitted_at=2.0))
    world.submit(an_ask("c", caller="cyd", submitted_at=3.0, priority=1))
    world.settle()
    assert world.row("c").state is JobState.RUNNING
    assert {world.row("a").state, world.row("b").state} == {JobState.QUEUED}


def test_an_unknown_pod_is_nobodys() -> None:
    world = a_warm_world()
    world.submit(an_ask("j"))
    world.send(LeasePrepared(AttemptId("j:0"), PodName("stranger")))
    assert not world.of(CommitStart)
