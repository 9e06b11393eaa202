"""W-RL and W-Agent (spec §13) in virtual time: complete, without a lost job, and in the paper's order of arms."""

import pytest

from benchmarks.stats import median
from benchmarks.workloads import ARMS, FRESH, REUSE_OFF, REUSE_ON, w_agent, w_rl
from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape
from firepool_broker.sim.broker import Config
from firepool_broker.sim.faults import MIXED, NONE
from firepool_broker.sim.venue import H200, LOCAL
from firepool_broker.sim.world import Plan, World
from firepool_wire.words import JobState, Path


def _pool(max_count):
    return Pool(sku=Sku("cpu"), shape=Shape(cpus=1.0), max_count=max_count, idle_timeout_s=900.0, tag_boundary="retire")


def _run(workload, arm=REUSE_ON, venue=LOCAL, faults=NONE, seed=1, max_count=16):
    pool = arm.pool(_pool(max_count))
    plan = Plan(
        seed=seed,
        config=Config(pools=(pool,)),
        workload=arm.jobs(workload),
        venue=venue,
        faults=faults,
        horizon_s=20_000,
    )
    return World(plan).run()


LOOPS = {"w_rl": w_rl, "w_agent": w_agent, "w_agent_4": lambda seed: w_agent(seed, 4)}
JOBS = {"w_rl": 44, "w_agent": 19, "w_agent_4": 37}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize("venue", [LOCAL, H200], ids=lambda venue: venue.name)
def test_every_loop_runs_to_its_end_without_a_lost_job(name, arm, venue):
    outcome = _run(LOOPS[name](1), arm, venue)
    assert len(outcome.jobs) == JOBS[name]
    assert outcome.lost == 0
    assert all(job.state is JobState.SUCCEEDED for job in outcome.jobs)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("seed", range(4))
def test_every_loop_survives_every_fault(name, seed):
    outcome = _run(LOOPS[name](seed), faults=MIXED, seed=seed)
    assert (len(outcome.jobs), outcome.lost) == (JOBS[name], 0), f"seed {seed}"


@pytest.mark.parametrize(("name", "max_count"), [("w_rl", 16), ("w_agent", 2)])
def test_reuse_on_beats_reuse_off_beats_fresh_pods_when_pods_are_slow(name, max_count):
    """Signs and order, not sizes: the paper has 13.0x (agents) and 10.8x (RL) for fresh pods, 3.6x and 4.5x for Reuse Off."""
    spans = {
        arm.name: [_run(LOOPS[name](seed), arm, H200, seed=seed, max_count=max_count).makespan_s for seed in range(5)]
        for arm in ARMS
    }
    on, off, fresh = (median(spans[arm.name]) for arm in (REUSE_ON, REUSE_OFF, FRESH))
    assert on < off < fresh, spans
    assert all(a < b for a, b in zip(spans["on"], spans["fresh"], strict=True)), spans


def test_reuse_on_serves_almost_everything_warm_and_fresh_pods_serve_nothing_twice():
    on = _run(w_rl(1), REUSE_ON, H200)
    fresh = _run(w_rl(1), FRESH, H200)
    assert on.share(Path.WARM) > 0.75
    assert on.pods_made <= 8
    assert fresh.share(Path.SINGLE_USE) == 1.0
    assert fresh.pods_made >= 44


def test_a_warm_start_in_the_local_venue_takes_milliseconds():
    outcome = _run(w_rl(1), venue=LOCAL)
    warm = [job.start_s for job in outcome.jobs if job.path is Path.WARM]
    assert median(warm) < 0.02
