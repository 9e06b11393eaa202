"""Claims among 100,000 pods: the engine's own `claims.claim`, with quota check and lease (paper C.4, spec §15).

10 SKUs, 1,000 callers, 60 % of the pods held for 600 of them, 40 % never used; every caller has limits, so that every claim
checks them. Claims come from random callers: those with held pods get one of their own, the others a never-used one. Undoing
the claims between rounds is not timed. Built through the engine's door (`BrokerStarted`), not around it.
"""

import gc
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from time import perf_counter, perf_counter_ns, thread_time

from benchmarks.harness import Context
from benchmarks.stats import median, percentile
from firepool_broker.core import claims
from firepool_broker.core.asks import Ask, Binding, FoundPod, LastUse
from firepool_broker.core.engine import Engine
from firepool_broker.core.events import BrokerStarted, CallerLimited, Event, PoolsConfigured
from firepool_broker.core.ids import AttemptId, Caller, JobId, Person, PodName, Queue, ReuseTag, Sku, TemplateDigest
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.leases import Lease
from firepool_broker.core.pools import CallerLimits, Pool, Shape
from firepool_broker.core.state import State

NAME = "tracker"

PODS = 100_000
SKUS = 10
CALLERS = 1_000
#: Callers that have held pods; with 60 % of the pods held, 100 pods each.
OWNERS = 600
HELD_SHARE = 0.6
#: Engine's clock at the start of every benchmark here.
T0 = 1_000_000.0


def pool(number: int, *, idle_timeout_s: float = 1e6, hold_s: float = 1e6) -> Pool:
    """One of the SKUs, wide enough for its share of the pods."""
    return Pool(
        sku=Sku(f"sku-{number}"),
        shape=Shape(cpus=1.0),
        template=TemplateDigest("t0"),
        max_count=2 * PODS,
        max_idle_count=0,
        idle_timeout_s=idle_timeout_s,
        caller_hold_s=hold_s,
    )


def caller(number: int) -> Caller:
    """Name of a caller."""
    return Caller(f"caller-{number:04}")


def found_pods(count: int, *, hold_s: float = 1e6) -> Iterable[FoundPod]:
    """Live pods as a starting broker finds them, held and never used ones evenly mixed over the SKUs."""
    owner = 0
    for number in range(count):
        last: LastUse | None = None
        # 3 of 5 pods are held; dividing by SKUS first spreads them over every SKU.
        if (number // SKUS) % 5 < HELD_SHARE * 5:
            last = LastUse(
                caller=caller(owner % OWNERS),
                queue=Queue("default"),
                tag=ReuseTag("loop"),
                released_at=T0 - 60.0,
                hold_deadline=T0 - 60.0 + hold_s,
            )
            owner += 1 if number % SKUS == SKUS - 1 else 0
        yield FoundPod(
            pod=PodName(f"sku-{number % SKUS}-{number:06x}"),
            sku=Sku(f"sku-{number % SKUS}"),
            template=TemplateDigest("t0"),
            created_at=T0 - 100.0,
            ready=True,
            isolation="namespaces",
            annotated=last,
            agent=last,
            agent_answered=True,
        )


def broker_start(count: int, *, hold_s: float = 1e6) -> BrokerStarted:
    """What a starting broker finds: the pods, and for every used one the store's binding (without it, a used pod retires)."""
    pods = tuple(found_pods(count, hold_s=hold_s))
    bindings = tuple(
        Binding(pod=pod.pod, attempt=AttemptId("before:0"), caller=used.caller, queue=used.queue, tag=used.tag)
        for pod in pods
        if (used := pod.agent) is not None
    )
    return BrokerStarted(pods, bindings=bindings)


def start_events(count: int, *, idle_timeout_s: float = 1e6, hold_s: float = 1e6) -> Iterator[Event]:
    """What an engine is told at a start that finds `count` pods."""
    yield PoolsConfigured(tuple(pool(n, idle_timeout_s=idle_timeout_s, hold_s=hold_s) for n in range(SKUS)))
    for number in range(CALLERS):
        yield CallerLimited(caller(number), CallerLimits(max_pods=PODS, max_processors=PODS))
    yield broker_start(count, hold_s=hold_s)


def fleet(count: int, *, story_capacity: int | None = None) -> Engine:
    """An engine that has just started and found `count` pods."""
    engine = Engine() if story_capacity is None else Engine(story_capacity=story_capacity)
    for event in start_events(count):
        engine.handle(event, T0)
    held = sum(view.held for view in engine.pool_views())
    assert held == round(count * HELD_SHARE), f"{held} pods are held"
    return engine


def state_of(engine: Engine) -> State:
    """The engine's memory: the claim is measured where it works, behind the door."""
    return engine._state


def ask(number: int, dice: Random, pods: int = 1) -> Ask:
    """A job of a random caller for a random SKU."""
    name = caller(dice.randrange(CALLERS))
    return Ask(
        job=JobId(f"job-{number}"),
        caller=name,
        person=Person(name),
        sku=Sku(f"sku-{dice.randrange(SKUS)}"),
        pods=pods,
        tag=ReuseTag("loop"),
        submitted_at=T0,
    )


def records(state: State, count: int, dice: Random, pods: int = 1) -> list[JobRecord]:
    """Jobs that are ready to be placed."""
    made = []
    for number in range(count):
        wanted = ask(number, dice, pods)
        made.append(JobRecord(wanted, state.tracker.pools[wanted.sku], state.quota.of(wanted.caller)))
    return made


def claim_all(state: State, jobs: Sequence[JobRecord]) -> tuple[list[Lease], float, float]:
    """Claim for every job; the leases, and the seconds that the whole loop took by the clock and of this thread."""
    tracker, claim = state.tracker, claims.claim
    leases: list[Lease] = []
    keep = leases.append
    cpu, wall = thread_time(), perf_counter()
    for job in jobs:
        found = claim(tracker, job, T0)
        keep(found)  # type: ignore[arg-type]
    wall, cpu = perf_counter() - wall, thread_time() - cpu
    _all_claimed(leases)
    return leases, wall, cpu


def claim_each(state: State, jobs: Sequence[JobRecord]) -> tuple[list[Lease], list[int]]:
    """Claim for every job; the leases and the nanoseconds of each claim, timer included."""
    tracker, claim, clock = state.tracker, claims.claim, perf_counter_ns
    leases: list[Lease] = []
    took_ns = []
    for job in jobs:
        began = clock()
        found = claim(tracker, job, T0)
        took_ns.append(clock() - began)
        leases.append(found)  # type: ignore[arg-type]
    _all_claimed(leases)
    return leases, took_ns


def _all_claimed(leases: Sequence[object]) -> None:
    refused = [found for found in leases if not isinstance(found, Lease)]
    if refused:
        raise AssertionError(f"{len(refused)} claims were refused: {refused[0]}")


def give_back(state: State, leases: Iterable[Lease]) -> None:
    """Undo claims, so that the next round finds the same world."""
    for lease in leases:
        claims.give_back(state.tracker, lease)


def bytes_per_pod(count: int) -> float:
    """Memory that the engine keeps per pod: names, records, indexes and timers; the story ring is not counted."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        engine = fleet(count, story_capacity=1)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(state_of(engine).tracker.pods) == count
    return (after - before) / count


def run(ctx: Context) -> None:
    """Measure and report."""
    report = ctx.report
    rounds, batch = (8, 10_000) if ctx.quick else (24, 20_000)
    ctx.say(f"memory of {PODS:,} pods …")
    report.figure("bytes_per_pod", bytes_per_pod(PODS), PODS)
    ctx.say(f"{rounds} rounds of {batch:,} claims …")
    dice = Random(ctx.seed)
    engine = fleet(PODS)
    state = state_of(engine)
    gc.collect()
    gc.freeze()
    rates: list[float] = []
    cpu_rates: list[float] = []
    single_ns: list[int] = []
    for number in range(rounds + 1):
        jobs = records(state, batch, dice)
        leases, wall_s, cpu_s = claim_all(state, jobs)
        give_back(state, leases)
        jobs = records(state, batch, dice)
        leases, took_ns = claim_each(state, jobs)
        give_back(state, leases)
        if number:  # the first round warms caches up
            rates.append(batch / wall_s)
            cpu_rates.append(batch / cpu_s)
            single_ns += took_ns
    report.figure("claims_per_s", median(rates), len(rates))
    report.figure("claims_per_cpu_s", median(cpu_rates), len(cpu_rates))
    report.figure("claim_p50_us", percentile(single_ns, 0.5) / 1e3, len(single_ns))
    report.figure("claim_p99_us", percentile(single_ns, 0.99) / 1e3, len(single_ns))
    gang_ns: list[int] = []
    for _ in range(rounds):
        leases, took_ns = claim_each(state, records(state, 500, dice, pods=8))
        give_back(state, leases)
        gang_ns += took_ns
    report.figure("gang8_p50_us", percentile(gang_ns, 0.5) / 1e3, len(gang_ns))
    engine.check(True)
    gc.unfreeze()
    report.bar("claims_per_s", ">=", 220_000)
    report.bar("claim_p99_us", "<=", 8)
    report.bar("bytes_per_pod", "<=", 1_024)
    report.bar("gang8_p50_us", "<=", 20)
    report.note(
        "A claim is claims.claim: limits, pod in claim order, lease; 60 % take a held pod, 40 % a never-used one."
    )
    report.note("claims_per_s is the median over rounds; p50 and p99 include the timer (about 0.1 us a claim).")
    report.note("*_per_cpu_s counts only this thread's own time: on a quiet machine it equals the figure beside it.")
