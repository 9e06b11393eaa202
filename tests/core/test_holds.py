"""Holds that expire and holds that are broken early (paper A.3; audit F5; S13, S14)."""

from firepool_broker.core.effects import CreatePod, DeletePod
from firepool_broker.core.events import CallerLimited
from firepool_broker.core.ids import Caller
from firepool_wire.words import JobState, PodState
from tests.builders import a_limit, a_pool, an_ask
from tests.core.world import World


def three_holds(**knobs: object) -> World:
    """Ceiling 3, all held: cyd released at 40, bob at 90, ann at 100 (F5.3)."""
    fields: dict[str, object] = {"ceiling": 3, "caller_hold_s": 1000.0, "idle_timeout_s": 1000.0, "step": 99} | knobs
    world = World([a_pool(**fields)])  # type: ignore[arg-type]
    for caller, at in (("cyd", 40.0), ("bob", 90.0), ("ann", 100.0)):
        world.advance(at - world.now)
        world.run(an_ask(f"of-{caller}", caller=caller))
    assert set(world.states().values()) == {PodState.HELD}
    world.effects.clear()
    return world


def broken(world: World) -> list[str]:
    """Owners of the pods that were retired, in order."""
    owners = {view.pod: view.owner for view in world.engine.pod_views()}
    return [str(owners[effect.pod]) for effect in world.of(DeletePod)]  # type: ignore[attr-defined]


def test_f5_1_a_hold_expires_exactly_at_its_deadline_and_the_pod_retires() -> None:
    world = World([a_pool(caller_hold_s=60.0)])
    world.advance(100.0)
    world.run(an_ask("j"))
    world.advance(59.9)
    assert set(world.states().values()) == {PodState.HELD}
    world.advance(0.1)
    assert set(world.states().values()) == {PodState.RETIRING}


def test_f5_2_without_its_own_hold_time_a_hold_lasts_the_idle_time_out() -> None:
    world = World([a_pool(idle_timeout_s=300.0)])
    world.run(an_ask("j"))
    assert world.engine.pod_views()[0].hold_deadline == 300.0


def test_f5_3_only_holds_older_than_the_tenure_are_broken() -> None:
    world = three_holds()
    world.advance(120.0 - world.now)
    world.submit(an_ask("d", caller="dan", pods=2))
    assert broken(world) == ["cyd"]
    world.settle()
    assert world.row("d").state is JobState.QUEUED


def test_f5_4_an_owner_with_queued_jobs_is_spared() -> None:
    world = three_holds()
    world.advance(120.0 - world.now)
    world.send(CallerLimited(Caller("cyd"), a_limit(pods=0)))
    world.submit(an_ask("own", caller="cyd"))
    assert world.refused, "refused for its quota, so it does not wait"
    world.send(CallerLimited(Caller("cyd"), a_limit(pods=3)))
    world.submit(an_ask("gang", caller="cyd", pods=3))
    assert broken(world) == []
    world.submit(an_ask("d", caller="dan", pods=2))
    assert broken(world) == []


def test_f5_5_oldest_first_and_at_most_as_many_as_needed() -> None:
    world = three_holds()
    world.advance(161.0 - world.now)
    world.submit(an_ask("d", caller="dan", pods=2))
    assert broken(world) == ["cyd", "bob"]
    world.settle()
    assert world.row("d").state is JobState.RUNNING
    assert [view.owner for view in world.engine.pod_views() if view.state is PodState.HELD] == ["ann"]


def test_the_tenure_is_strict_and_the_engine_wakes_itself_for_it() -> None:
    world = three_holds()
    world.advance(100.0 - world.now)
    world.submit(an_ask("d", caller="dan"))
    assert broken(world) == []
    world.advance(0.25)
    assert broken(world) == ["cyd"]


def test_s14_no_hold_is_broken_while_there_is_room_below_the_ceiling() -> None:
    world = three_holds(ceiling=4)
    world.advance(200.0)
    world.submit(an_ask("d", caller="dan"))
    assert broken(world) == [] and len(world.of(CreatePod)) == 1


def test_s14_a_job_that_waits_for_its_callers_quota_breaks_no_hold() -> None:
    world = three_holds()
    world.advance(200.0)
    world.send(CallerLimited(Caller("dan"), a_limit(pods=1)))
    world.submit(an_ask("d1", caller="dan"))
    assert len(broken(world)) == 1
    world.settle()
    world.effects.clear()
    world.submit(an_ask("d2", caller="dan"))
    world.settle()
    world.advance(10.0)
    assert world.row("d1").state is JobState.RUNNING and not world.of(DeletePod)


def test_s14_pods_that_are_going_anyway_are_counted_before_a_hold_is_broken() -> None:
    world = three_holds()
    world.advance(200.0)
    world.submit(an_ask("d", caller="dan"))
    assert len(broken(world)) == 1
    world.advance(20.0)
    assert len(broken(world)) == 1, "its deletion is under way: no second hold is broken for the same job"


def test_a_broken_hold_is_never_handed_over() -> None:
    world = three_holds()
    world.advance(200.0)
    held = set(world.states())
    world.submit(an_ask("d", caller="dan"))
    world.settle()
    assert not set(world.row("d").pods) & held
