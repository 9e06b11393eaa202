"""A restart at any instant (spec §10; S42–S47): nothing lost, nothing twice, warm pods kept, silence is not death."""

import pytest

from firepool_broker.core.effects import (
    CommitEnd,
    CreatePod,
    DeletePod,
    FollowAttempt,
    LaunchAttempt,
    PrepareLease,
    ProbeAttempt,
    ResetPod,
    StopAttempt,
    StoreJob,
)
from firepool_broker.core.events import (
    AttemptProbed,
    CancelRequested,
    JobSubmitted,
    PodReachable,
    PoolsConfigured,
)
from firepool_broker.core.ids import JobId, PodName
from firepool_wire.words import JobState, PodState
from tests.builders import a_failure, a_good_exit, a_pool, an_ask
from tests.core.world import World


def restart(world: World) -> None:
    world.crash()
    world.effects.clear()
    world.recover()


def test_s43_nothing_is_dispatched_before_the_tracker_is_rebuilt() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.crash()
    world.effects.clear()
    world.send(PoolsConfigured(world.pools))
    world.submitted[JobId("j")] = an_ask("j")
    world.send(JobSubmitted(an_ask("j")))
    assert not world.of(PrepareLease) and not world.of(CreatePod) and len(world.of(StoreJob)) == 1
    world.recover()
    assert len(world.of(PrepareLease)) == 1
    world.run_out()


def test_s44_a_live_attempt_goes_on_and_is_the_same() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    restart(world)
    assert len(world.of(ProbeAttempt)) == 1
    world.do("probe")
    assert len(world.of(FollowAttempt)) == 1
    world.run_out()
    assert (world.row("j").state, world.row("j").retry_count) == (JobState.SUCCEEDED, 0)


def test_s44_an_attempt_that_ended_during_the_outage_is_final_without_a_retry() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j", max_retries=3))
    world.settle()
    [agent] = world.agents.values()
    world.do("end")  # delivered to a broker that dies before it writes anything
    restart(world)
    world.do("probe")
    world.settle()
    assert agent.attempts == {"j:0": "ended"}
    assert (world.row("j").state, world.row("j").retry_count) == (JobState.SUCCEEDED, 0)


def test_s44_an_attempt_that_was_never_launched_gets_another() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    while not any(work.kind == "launch" for work in world.work):
        assert world.write("ok") or world.do("create") or world.do("prepare")
    restart(world)
    world.run_out()
    row = world.row("j")
    assert (row.state, row.retry_count, row.infra_retries) == (JobState.SUCCEEDED, 1, 1)


def test_a_pod_that_is_gone_after_the_restart_gives_its_job_another_attempt() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    world.die(PodName(world.row("j").pods[0]))
    restart(world)
    world.settle()
    assert (world.row("j").state, world.row("j").attempt) == (JobState.RUNNING, "j:1")


def test_s47_an_unreachable_job_stays_running_until_its_pod_is_verified_gone() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    restart(world)
    world.do("probe", "fail")
    assert len(world.of(DeletePod)) == 1
    assert world.row("j").state is JobState.RUNNING and not world.of(CommitEnd)
    world.advance(300.0)
    assert not world.of(CommitEnd)
    assert world.engine.job_view(JobId("j")).unreachable  # type: ignore[union-attr]
    world.do("delete")
    world.settle()
    assert world.row("j").attempt == "j:1"


def test_an_unreachable_agent_that_answers_again_is_asked_what_became_of_the_job() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    pod = PodName(world.row("j").pods[0])
    restart(world)
    world.do("probe", "fail")
    world.effects.clear()
    world.send(PodReachable(pod))
    [probe] = world.of(ProbeAttempt)
    world.agents[pod].attempts[probe.attempt] = "ended"  # type: ignore[attr-defined]
    world.agents[pod].exits[probe.attempt] = a_good_exit()  # type: ignore[attr-defined]
    world.do("probe")
    world.do("write")
    assert world.row("j").state is JobState.SUCCEEDED


def test_s45_a_gang_stays_assigned_until_every_rank_is_accounted_for() -> None:
    world = World([a_pool(min_count=3)])
    world.settle()
    world.submit(an_ask("j", pods=3))
    world.settle()
    pods = world.row("j").pods
    restart(world)
    world.do("probe", "ok", pods[0])
    world.do("probe", "fail", pods[1])
    world.do("probe", "ok", pods[2])
    world.advance(60.0)
    assert world.row("j").state is JobState.RUNNING and not world.of(CommitEnd)
    world.do("delete")
    assert {effect.pod for effect in world.of(StopAttempt)} == {pods[0], pods[2]}  # type: ignore[attr-defined]
    assert not world.of(CommitEnd)
    world.do("stop")
    world.do("stop")
    assert len(world.of(CommitEnd)) == 1
    world.run_out()
    assert (world.row("j").state, world.row("j").retry_count) == (JobState.SUCCEEDED, 1)


def test_s15_holds_have_the_same_owner_and_deadline_after_a_restart() -> None:
    world = World([a_pool(caller_hold_s=60.0)])
    world.run(an_ask("j", tag="x"))
    [before] = world.engine.pod_views()
    world.advance(20.0)
    restart(world)
    [after] = world.engine.pod_views()
    assert (after.owner, after.tag, after.hold_deadline) == (before.owner, before.tag, before.hold_deadline)
    world.advance(39.0)
    assert world.states()[after.pod] is PodState.HELD
    world.advance(1.0)
    assert world.states()[after.pod] is PodState.RETIRING


def test_a_pod_that_was_not_reset_yet_is_reset_before_anything_else() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    world.do("end")
    world.do("write")
    restart(world)
    assert len(world.of(ResetPod)) == 1
    assert set(world.states().values()) == {PodState.RESETTING}
    world.submit(an_ask("k"))
    assert not world.of(PrepareLease)
    world.do("reset")
    assert len(world.of(PrepareLease)) == 1


def test_s46_a_restart_removes_no_idle_pod_early() -> None:
    world = World([a_pool(min_count=2, idle_timeout_s=100.0)])
    world.settle()
    world.advance(90.0)
    restart(world)
    assert list(world.states().values()) == [PodState.IDLE, PodState.IDLE]
    assert not world.of(DeletePod) and not world.of(CreatePod)


def test_a_starting_pod_goes_on_starting() -> None:
    world = World([a_pool(min_count=1)])
    restart(world)
    assert set(world.states().values()) == {PodState.STARTING}
    assert not world.of(CreatePod)


def test_a_terminating_pod_counts_until_it_is_gone_and_serves_nobody() -> None:
    world = World([a_pool(ceiling=1, caller_hold_s=5.0)])
    world.run(an_ask("j"))
    world.submit(an_ask("busy"))
    world.settle()
    while world.do("end"):
        world.do("write")
        world.do("reset")
    world.advance(6.0)
    restart(world)
    assert set(world.states().values()) == {PodState.RETIRING}
    world.submit(an_ask("k"))
    assert not world.of(CreatePod)
    world.run_out()
    assert world.row("k").state is JobState.SUCCEEDED


def test_a_cancel_that_was_recorded_is_carried_out_after_the_restart() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    world.send(CancelRequested(JobId("j"), a_failure("Cancelled")))
    world.do("write")
    restart(world)
    world.do("probe")
    assert len(world.of(StopAttempt)) == 1
    world.settle()
    assert world.row("j").state is JobState.CANCELLED


def test_an_end_that_was_not_written_before_a_newer_job_got_the_pod_is_found_by_probing() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    world.do("end")
    world.do("reset")
    end = world.writes.pop()
    assert isinstance(end, CommitEnd)
    world.submit(an_ask("k"))
    world.do("prepare")
    world.do("write")
    world.do("launch")
    restart(world)
    assert len(world.of(ProbeAttempt)) == 2
    world.run_out()
    assert [(world.row(job).state, world.row(job).retry_count) for job in "jk"] == [(JobState.SUCCEEDED, 0)] * 2


def test_waiting_jobs_go_on_waiting_in_their_order() -> None:
    world = World([a_pool(ceiling=1)])
    for number, name in enumerate("abc"):
        world.submit(an_ask(name, caller=name, submitted_at=float(number)))
    world.settle()
    restart(world)
    world.run_out()
    launches = [effect.attempt for effect in world.of(LaunchAttempt)]  # type: ignore[attr-defined]
    assert launches == ["b:0", "c:0"]


def test_pools_that_come_after_the_start_are_as_good() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j", caller="bob"))
    world.settle()
    world.submit(an_ask("waits", pods=8))
    world.settle()
    world.crash()
    pools, world.pools = world.pools, ()
    world.engine.handle(PoolsConfigured(()), world.now)
    world.crash()
    world.pools = pools
    world.recover()
    world.run_out()
    assert world.row("waits").state is JobState.SUCCEEDED


@pytest.mark.parametrize("verdict", ["live", "unknown", "gone", "unreachable"])
def test_s41_a_probe_of_an_old_attempt_changes_nothing(verdict: str) -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    pod = PodName(world.row("j").pods[0])
    before = world.engine.pod_views()
    world.send(AttemptProbed("j:9", pod, verdict))  # type: ignore[arg-type]
    assert world.engine.pod_views() == before
