"""Pods appear and disappear as the scaler's numbers say (spec §6): token bucket, keep-alive, floors, drains, single use.

Rooms: `controller`, `fleet`, `podlife`.
"""

from firepool_broker.core.effects import CreatePod, DeletePod
from firepool_broker.core.events import CancelRequested, PodCreateFailed, PoolsConfigured
from firepool_broker.core.ids import JobId, PodName
from firepool_wire.words import JobState, PodState
from tests.builders import a_failure, a_pool, an_ask
from tests.core.world import World


def test_a_floor_is_filled_at_the_start() -> None:
    world = World([a_pool(min_count=3)])
    assert len(world.of(CreatePod)) == 3


def test_s33_creations_never_exceed_the_demand() -> None:
    world = World([a_pool(ceiling=16, step=99)])
    for number in range(5):
        world.submit(an_ask(f"j{number}", caller=f"c{number}"))
        world.advance(0.5)
    assert len(world.of(CreatePod)) == 5


def test_a_step_bounds_the_creations_of_an_interval_however_many_events_ask() -> None:
    world = World([a_pool(ceiling=50, step=4, reconcile_interval_s=30.0)])
    for number in range(20):
        world.submit(an_ask(f"j{number}", caller=f"c{number}"))
    assert len(world.of(CreatePod)) == 4
    world.advance(29.0)
    assert len(world.of(CreatePod)) == 4
    world.advance(1.5)
    assert len(world.of(CreatePod)) == 8


def test_single_use_pods_come_out_of_the_same_bucket() -> None:
    world = World([a_pool(ceiling=50, step=4)])
    for number in range(10):
        world.submit(an_ask(f"j{number}", caller=f"c{number}", single_use=True))
    assert len(world.of(CreatePod)) == 4
    world.run_out()
    assert {row.state for row in world.rows.values()} == {JobState.SUCCEEDED}


def test_s30_dying_pods_count_in_the_ceiling() -> None:
    world = World([a_pool(ceiling=1, caller_hold_s=0.0)])
    world.submit(an_ask("a"))
    world.settle()
    world.submit(an_ask("b"))
    world.do("write")
    world.do("end")
    assert list(world.states().values()) == [PodState.RETIRING]
    assert len(world.of(CreatePod)) == 1
    world.run_out()
    assert world.row("b").state is JobState.SUCCEEDED


def test_a_never_used_pod_retires_when_its_keep_alive_is_over() -> None:
    world = World([a_pool(idle_timeout_s=20.0)])
    world.submit(an_ask("j"))
    world.do("write")
    world.send(CancelRequested(JobId("j"), a_failure("Cancelled")))
    world.settle()
    assert list(world.states().values()) == [PodState.IDLE]
    world.advance(19.0)
    assert list(world.states().values()) == [PodState.IDLE]
    world.advance(1.0)
    assert list(world.states().values()) == [PodState.RETIRING]


def test_s34_the_floor_and_the_idle_cap_keep_expired_pods() -> None:
    world = World([a_pool(min_count=1, max_idle_count=2, idle_timeout_s=20.0)])
    world.settle()
    world.submit(an_ask("gang", pods=4))
    world.do("write")
    world.send(CancelRequested(JobId("gang"), a_failure("Cancelled")))
    world.settle()
    assert len(world.states()) == 4
    world.advance(30.0)
    world.settle()
    assert list(world.states().values()) == [PodState.IDLE] * 2


def test_a_pod_that_does_not_become_ready_is_replaced() -> None:
    world = World([a_pool(pod_start_timeout_s=60.0)])
    world.submit(an_ask("j"))
    world.do("write")
    [first] = world.of(CreatePod)
    world.work.clear()
    world.advance(61.0)
    assert [effect.pod for effect in world.of(DeletePod)] == [first.pod]  # type: ignore[attr-defined]
    world.do("delete")
    world.advance(2.0)
    assert len(world.of(CreatePod)) == 2


def test_failing_creations_back_off() -> None:
    world = World([a_pool(step=99)])
    world.submit(an_ask("j"))
    world.do("write")
    for _ in range(5):
        [create] = [work for work in world.work if work.kind == "create"]
        world.send(PodCreateFailed(PodName(create.subject), a_failure("ImagePullError")))
        world.agents.clear()
        world.work.clear()
        made = len(world.of(CreatePod))
        assert not world.work
        world.advance(0.9)
        assert len(world.of(CreatePod)) == made
        world.advance(60.0)
        assert len(world.of(CreatePod)) == made + 1
        world.work = world.work[:1]


def test_a_deletion_that_nobody_confirms_is_asked_for_again() -> None:
    world = World([a_pool(caller_hold_s=1.0)])
    world.run(an_ask("j"))
    world.advance(2.0)
    world.work.clear()
    world.advance(31.0)
    assert len(world.of(DeletePod)) == 2


# -- templates ------------------------------------------------------------------------------------------------------


def configure(world: World, **knobs: object) -> None:
    world.pools = (a_pool(**knobs),)  # type: ignore[arg-type]
    world.send(PoolsConfigured(world.pools))


def test_s49_stale_pods_drain_one_at_a_time_idle_first_and_busy_ones_at_their_release() -> None:
    world = World([a_pool(min_count=4)])
    world.settle()
    world.run(an_ask("held", caller="ann"))
    world.submit(an_ask("busy", caller="bob"))
    world.settle()
    world.effects.clear()
    configure(world, min_count=4, template="t1")
    order = []
    for _ in range(20):
        dying = [pod for pod, state in world.states().items() if state is PodState.RETIRING]
        assert len(dying) <= 1, "S49 drain budget"
        if dying:
            order.append(world.engine.story_of(dying[0])[-3].split(": ")[1].split(" ")[0])
        if not world.do("delete"):
            break
        world.settle(but=("delete",))
    assert order == ["idle", "idle", "held"]
    assert world.row("busy").state is JobState.RUNNING
    world.do("end")
    world.run_out()
    assert {view.template for view in world.engine.pod_views()} == {"t1"}


def test_a_stale_held_pod_serves_its_owner_no_more() -> None:
    world = World([a_pool(ceiling=4)])
    world.run(an_ask("a", pods=2))
    old = set(world.states())
    configure(world, ceiling=4, template="t1")
    assert PodState.HELD in world.states().values(), "one is drained, the other still waits for its turn"
    world.submit(an_ask("b"))
    world.settle()
    assert world.row("b").why == "stale_template"
    assert not set(world.row("b").pods) & old


def test_going_back_to_an_old_template_makes_its_pods_current_again() -> None:
    world = World([a_pool(min_count=2)])
    world.settle()
    configure(world, min_count=2, template="t1")
    configure(world, min_count=2, template="t0")
    world.settle()
    assert list(world.states().values()).count(PodState.IDLE) == 2


# -- single use -----------------------------------------------------------------------------------------------------


def test_single_use_pods_are_made_per_job_outside_warm_demand() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j", single_use=True))
    world.do("write")
    [create] = world.of(CreatePod)
    assert create.single_use  # type: ignore[attr-defined]
    assert world.engine.pool_views()[0].single_use == 1


def test_s35_single_use_pods_satisfy_no_floor() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j", single_use=True))
    world.settle()
    assert world.row("j").path is not None and world.row("j").path.value == "single_use"
    assert world.engine.pool_views()[0].idle == 1, "a warm pod replaced the one that the single-use job took"


def test_a_single_use_pod_whose_job_was_cancelled_is_deleted() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j", single_use=True))
    world.do("write")
    world.send(CancelRequested(JobId("j"), a_failure("Cancelled")))
    world.settle()
    assert not world.states()


def test_both_kinds_share_the_ceiling_and_none_starves() -> None:
    world = World([a_pool(ceiling=2)])
    for number in range(6):
        single = number % 2 == 1
        world.submit(an_ask(f"j{number}", caller=f"c{number}", single_use=single, submitted_at=float(number)))
    world.run_out()
    assert {row.state for row in world.rows.values()} == {JobState.SUCCEEDED}
