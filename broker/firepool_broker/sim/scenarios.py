"""Random but reproducible worlds: a seed gives pools, limits and a workload in which every kind of job meets every other.

Small on purpose (a few pods, a few dozen jobs, bodies of seconds), so that a sweep of hundreds of seeds takes seconds and a
failing seed has a trace that a person can read.
"""

from dataclasses import replace
from random import Random

from firepool_broker.core.ids import Caller, Sku, TemplateDigest
from firepool_broker.core.pools import CallerLimits, Pool, Shape
from firepool_broker.sim.broker import Config
from firepool_broker.sim.faults import NONE, Faults
from firepool_broker.sim.load import Ending, Line, Step, Work, Workload
from firepool_broker.sim.venue import LOCAL, Venue
from firepool_broker.sim.world import Plan

CALLERS = ("ada", "bob", "cyd")


def random_plan(seed: int, faults: Faults = NONE, venue: Venue = LOCAL) -> Plan:
    """A world of its own for this seed."""
    dice = Random(f"scenario {seed}")
    # A pod that is slow for its venue, but comes, is waited for; one that never comes is given up.
    start_timeout_s = max(8.0, 15.0 * venue.start.p50_s)
    pools = tuple(replace(pool, pod_start_timeout_s=start_timeout_s) for pool in (_cpu_pool(dice), _gpu_pool(dice)))
    limits: list[tuple[Caller, CallerLimits]] = []
    if dice.random() < 0.3:
        limits.append((Caller("bob"), CallerLimits(max_pods=dice.randint(2, 4))))
    if dice.random() < 0.3:
        limits.append((Caller("cyd"), CallerLimits(max_processors=4, tag_boundary=dice.choice(["retire", "hint"]))))
    lines = tuple(_line(dice, number) for number in range(dice.randint(2, 5)))
    config = Config(pools=pools, limits=tuple(limits))
    edits = _edits(dice, config) if dice.random() < 0.3 else ()
    return Plan(
        seed=seed,
        config=config,
        edits=edits,
        workload=Workload(name="random", lines=lines),
        venue=venue,
        faults=faults,
    )


def _edits(dice: Random, config: Config) -> tuple[tuple[float, Config], ...]:
    """An operator who rolls out a template, moves the ceiling, or changes what a tag means, while jobs run."""
    edits: list[tuple[float, Config]] = []
    at = 0.0
    for number in range(dice.randint(1, 2)):
        at += dice.uniform(1.0, 12.0)
        cpu, *others = config.pools
        cpu = replace(
            cpu,
            template=TemplateDigest(f"t{number + 1}") if dice.random() < 0.5 else cpu.template,
            max_count=dice.choice([cpu.max_count, max(2, cpu.min_count), cpu.max_count + 2]),
            tag_boundary="hint" if dice.random() < 0.5 else "retire",
            caller_hold_s=dice.choice([cpu.caller_hold_s, 3.0]),
            drain_budget=dice.choice([1, 2]),
        )
        config = replace(config, pools=(cpu, *others))
        edits.append((at, config))
    return tuple(edits)


def _cpu_pool(dice: Random) -> Pool:
    ceiling = dice.randint(2, 8)
    floor = dice.choice([0, 0, 1, 2])
    return Pool(
        sku=Sku("cpu"),
        shape=Shape(cpus=1.0),
        template=TemplateDigest("t0"),
        min_count=min(floor, ceiling),
        max_idle_count=dice.choice([0, 1, min(2, ceiling)]),
        max_count=ceiling,
        idle_timeout_s=dice.choice([2.0, 10.0, 60.0]),
        caller_hold_s=dice.choice([None, None, 0.0, 5.0, 90.0]),
        hold_tenure_min_s=dice.choice([1.0, 60.0]),
        tag_boundary="retire" if dice.random() < 0.6 else "hint",
        run_once_across=dice.random() < 0.7,
        step=dice.choice([1, 8]),
        reconcile_interval_s=5.0,
    )


def _gpu_pool(dice: Random) -> Pool:
    return replace(
        _cpu_pool(dice),
        sku=Sku("h200"),
        shape=Shape(accelerator="h200", gpus=1, simulated=True),
        max_count=dice.randint(3, 6),
        min_count=0,
        max_idle_count=0,
    )


def _line(dice: Random, number: int) -> Line:
    caller = dice.choice(CALLERS)
    steps = tuple(
        Step(works=_works(dice, caller, number), pause_s=dice.choice([0.0, 0.5, 4.0]))
        for _ in range(dice.randint(2, 4))
    )
    return Line(name=f"line-{number}", steps=steps)


def _works(dice: Random, caller: str, line: int) -> tuple[Work, ...]:
    works: list[Work] = []
    for place in range(dice.choice([1, 1, 2, 4])):
        gpu = dice.random() < 0.3
        gang = dice.random() < 0.15
        works.append(
            Work(
                kind="work",
                body_s=dice.uniform(0.05, 3.0),
                caller=caller,
                sku="h200" if gpu else "cpu",
                pods=(3 if gpu else 2) if gang else 1,
                queue=dice.choice(["default", "default", "night"]),
                tag=dice.choice([None, f"line-{line}", f"line-{line}", "shared"]),
                priority=dice.choice([0, 0, 0, 5]),
                single_use=dice.random() < 0.1,
                ending=_ending(dice),
                heavy=dice.random() < 0.1,
                max_retries=dice.choice([0, 0, 2]),
                retry_on=("UserError",),
                run_timeout_s=5.0,
                client_lease_s=dice.choice([None, 6.0]),
                client_gone=dice.random() < 0.1,
                depends=(place - 1,) if place and dice.random() < 0.1 else (),
            )
        )
    return tuple(works)


def _ending(dice: Random) -> Ending:
    roll = dice.random()
    if roll < 0.8:
        return "ok"
    return "error" if roll < 0.9 else "oom" if roll < 0.95 else "never"
