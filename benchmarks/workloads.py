"""W-RL and W-Agent (spec §13) as seeded descriptions, the same for the simulator and for the demo, and the arms that they are
compared in.

Job counts are fixed: W-RL has 44 jobs and 12 barriers; W-Agent has 19 jobs with two agents and 37 with four (paper B.2).
Bodies and pauses vary with the seed; two arms of one repeat share a seed, so that they differ in acquisition only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from firepool_broker.core.pools import Pool
from firepool_broker.sim.load import Line, Step, Work, Workload

ITERATIONS_RL = 4
ROLLOUTS, EVALUATIONS, UPDATES = 8, 2, 1
BODY_RL_S = (1.5, 4.0)

ITERATIONS_AGENT = 3
CALLS = (2, 4)
BODY_AGENT_S = (0.5, 1.6)
#: Pauses between two calls, and between two iterations.
PAUSE_CALL_S = (0.5, 2.0)
PAUSE_ITERATION_S = (2.0, 5.0)
#: Draws the call counts, apart from the seed of bodies and pauses: 19 calls for two agents, 37 for four.
CALLS_SEED = 25


def w_rl(seed: int, *, caller: str = "team", sku: str = "cpu") -> Workload:
    """An RL trainer: 4 iterations of 8 rollouts, 2 evaluations, 1 update, with a barrier after each stage."""
    dice = Random(f"w-rl {seed}")

    def stage(kind: str, count: int) -> Step:
        body = [dice.uniform(*BODY_RL_S) for _ in range(count)]
        works = tuple(Work(kind=kind, body_s=seconds, caller=caller, sku=sku, tag="rl") for seconds in body)
        return Step(works=works)

    steps = [
        step
        for _ in range(ITERATIONS_RL)
        for step in (stage("rollout", ROLLOUTS), stage("evaluation", EVALUATIONS), stage("update", UPDATES))
    ]
    return Workload(name="w_rl", lines=(Line(name="rl", steps=tuple(steps)),))


def call_counts(agents: int) -> list[list[int]]:
    """Calls per agent and iteration, fixed by `CALLS_SEED`."""
    dice = Random(f"calls {CALLS_SEED}")
    return [[dice.randint(*CALLS) for _ in range(ITERATIONS_AGENT)] for _ in range(agents)]


def w_agent(seed: int, agents: int = 2, *, caller: str = "team", sku: str = "cpu") -> Workload:
    """Agents that think and call tools: 3 iterations of 2 to 4 calls each, the last a verify step."""
    lines = []
    for number, counts in enumerate(call_counts(agents)):
        dice = Random(f"w-agent {seed} {number}")
        steps = []
        for iteration, calls in enumerate(counts):
            for call in range(calls):
                first = call == 0
                pause_s = dice.uniform(*(PAUSE_ITERATION_S if first else PAUSE_CALL_S))
                kind = "verify" if call == calls - 1 else "call"
                work = Work(
                    kind=kind, body_s=dice.uniform(*BODY_AGENT_S), caller=caller, sku=sku, tag=f"agent-{number}"
                )
                steps.append(Step(works=(work,), pause_s=0.0 if first and iteration == 0 else pause_s))
        lines.append(Line(name=f"agent-{number}", steps=tuple(steps)))
    return Workload(name=f"w_agent_{agents}", lines=tuple(lines))


def scaled(workload: Workload, *, bodies: float = 1.0, pauses: float = 1.0) -> Workload:
    """The same work with shorter or longer bodies and pauses (the demo scales pauses by 0.2)."""

    def step(s: Step) -> Step:
        works = tuple(replace(work, body_s=work.body_s * bodies) for work in s.works)
        return Step(works=works, pause_s=s.pause_s * pauses)

    return _each_step(workload, lambda _, s: step(s))


def _each_step(workload: Workload, change: Callable[[Line, Step], Step]) -> Workload:
    lines = tuple(
        Line(name=line.name, steps=tuple(change(line, step) for step in line.steps)) for line in workload.lines
    )
    return Workload(name=workload.name, lines=lines)


# -- arms ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy that workloads are compared under: what it does to the jobs, and to the pool."""

    name: str
    label: str
    jobs: Callable[[Workload], Workload]
    pool: Callable[[Pool], Pool]


def _fresh_tags(workload: Workload) -> Workload:
    """A tag of its own for every job."""
    count = iter(range(1_000_000))
    return _each_step(
        workload,
        lambda line, step: replace(
            step, works=tuple(replace(work, tag=f"{line.name}#{next(count)}") for work in step.works)
        ),
    )


def _single_use(workload: Workload) -> Workload:
    return _each_step(
        workload,
        lambda _, step: replace(step, works=tuple(replace(work, single_use=True) for work in step.works)),
    )


REUSE_ON = Arm("on", "Reuse On", lambda w: w, lambda p: p)
REUSE_OFF = Arm("off", "Reuse Off", _fresh_tags, lambda p: replace(p, tag_boundary="retire"))
FRESH = Arm("fresh", "Fresh pod per job", _single_use, lambda p: p)
ARMS = (REUSE_ON, REUSE_OFF, FRESH)
