"""The transition tables of jobs and pods: data that is complete, commented and closed.

Rooms: `jobs`, `pods`, `pools`, `state`.
"""

import pytest

from firepool_broker.core import jobs, pods
from firepool_broker.core.asks import Ask
from firepool_broker.core.errors import InvalidTransition
from firepool_broker.core.ids import PodName
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.state import State
from firepool_wire.words import TERMINAL, JobState, PodState
from tests.builders import a_pool, an_ask


@pytest.mark.parametrize("table", [jobs.EDGES, pods.EDGES], ids=["jobs", "pods"])
def test_every_edge_says_why_it_is_taken(table: dict[object, str]) -> None:
    assert all(len(why) > 3 for why in table.values())


def test_every_pod_state_is_reached_and_only_gone_is_final() -> None:
    reached = {PodState.STARTING} | {to for _, to in pods.EDGES}
    assert reached == set(PodState)
    assert {state for state in PodState if not pods.NEXT[state]} == {PodState.GONE}


def test_every_pod_state_leads_to_gone() -> None:
    for state in PodState:
        assert state is PodState.GONE or PodState.GONE in pods.NEXT[state]


def test_a_terminal_job_never_changes() -> None:
    assert not [edge for edge in jobs.EDGES if edge[0] in TERMINAL]
    assert {to for _, to in jobs.EDGES} == set(JobState)


def a_job(s: State, ask: Ask) -> JobRecord:
    pool = s.tracker.open_pool(a_pool())
    return JobRecord(ask, pool, s.quota.of(ask.caller))


def test_a_wrong_step_of_a_job_carries_its_story() -> None:
    s = State()
    job = a_job(s, an_ask())
    s.move(job, JobState.QUEUED)
    s.move(job, JobState.FAILED)
    with pytest.raises(InvalidTransition, match="FAILED -> RUNNING") as caught:
        s.move(job, JobState.RUNNING)
    assert [line.split(": ")[1].split(" <-")[0] for line in caught.value.story] == ["QUEUED", "FAILED"]


def test_a_wrong_step_of_a_pod_carries_its_story() -> None:
    s = State()
    pool = s.tracker.open_pool(a_pool())
    pod = PodRecord(PodName("p"), pool.rack, 0.0)
    s.tracker.add(pod)
    s.tracker.ready(pod, 1.0)
    with pytest.raises(InvalidTransition, match="idle -> idle") as caught:
        s.tracker.ready(pod, 2.0)
    assert "idle" in caught.value.story[-1]


@pytest.mark.parametrize("start", list(PodState))
@pytest.mark.parametrize("to", list(PodState))
def test_the_tracker_takes_exactly_the_edges_of_the_table(start: PodState, to: PodState) -> None:
    s = State()
    pool = s.tracker.open_pool(a_pool())
    pod = PodRecord(PodName("p"), pool.rack, 0.0)
    pod.state = start
    if (start, to) in pods.EDGES:
        s.tracker._edge(pod, to)
        assert pod.state is to
    else:
        with pytest.raises(InvalidTransition):
            s.tracker._edge(pod, to)
