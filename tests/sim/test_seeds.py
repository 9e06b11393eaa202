"""The broker's own engine against hundreds of seeds: fair days, each fault alone, everything at once. A failure names its seed;
`World(random_plan(SEED, ALONE["…"])).run()` shows it again, line by line.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from firepool_broker.core.effects import LaunchAttempt, PrepareLease
from firepool_broker.core.engine import Engine
from firepool_broker.core.events import Committed, LeasePrepared
from firepool_broker.core.ids import AttemptId
from firepool_broker.sim.checks import judge
from firepool_broker.sim.faults import ALONE, MIXED, NONE
from firepool_broker.sim.scenarios import random_plan
from firepool_broker.sim.trace import read
from firepool_broker.sim.venue import H200, LOCAL
from firepool_broker.sim.world import RunFailed, World
from firepool_wire.words import JobState


def _sweep(seeds, faults=NONE, venue=LOCAL):
    """Run every seed; all failures at once, each with its seed."""
    failures = []
    for seed in seeds:
        world = World(random_plan(seed, faults, venue))
        try:
            outcome = world.run()
        except RunFailed as failed:
            failures.append(f"seed {seed}: {failed.why}")
            continue
        if outcome.lost:
            failures.append(f"seed {seed}: {outcome.lost} jobs lost")
    assert not failures, f"{len(failures)} of {len(seeds)} seeds failed under {faults}:\n" + "\n".join(failures[:10])


@pytest.mark.parametrize("start", range(0, 40, 20))
def test_a_fair_day_breaks_nothing_and_loses_nothing(start):
    _sweep(range(start, start + 20))


@pytest.mark.parametrize("fault", sorted(ALONE))
def test_each_fault_alone_breaks_nothing_and_loses_nothing(fault):
    _sweep(range(1000, 1006), ALONE[fault])


@pytest.mark.parametrize("start", range(2000, 2080, 20))
def test_all_faults_together_break_nothing_and_lose_nothing(start):
    _sweep(range(start, start + 20), MIXED)


def test_slow_pods_break_nothing_either():
    _sweep(range(3000, 3010), MIXED, venue=H200)


def test_crashes_really_happen_and_jobs_end_in_every_way():
    """A sweep that never meets a crash, a retry or a failure would prove little."""
    crashes, states, retries, paths = 0, set(), 0, set()
    for seed in range(2000, 2020):
        outcome = World(random_plan(seed, MIXED)).run()
        crashes += outcome.crashes
        states |= {job.state for job in outcome.jobs}
        retries += sum(job.retries for job in outcome.jobs)
        paths |= {job.path for job in outcome.jobs}
    assert crashes > 5
    assert retries > 5
    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} <= states
    assert {"warm", "new", "recycled", "single_use"} <= {str(path) for path in paths}


# -- the same seed ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_trace_byte_for_byte():
    first, second = World(random_plan(7, MIXED)), World(random_plan(7, MIXED))
    first.run()
    second.run()
    assert first.trace.text() == second.trace.text()


def test_another_seed_gives_another_trace():
    assert World(random_plan(7, MIXED)).run().digest != World(random_plan(8, MIXED)).run().digest


@pytest.mark.parametrize("hash_seed", ["1", "31337"])
def test_the_trace_does_not_hang_on_python_s_hash_seed(hash_seed):
    code = (
        "from firepool_broker.sim.faults import MIXED\n"
        "from firepool_broker.sim.scenarios import random_plan\n"
        "from firepool_broker.sim.world import World\n"
        "print(World(random_plan(7, MIXED)).run().digest)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == World(random_plan(7, MIXED)).run().digest


def test_a_recorded_trace_is_judged_like_the_run_itself():
    world = World(random_plan(11, MIXED))
    world.run()
    records = list(read(world.trace.text().splitlines()))
    assert [record.line() for record in records] == list(world.trace.lines())
    judge(records)


# -- broken engines are caught ---------------------------------------------------------------------------------------


class LaunchesBeforeTheCommit(Engine):
    """Breaks S3: launches as soon as agents are prepared."""

    def handle(self, event, now):
        effects = super().handle(event, now)
        if isinstance(event, LeasePrepared):
            return [*effects, LaunchAttempt(event.attempt, (event.pod,))]
        return effects


class LeasesTwice(Engine):
    """Breaks S1: hands one pod to a second attempt."""

    def handle(self, event, now):
        effects = super().handle(event, now)
        extra = [replace(e, attempt=AttemptId(f"ghost-{e.attempt}")) for e in effects if isinstance(e, PrepareLease)]
        return [*effects, *extra]


class ForgetsCommits(Engine):
    """Loses jobs: never hears that a start is durable."""

    def handle(self, event, now):
        return [] if isinstance(event, Committed) else super().handle(event, now)


@pytest.mark.parametrize(
    ("engine", "number"),
    [(LaunchesBeforeTheCommit, "S3"), (LeasesTwice, "S1"), (ForgetsCommits, "S42")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_engine_is_caught_and_the_message_names_seed_and_property(engine, number):
    plan = replace(random_plan(5), engine=engine, horizon_s=300.0)
    with pytest.raises(RunFailed, match=number) as caught:
        World(plan).run()
    assert caught.value.seed == 5
    assert str(caught.value).startswith("seed 5,")


# -- what a run leaves behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4000, 4010))
def test_after_the_last_hold_only_the_floor_and_the_idle_cap_are_left(seed):
    """Nothing that nobody wants is kept: used pods retire with their holds, never-used ones down to floor or idle cap."""
    plan = replace(random_plan(seed), tail_s=400.0, edits=())
    world = World(plan)
    world.run()
    for pool in plan.config.pools:
        left = sum(pod.sku == pool.sku for pod in world.scene.yard.pods.values())
        assert pool.min_count <= left <= max(pool.min_count, pool.max_idle_count), (
            f"seed {seed}, {pool.sku}: {left} pods"
        )


@pytest.mark.parametrize("seed", range(4010, 4020))
def test_an_idle_broker_wakes_rarely(seed):
    """Wake-ups follow deadlines: after the load a quiet broker wakes for its reconcile and for what runs out, not in a loop."""
    world = World(replace(random_plan(seed), tail_s=900.0, edits=()))
    world.run()
    quiet_from = world.clock.now - 300.0
    woken = sum(r.kind == "Woke" and r.at > quiet_from for r in world.trace.records)
    assert woken <= 25, f"seed {seed}: {woken} wake-ups in 300 quiet seconds"
