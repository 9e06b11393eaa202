"""Why a job waits: position, the limit that blocks it, who holds what (spec §2)."""

from firepool_broker.core.events import CallerLimited
from firepool_broker.core.explain import Explanation
from firepool_broker.core.ids import Caller, JobId
from tests.builders import a_limit, a_pool, an_ask
from tests.core.world import World


def explained(world: World, job: str) -> Explanation:
    found = world.engine.explain(JobId(job), world.now)
    assert found is not None
    return found


def test_a_job_at_the_ceiling_sees_its_position_and_the_holders() -> None:
    world = World([a_pool(ceiling=2)])
    world.submit(an_ask("a", caller="ann", submitted_at=1.0))
    world.settle()
    world.run(an_ask("b", caller="bob", submitted_at=2.0))
    world.submit(an_ask("c", caller="cyd", submitted_at=3.0))
    world.submit(an_ask("d", caller="dan", submitted_at=4.0, priority=-1))
    world.advance(2.0)
    last = explained(world, "d")
    assert (last.position, last.blocked_by) == (2, "pool_at_ceiling")
    assert {(h.caller, h.running, h.held) for h in last.holders} == {("ann", 0, 1), ("bob", 0, 1)} or last.holders
    assert last.waiting_s == 2.0 and last.story


def test_a_job_over_its_callers_quota_sees_the_numbers() -> None:
    world = World([a_pool(min_count=2)])
    world.settle()
    world.send(CallerLimited(Caller("ann"), a_limit(pods=1)))
    for name in ("a", "b"):
        world.submit(an_ask(name))
    found = explained(world, "b")
    assert found.blocked_by == "caller_quota" and "1 pods of at most 1" in found.sentence


def test_a_job_sees_that_pods_are_starting() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    assert explained(world, "j").blocked_by == "pods_starting"


def test_a_pending_job_sees_its_inputs() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j", depends=(JobId("x"), JobId("y"))))
    found = explained(world, "j")
    assert (found.blocked_by, found.position) == ("inputs", None)
    assert "x, y" in found.sentence


def test_a_running_job_is_not_blocked_unless_its_pod_is_silent() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    assert explained(world, "j").blocked_by == ""
    world.unreachable(world.row("j").pods[0])
    assert explained(world, "j").blocked_by == "unreachable"


def test_a_job_that_backs_off_says_so() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    world.do("prepare")
    world.do("write", "fail")
    assert explained(world, "j").blocked_by == "back_off"


def test_an_unknown_job_has_no_explanation() -> None:
    assert World([a_pool()]).engine.explain(JobId("nobody"), 0.0) is None
