"""What is taken, what is refused at once, and what waits for the results of others (spec §2).

Rooms: `admission`, `configuring`, `queueing`, `reasons`.
"""

import pytest

from firepool_broker.core.effects import CreatePod, QueueJob, StoreJob
from firepool_broker.core.events import (
    CallerLimited,
    DependencyEnded,
    JobSubmitted,
    PodCreateFailed,
    PodReady,
    PoolsConfigured,
)
from firepool_broker.core.ids import Caller, JobId
from firepool_broker.core.pools import Pool
from firepool_wire.words import JobState
from tests.builders import a_failure, a_limit, a_pool, an_ask
from tests.core.world import World


@pytest.mark.parametrize(
    ("pool", "fields", "code", "limit"),
    [
        pytest.param(a_pool(), {"sku": "h100"}, "UnknownSku", None, id="no such pool"),
        pytest.param(a_pool(ceiling=2), {"pods": 3}, "CapacityUnavailable", "max_count", id="larger than the ceiling"),
        pytest.param(
            a_pool(gpus=8, max_count=12), {"pods": 2}, "CapacityUnavailable", "max_count", id="ceiling rounds down"
        ),
        pytest.param(a_pool(enabled=False), {}, "CapacityUnavailable", "pool_disabled", id="disabled"),
        pytest.param(a_pool(max_queue_length=0), {}, "CapacityUnavailable", "max_queue_length", id="queue full"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    pool: Pool, fields: dict[str, object], code: str, limit: str | None
) -> None:
    world = World([pool])
    world.submit(an_ask("j", **fields))  # type: ignore[arg-type]
    failure = world.refused[JobId("j")]
    assert failure.code == code
    assert dict(failure.details).get("limit") == limit
    assert not world.of(StoreJob) and not world.of(CreatePod)


def test_more_than_the_caller_may_ever_have_is_refused() -> None:
    world = World([a_pool()])
    world.send(CallerLimited(Caller("ann"), a_limit(pods=2)))
    world.submit(an_ask("j", pods=3))
    assert world.refused[JobId("j")].code == "QuotaExceeded"
    world.submit(an_ask("k", caller="bob", pods=3))
    assert JobId("k") not in world.refused


def test_a_queue_that_is_full_refuses_the_next() -> None:
    world = World([a_pool(ceiling=1, max_queue_length=2)])
    for number in range(5):
        world.submit(an_ask(f"j{number}", caller=f"c{number}"))
    assert sorted(world.refused) == ["j2", "j3", "j4"]


def test_the_same_submission_twice_is_one_job() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.send(JobSubmitted(an_ask("j")))
    world.run_out()
    assert len(world.of(StoreJob)) == 1


def test_a_job_that_could_not_be_stored_is_refused_and_forgotten() -> None:
    world = World([a_pool(ceiling=1)])
    world.submit(an_ask("j"))
    world.do("write", "fail")
    assert world.refused[JobId("j")].code == "StoreUnavailable"
    assert world.engine.job_view(JobId("j")) is None
    assert world.engine.pool_views()[0].queued_jobs == 0


def test_a_job_that_could_not_be_stored_gives_its_claim_back() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    world.advance(0.05)
    world.do("write", "fail")
    assert world.engine.pool_views()[0].idle == 1
    assert JobId("j") in world.refused


# -- isolation ------------------------------------------------------------------------------------------------------


def test_a_level_that_the_pools_pods_do_not_have_is_refused_and_never_lowered() -> None:
    world = World([a_pool()])
    world.submit(an_ask("early", isolation="namespaces"))
    [create] = world.of(CreatePod)
    world.send(PodReady(create.pod, (), "uid"))  # type: ignore[attr-defined]
    world.do("write")
    world.do("write")
    assert world.row("early").failure.code == "IsolationUnavailable"  # type: ignore[union-attr]
    world.submit(an_ask("late", isolation="namespaces"))
    assert world.refused[JobId("late")].code == "IsolationUnavailable"
    world.submit(an_ask("fits", isolation="uid"))
    assert JobId("fits") not in world.refused


def test_a_pod_weaker_than_its_pool_demands_serves_nobody() -> None:
    world = World([a_pool(isolation="uid")])
    world.submit(an_ask("j"))
    [create] = world.of(CreatePod)
    world.send(PodReady(create.pod, (), "portable"))  # type: ignore[attr-defined]
    world.do("write")
    world.do("write")
    assert world.row("j").failure.code == "IsolationUnavailable"  # type: ignore[union-attr]


def test_a_pool_that_can_make_no_pod_at_all_says_so() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.do("write")
    [create] = world.of(CreatePod)
    world.send(PodCreateFailed(create.pod, a_failure("IsolationUnavailable", "no user namespaces")))  # type: ignore[attr-defined]
    world.do("write")
    assert world.row("j").failure.message == "no user namespaces"  # type: ignore[union-attr]


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_a_job_is_pending_until_its_inputs_are_there() -> None:
    world = World([a_pool()])
    world.submit(an_ask("a"))
    world.settle()
    world.submit(an_ask("b", depends=(JobId("a"), JobId("elsewhere"))))
    world.settle()
    assert world.row("b").state is JobState.PENDING
    world.do("end")
    world.settle()
    assert world.row("b").state is JobState.PENDING
    world.send(DependencyEnded(JobId("b"), JobId("elsewhere"), None))
    world.settle()
    assert len(world.of(QueueJob)) == 1
    assert world.row("b").state is JobState.RUNNING
    assert world.row("b").version == 3


def test_a_failed_input_fails_the_job_with_its_error() -> None:
    world = World([a_pool()])
    world.submit(an_ask("a"))
    world.settle()
    world.submit(an_ask("b", depends=(JobId("a"),)))
    world.submit(an_ask("c", depends=(JobId("b"),)))
    world.settle()
    world.do("end", "fail")
    world.settle()
    for job in ("b", "c"):
        failure = world.row(job).failure
        assert world.row(job).state is JobState.FAILED
        assert failure is not None and failure.code == "NonZeroExit"
    assert not world.engine._state.dependents


def test_an_input_that_ended_twice_counts_once() -> None:
    world = World([a_pool()])
    world.submit(an_ask("b", depends=(JobId("x"),)))
    world.settle()
    for _ in range(2):
        world.send(DependencyEnded(JobId("b"), JobId("x"), None))
    world.run_out()
    assert world.row("b").state is JobState.SUCCEEDED


# -- operators ------------------------------------------------------------------------------------------------------


def test_jobs_of_a_pool_that_is_removed_are_told() -> None:
    world = World([a_pool(ceiling=1), a_pool("other")])
    for name in ("a", "b"):
        world.submit(an_ask(name, caller=name))
    world.settle()
    world.pools = (a_pool("other"),)
    world.send(PoolsConfigured(world.pools))
    world.settle()
    assert world.row("a").state is JobState.RUNNING, "running work is never killed to make room"
    assert world.row("b").failure.code == "CapacityUnavailable"  # type: ignore[union-attr]
    world.run_out()
    assert [view.sku for view in world.engine.pool_views()] == ["other"]


def test_gangs_that_a_lowered_ceiling_can_never_serve_are_told() -> None:
    world = World([a_pool(ceiling=4)])
    world.submit(an_ask("busy", caller="bob", pods=4))
    world.settle()
    world.submit(an_ask("large", pods=3))
    world.submit(an_ask("small", pods=1))
    world.settle()
    world.pools = (a_pool(ceiling=2),)
    world.send(PoolsConfigured(world.pools))
    world.settle()
    assert world.row("large").failure.code == "CapacityUnavailable"  # type: ignore[union-attr]
    assert world.row("small").state is JobState.QUEUED


def test_a_job_that_waits_for_its_callers_quota_starts_when_another_one_ends() -> None:
    world = World([a_pool(min_count=3), a_pool("other", min_count=1)])
    world.settle()
    world.send(CallerLimited(Caller("ann"), a_limit(pods=1)))
    for name, sku in (("a", "cpu"), ("b", "other"), ("c", "cpu")):
        world.submit(an_ask(name, sku=sku))
    for ended in range(3):
        world.settle()
        states = [world.row(name).state for name in "abc"]
        assert states.count(JobState.RUNNING) == 1, states
        assert states.count(JobState.SUCCEEDED) == ended, states
        world.do("end")


def test_a_raised_limit_wakes_the_caller() -> None:
    world = World([a_pool(min_count=3)])
    world.settle()
    world.send(CallerLimited(Caller("ann"), a_limit(pods=1)))
    for name in ("a", "b"):
        world.submit(an_ask(name))
    world.settle()
    assert world.row("b").state is JobState.QUEUED
    world.send(CallerLimited(Caller("ann"), a_limit(pods=2)))
    world.settle()
    assert world.row("b").state is JobState.RUNNING
    assert world.row("b").why == "caller_quota"
