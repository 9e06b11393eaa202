"""Whole job cycles through the engine's door among 100,000 pods, without I/O (spec §15).

A cycle is the eight events from submit to released: submitted, prepared, committed, launched, first instruction, ended, end
committed, reset clean; making the events and reading the effects is part of it. Beside that: one reconcile of all pools, the
expiry of everything that can expire, a template rollout, and the longest single `handle` call of all of them.
"""

import gc
from array import array
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random
from time import perf_counter, thread_time

from benchmarks.harness import Context
from benchmarks.stats import median
from benchmarks.tracker import PODS, SKUS, T0, ask, broker_start, pool, start_events
from firepool_broker.core.asks import Ask, Exit
from firepool_broker.core.effects import DeletePod, Effect, PrepareLease, WakeAt
from firepool_broker.core.engine import Engine
from firepool_broker.core.events import (
    AttemptEnded,
    Committed,
    EndCommitted,
    Event,
    FirstInstruction,
    JobSubmitted,
    Launched,
    LeasePrepared,
    PodGone,
    PoolsConfigured,
    ResetClean,
    Woke,
)
from firepool_broker.core.ids import PodName, TemplateDigest
from firepool_broker.main import GC_THRESHOLDS

NAME = "engine"

_OK = Exit(exit_code=0)
#: Pods of a rollout that are followed until they are gone (all 100,000, one by one per pool, would take long).
ROLLED_OUT = 2_000


class Calls:
    """Durations of `handle` calls, kept in flat arrays so that the benchmark's own memory gives the collector no work."""

    def __init__(self) -> None:
        #: Seconds by the clock, and seconds of this thread (without what else ran on the core).
        self.wall_s = array("d")
        self.cpu_s = array("d")
        #: Event of the call that was longest in this thread's time.
        self.longest_event = ""
        self._longest_s = 0.0

    def add(self, wall_s: float, cpu_s: float, event: Event) -> None:
        """One call."""
        self.wall_s.append(wall_s)
        self.cpu_s.append(cpu_s)
        if cpu_s > self._longest_s:
            self._longest_s = cpu_s
            self.longest_event = type(event).__name__

    def row(self, name: str) -> tuple[str, int, float, float, float, str]:
        """Line of the table for people, milliseconds."""
        return (
            name,
            len(self.wall_s),
            sum(self.wall_s) * 1e3,
            max(self.wall_s) * 1e3,
            max(self.cpu_s) * 1e3,
            self.longest_event,
        )


class Driver:
    """Feeds an engine, keeps its clock and its wake-ups, and times every `handle` when asked to."""

    def __init__(self, engine: Engine, now: float = T0) -> None:
        self.engine = engine
        self.now = now
        self.wake_at = inf
        #: Pods whose deletion was asked for: gone before the next wake-up.
        self.deleted: list[PodName] = []
        #: Pods reported gone so far, and how many shall be.
        self.buried = 0
        self.bury_until = PODS * 10
        #: Every `handle` call; None = not timed.
        self.took: Calls | None = None

    @classmethod
    def with_pods(cls, count: int, *, idle_timeout_s: float = 1e6, hold_s: float = 1e6) -> "Driver":
        """An engine that has just started and found `count` pods."""
        driver = cls(Engine())
        for event in start_events(count, idle_timeout_s=idle_timeout_s, hold_s=hold_s):
            driver.give(event)
        return driver

    def give(self, event: Event) -> list[Effect]:
        """One event; its effects."""
        if self.took is None:
            effects = self.engine.handle(event, self.now)
        else:
            cpu, wall = thread_time(), perf_counter()
            effects = self.engine.handle(event, self.now)
            wall, cpu = perf_counter() - wall, thread_time() - cpu
            self.took.add(wall, cpu, event)
        for effect in effects:
            if type(effect) is WakeAt:
                self.wake_at = min(self.wake_at, effect.at)
            elif type(effect) is DeletePod:
                self.deleted.append(effect.pod)
        return effects

    def advance(self, until: float) -> None:
        """Time passes; wake-ups that are due on the way are given, and deleted pods are reported gone."""
        self._bury()
        while self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.wake_at = inf
            self.give(Woke())
            self._bury()
        self.now = until

    def _bury(self) -> None:
        while self.deleted and self.buried < self.bury_until:
            self.buried += 1
            self.give(PodGone(self.deleted.pop(), "deleted"))

    def cycle(self, wanted: Ask) -> PodName:
        """One job from submit to released; the pod that it ran on."""
        give = self.give
        for effect in give(JobSubmitted(wanted)):
            if type(effect) is PrepareLease:
                attempt, pod = effect.attempt, effect.pod
                break
        else:
            raise AssertionError(f"{wanted.job} was not claimed at once")
        give(LeasePrepared(attempt, pod))
        give(Committed(attempt))
        give(Launched(attempt, pod))
        give(FirstInstruction(attempt, pod, self.now))
        give(AttemptEnded(attempt, pod, _OK))
        give(EndCommitted(attempt))
        give(ResetClean(pod, attempt))
        return pod


def asks(seed: int) -> Iterator[Ask]:
    """Jobs without end."""
    dice = Random(seed)
    number = 0
    while True:
        yield ask(number, dice)
        number += 1


def cycles_per_s(driver: Driver, jobs: Iterator[Ask], batch: int, rounds: int) -> list[tuple[float, float]]:
    """Cycles per second of each round, by the clock and by this thread's own time; the engine's clock runs as fast as it
    is meant to."""
    rates = []
    for number in range(rounds + 1):
        wanted = [next(jobs) for _ in range(batch)]
        cpu, wall = thread_time(), perf_counter()
        for each in wanted:
            driver.advance(driver.now + 1 / 15_000)
            driver.cycle(each)
        wall, cpu = perf_counter() - wall, thread_time() - cpu
        if number:  # the first round warms caches up
            rates.append((batch / wall, batch / cpu))
    return rates


def reconcile_s(driver: Driver, rounds: int) -> list[float]:
    """Seconds of each reconcile of every pool: all that one reconcile interval wakes up for."""
    took = []
    for _ in range(rounds):
        calls = driver.took = Calls()
        driver.advance(driver.now + 30.0)
        took.append(sum(calls.wall_s))
    return took


def expiry() -> Calls:
    """40,000 keep-alives and 60,000 holds run out at the same instant: the calls until the last pod is gone."""
    driver = Driver.with_pods(PODS, idle_timeout_s=200.0, hold_s=160.0)
    gc.collect()
    gc.freeze()
    driver.took = Calls()
    driver.advance(T0 + 200.0)
    left = len(driver.engine.pod_views())
    assert not left, f"{left} pods outlived their holds and keep-alives"
    return driver.took


def rollout(driver: Driver) -> Calls:
    """Every pool gets a new template: 100,000 pods are stale at once, and are drained one by one."""
    driver.took = Calls()
    driver.bury_until = driver.buried + ROLLED_OUT
    driver.give(PoolsConfigured(tuple(replace(pool(n), template=TemplateDigest("t1")) for n in range(SKUS))))
    driver.advance(driver.now + 2.0)
    return driver.took


def start_s() -> float:
    """Seconds of the one `handle` that takes over 100,000 pods after a restart."""
    engine = Engine()
    engine.handle(PoolsConfigured(tuple(pool(n) for n in range(SKUS))), T0)
    event = broker_start(PODS)
    gc.collect()
    began = perf_counter()
    engine.handle(event, T0)
    return perf_counter() - began


def run(ctx: Context) -> None:
    """Measure and report, with the garbage collector set as the broker sets it."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        _run(ctx)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _run(ctx: Context) -> None:
    report = ctx.report
    batch, rounds = (3_000, 5) if ctx.quick else (10_000, 12)
    ctx.say(f"an engine with {PODS:,} pods …")
    report.figure("start_100k_ms", start_s() * 1e3)
    driver = Driver.with_pods(PODS)
    # As the broker does once it is up: what lives long is not scanned again.
    gc.collect()
    gc.freeze()
    ctx.say(f"{rounds} rounds of {batch:,} cycles …")
    jobs = asks(ctx.seed)
    rates = cycles_per_s(driver, jobs, batch, rounds)
    report.figure("cycles_per_s", median(wall for wall, _ in rates), len(rates))
    report.figure("cycles_per_cpu_s", median(cpu for _, cpu in rates), len(rates))
    calls = driver.took = Calls()
    for _ in range(batch):
        driver.advance(driver.now + 1 / 15_000)
        driver.cycle(next(jobs))
    report.latencies("handle", calls.wall_s, "us")
    ctx.say("reconcile, rollout, expiry …")
    passes = reconcile_s(driver, 10)
    report.figure("reconcile_100k_ms", median(passes) * 1e3, len(passes))
    phases = {"cycles": calls, "rollout": rollout(driver), "expiry": expiry()}
    report.table(
        "handle calls by phase (cpu: without what else ran on the core)",
        ("phase", "calls", "all, ms", "longest, ms", "longest cpu, ms", "its event"),
        [took.row(name) for name, took in phases.items()],
    )
    count = sum(len(took.wall_s) for took in phases.values())
    report.figure("longest_handle_ms", max(max(took.wall_s) for took in phases.values()) * 1e3, count)
    report.figure("longest_handle_cpu_ms", max(max(took.cpu_s) for took in phases.values()) * 1e3, count)
    report.figure("expiry_100k_ms", sum(phases["expiry"].wall_s) * 1e3, len(phases["expiry"].wall_s))
    report.bar("cycles_per_s", ">=", 15_000)
    report.bar("reconcile_100k_ms", "<=", 60)
    report.bar("longest_handle_ms", "<=", 5)
    report.note(
        "reconcile_100k_ms: all calls that one 30 s reconcile interval wakes up for, over 10 pools with 100,000 pods."
    )
    report.note(
        "start_100k_ms is the one call that takes over 100,000 pods after a restart; it is not in longest_handle_ms."
    )
