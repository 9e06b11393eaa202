"""The two workloads have the shape of spec §13."""

import pytest

from benchmarks.workloads import ARMS, FRESH, REUSE_OFF, call_counts, scaled, w_agent, w_rl
from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool


def _works(workload):
    return [work for line in workload.lines for step in line.steps for work in step.works]


def test_w_rl_has_44_jobs_and_12_barriers_in_three_stages():
    workload = w_rl(1)
    assert (workload.jobs, workload.barriers) == (44, 12)
    stages = [tuple(work.kind for work in step.works) for step in workload.lines[0].steps]
    assert stages == [("rollout",) * 8, ("evaluation",) * 2, ("update",)] * 4
    assert all(1.5 <= work.body_s <= 4.0 for work in _works(workload))


@pytest.mark.parametrize(("agents", "jobs"), [(2, 19), (4, 37)])
def test_w_agent_has_the_paper_s_job_counts(agents, jobs):
    workload = w_agent(1, agents)
    assert workload.jobs == jobs
    assert all(2 <= calls <= 4 for counts in call_counts(agents) for calls in counts)
    assert all(0.5 <= work.body_s <= 1.6 for work in _works(workload))


def test_the_last_call_of_every_iteration_verifies():
    for line, counts in zip(w_agent(3).lines, call_counts(2), strict=True):
        kinds = [step.works[0].kind for step in line.steps]
        assert kinds == [kind for calls in counts for kind in ["call"] * (calls - 1) + ["verify"]]


def test_agents_think_between_calls_and_longer_between_iterations():
    for line, counts in zip(w_agent(3).lines, call_counts(2), strict=True):
        pauses = [step.pause_s for step in line.steps]
        assert pauses[0] == 0.0
        starts = {sum(counts[:n]) for n in range(1, len(counts))}
        assert all(2 <= pauses[n] <= 5 if n in starts else 0.5 <= pauses[n] <= 2 for n in range(1, len(pauses)))


def test_a_seed_fixes_bodies_and_pauses_but_never_the_job_count():
    assert w_agent(5) == w_agent(5)
    assert w_agent(5) != w_agent(6)
    assert {w_agent(seed).jobs for seed in range(20)} == {19}


def test_the_demo_scales_pauses_and_leaves_bodies_alone():
    full, short = w_agent(1), scaled(w_agent(1), pauses=0.2)
    assert [work.body_s for work in _works(short)] == [work.body_s for work in _works(full)]
    assert sum(s.pause_s for line in short.lines for s in line.steps) == pytest.approx(
        0.2 * sum(s.pause_s for line in full.lines for s in line.steps)
    )


def test_arms_differ_in_how_pods_are_acquired_and_in_nothing_else():
    for arm in ARMS:
        changed = arm.jobs(w_rl(1))
        assert [work.body_s for work in _works(changed)] == [work.body_s for work in _works(w_rl(1))]
    off = [work.tag for work in _works(REUSE_OFF.jobs(w_rl(1)))]
    assert len(set(off)) == 44
    assert REUSE_OFF.pool(Pool(sku=Sku("cpu"), tag_boundary="hint")).tag_boundary == "retire"
    assert all(work.single_use for work in _works(FRESH.jobs(w_rl(1))))
