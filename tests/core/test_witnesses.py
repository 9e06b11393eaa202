"""Who used a pod last: the verdict for every combination of witnesses that matters (spec §3, S10, S15, S16)."""

import pytest

from firepool_broker.core.asks import Binding, FoundPod
from firepool_broker.core.ids import AttemptId, Caller, PodName, Queue, ReuseTag
from firepool_broker.core.witnesses import Dirty, Held, NeverUsed, Retire, Starting, judge
from tests.builders import a_found_pod, a_last_use

NOW, HOLD = 50.0, 60.0


def bound(caller: str = "ann", *, tag: str | None = None, retire_after: bool = False) -> Binding:
    return Binding(
        pod=PodName("p"),
        attempt=AttemptId("j:0"),
        caller=Caller(caller),
        queue=Queue("default"),
        tag=ReuseTag(tag) if tag is not None else None,
        retire_after=retire_after,
    )


ANN = a_last_use(released_at=30.0)
BOB = a_last_use("bob", released_at=30.0)
BUSY = a_last_use()


@pytest.mark.parametrize(
    ("found", "binding", "verdict"),
    [
        pytest.param(a_found_pod(), None, NeverUsed, id="all say never used"),
        pytest.param(a_found_pod(ready=False, agent_answered=False), None, Starting, id="still starting"),
        pytest.param(a_found_pod(agent=ANN, annotated=ANN), bound(), Held, id="all agree"),
        pytest.param(a_found_pod(agent=ANN), bound(), Held, id="the annotation was lost"),
        pytest.param(a_found_pod(agent=BUSY), bound(), Dirty, id="no release known: reset it"),
        pytest.param(a_found_pod(agent=BUSY, annotated=ANN), bound(), Dirty, id="an old annotation proves no reset"),
        pytest.param(a_found_pod(terminating=True), None, Retire, id="terminating"),
        pytest.param(a_found_pod(agent_answered=False), bound(), Retire, id="agent silent, used"),
        pytest.param(a_found_pod(agent_answered=False), None, Retire, id="agent silent, who knows"),
        pytest.param(a_found_pod(ready=False, agent_answered=False), bound(), Retire, id="used, agent gone"),
        pytest.param(a_found_pod(agent=ANN), None, Retire, id="the store knows no owner"),
        pytest.param(a_found_pod(annotated=ANN), None, Retire, id="only the annotation knows an owner"),
        pytest.param(a_found_pod(annotated=ANN), bound(), Retire, id="the agent says never used"),
        pytest.param(a_found_pod(agent=BOB), bound("ann"), Retire, id="agent and store differ"),
        pytest.param(a_found_pod(agent=ANN, annotated=BOB), bound("ann"), Retire, id="the annotation differs"),
        pytest.param(a_found_pod(agent=ANN), bound(tag="x"), Retire, id="the tag differs"),
        pytest.param(a_found_pod(agent=ANN), bound(retire_after=True), Retire, id="it was to retire"),
        pytest.param(a_found_pod(agent=ANN, single_use=True), bound(), Retire, id="single use"),
    ],
)
def test_s10_a_used_pod_is_only_its_owners(found: FoundPod, binding: Binding | None, verdict: type) -> None:
    assert isinstance(judge(found, binding, HOLD, NOW), verdict)


def test_s15_a_hold_keeps_its_owner_and_its_deadline() -> None:
    held = judge(a_found_pod(agent=a_last_use(released_at=30.0)), bound(), HOLD, NOW)
    assert isinstance(held, Held)
    assert (held.owner, held.released_at, held.deadline) == ("ann", 30.0, 90.0)


def test_f5_1_ten_seconds_are_left_of_a_hold_of_sixty_after_fifty() -> None:
    use = a_last_use(released_at=100.0)
    held = judge(a_found_pod(agent=use), bound(), 60.0, 150.0)
    assert isinstance(held, Held) and held.deadline - 150.0 == 10.0
    assert isinstance(judge(a_found_pod(agent=use), bound(), 60.0, 160.0), Retire)


def test_an_annotated_deadline_counts_when_it_is_of_the_same_release() -> None:
    agent = a_last_use(released_at=30.0)
    same = a_last_use(released_at=30.0, hold_deadline=70.0)
    other = a_last_use(released_at=10.0, hold_deadline=70.0)
    first = judge(a_found_pod(agent=agent, annotated=same), bound(), HOLD, NOW)
    second = judge(a_found_pod(agent=agent, annotated=other), bound(), HOLD, NOW)
    assert isinstance(first, Held) and first.deadline == 70.0
    assert isinstance(second, Held) and second.deadline == 90.0


def test_a_pool_without_holds_keeps_no_used_pod() -> None:
    assert isinstance(judge(a_found_pod(agent=ANN), bound(), 0.0, NOW), Retire)
