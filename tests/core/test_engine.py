"""The door itself: wake-ups, slices, the fallback tick, views, stories and checks; and that it is pure.

Rooms: `engine`, `dispatch`, `views`, `errors`.
"""

import ast
from pathlib import Path

import pytest

import firepool_broker.core
from firepool_broker.core.effects import DeletePod, WakeAt
from firepool_broker.core.engine import Engine
from firepool_broker.core.errors import InvariantBroken
from firepool_broker.core.events import BrokerStarted, PodReady, PoolsConfigured, Woke
from firepool_broker.core.ids import JobId, PodName
from firepool_wire.words import JobState
from tests.builders import a_pool, an_ask
from tests.core.world import World


def test_the_same_events_give_the_same_effects() -> None:
    def life() -> list[object]:
        world = World([a_pool(ceiling=3), a_pool("h200", gpus=2, ceiling=2, min_count=1)])
        for number in range(12):
            sku = "h200" if number % 3 else "cpu"
            world.submit(an_ask(f"j{number}", caller=f"c{number % 4}", sku=sku, tag=f"t{number % 2}"))
        world.run_out()
        return list(world.effects)

    assert life() == life()


def test_a_step_back_in_time_is_no_step() -> None:
    world = World([a_pool(caller_hold_s=10.0)])
    world.advance(100.0)
    world.run(an_ask("j"))
    deadline = world.engine.pod_views()[0].hold_deadline
    world.now = 50.0
    world.submit(an_ask("k"))
    world.settle()
    while world.do("end"):
        world.settle()
    assert world.engine.pod_views()[0].hold_deadline == deadline


def test_only_the_earliest_wake_up_is_asked_for() -> None:
    world = World([a_pool()])
    world.run(an_ask("j"))
    wakes = [effect.at for effect in world.of(WakeAt)]  # type: ignore[attr-defined]
    assert wakes == sorted(wakes, reverse=True)


def test_the_fallback_tick_helps_only_when_an_event_forgot() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.do("write")
    [create] = [work for work in world.work if work.kind == "create"]
    world.advance(10.0)
    assert world.engine.ticks_that_helped == 0
    s = world.engine._state
    pod = s.tracker.pods[PodName(create.subject)]
    pod.strength = 3
    s.tracker.ready(pod, world.now)  # behind the engine's back: nobody is told
    world.advance(4.0)
    assert world.engine.ticks_that_helped == 1


def test_long_work_goes_on_in_slices() -> None:
    engine = Engine()
    engine.handle(PoolsConfigured((a_pool(ceiling=2000, min_count=2000, step=2000, idle_timeout_s=50.0),)), 0.0)
    engine.handle(BrokerStarted(), 0.0)
    for pod in [view.pod for view in engine.pod_views()]:
        engine.handle(PodReady(pod), 1.0)
    engine.handle(PoolsConfigured((a_pool(ceiling=2000, step=2000, idle_timeout_s=50.0),)), 2.0)
    now, deleted, calls = 51.0, 0, 0
    while deleted < 2000:
        effects = engine.handle(Woke(), now)
        some = sum(isinstance(effect, DeletePod) for effect in effects)
        assert some <= 256
        deleted += some
        calls += 1
        assert calls < 40, "it asked for no further wake-up"
    engine.check(everything=True)


def test_stories_tell_causes() -> None:
    world = World([a_pool()])
    world.run(an_ask("j"))
    words = [line.split(": ", 1)[1] for line in world.engine.story_of("j")]
    assert words == ["QUEUED <- JobSubmitted", "RUNNING <- Committed", "SUCCEEDED <- EndCommitted"]
    [pod] = world.states()
    assert world.engine.story_of(pod)[-1].endswith("held <- ResetClean")


def test_views_are_of_now_and_stay_as_they_were() -> None:
    world = World([a_pool()])
    world.submit(an_ask("j"))
    world.settle()
    [pod] = world.engine.pod_views()
    job = world.engine.job_view(JobId("j"))
    assert job is not None and job.pods == (pod.pod,) and job.state is JobState.RUNNING
    attempt = world.engine.running_on(pod.pod)
    assert attempt is not None and attempt.attempt == "j:0"
    world.do("end")
    assert world.engine.running_on(pod.pod) is None
    assert pod.job == "j" and job.state is JobState.RUNNING
    [pool] = world.engine.pool_views()
    assert pool.physical == 1 and pool.held == 1


def test_check_finds_a_wrong_count_and_names_the_property() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.engine._state.tracker.pools[an_ask().sku].rack.counts[1] += 1
    with pytest.raises(InvariantBroken, match="S29"):
        world.engine.check(everything=True)


def test_the_quick_check_looks_at_what_the_last_call_touched() -> None:
    world = World([a_pool(min_count=2)], check=False)
    world.settle()
    world.engine.check()
    world.submit(an_ask("j"))
    world.engine._state.leases.clear()
    with pytest.raises(InvariantBroken, match="S1"):
        world.engine.check()


def test_check_finds_a_pod_with_a_lease_that_is_over() -> None:
    world = World([a_pool(min_count=1)])
    world.settle()
    world.submit(an_ask("j"))
    world.engine._state.leases.clear()
    with pytest.raises(InvariantBroken, match="S1"):
        world.engine.check(everything=True)


def test_the_core_imports_no_clock_no_randomness_and_no_input_or_output() -> None:
    allowed = {
        "array",
        "collections",
        "dataclasses",
        "enum",
        "heapq",
        "math",
        "typing",
        "firepool_broker",
        "firepool_wire",
    }
    for file in Path(firepool_broker.core.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, file.name
