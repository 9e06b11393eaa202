"""Submit call → first instruction of the function in a warm local pod, against a bare `python -c pass` (paper C.4).

Serial, through the whole house: SDK, HTTP, engine, durable store, agent, a fork with a fresh user. The function's first
instruction reads CLOCK_MONOTONIC, which pods share with this process. Every sample is followed by one of the baseline: the
job's own interpreter started for nothing and waited for, by `posix_spawn`, the cheapest way there is.
"""

import os
import time
from dataclasses import dataclass

import firepool_ray as firepool
from benchmarks.harness import Context
from benchmarks.stats import percentile
from benchmarks.venue import Venue, pool

NAME = "warm_start"

SKU = "warm"
WARM_UP = 10
#: Stages of a start as the paper has them, with the marks that bound each: times of the job, and of this process.
STAGES = {
    "accept": ("called", "submitted"),
    "dispatch": ("submitted", "committed"),
    "handoff": ("committed", "released"),
    "first_instruction": ("released", "ran"),
}


@firepool.remote(sku=SKU, lease_tag="loop", ship="value")
def first_instruction() -> int:
    """CLOCK_MONOTONIC where and when it runs, nanoseconds."""
    import time

    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Sample:
    """One start: the job, and clocks of this process around it."""

    job: str
    #: Epoch seconds of the call and of the first instruction, by this process's clock.
    called: float
    ran: float


def start_once() -> Sample:
    """Submit a job, wait for its end."""
    epoch = time.time() - time.monotonic()
    called_ns = time.monotonic_ns()
    ref = first_instruction.remote()
    ran_ns = firepool.get(ref)
    assert ref.job_id is not None, "a job that ended has an id"
    return Sample(ref.job_id, epoch + called_ns / 1e9, epoch + ran_ns / 1e9)


def bare_python(python: str) -> float:
    """Seconds of a bare `python -c pass`, start to reaped end."""
    began = time.perf_counter()
    child = os.posix_spawn(python, [python, "-c", "pass"], os.environ)
    _, status = os.waitpid(child, 0)
    took_s = time.perf_counter() - began
    if status != 0:
        raise RuntimeError(f"{python} -c pass ended with wait status {status}")
    return took_s


def stages(venue: Venue, samples: list[Sample]) -> dict[str, list[float]]:
    """Seconds of every stage of every sample that the broker calls warm."""
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for sample in samples:
        body = venue.body(sample.job)
        if body["path"] != "warm":
            raise RuntimeError(f"job {sample.job} was not warm: {body['path']}: {body['why_not_warmer']}")
        times = body["times"]
        # The agent lets the process go well before the broker hears of it; it tells how long before the first instruction.
        released = sample.ran - times["launch_to_first_s"]
        marks = {**times, "called": sample.called, "released": released, "ran": sample.ran}
        for stage, (begin, end) in STAGES.items():
            found[stage].append(marks[end] - marks[begin])
    return found


def run(ctx: Context) -> None:
    """Measure and report."""
    report, count = ctx.report, 100 if ctx.quick else 500
    with Venue(pool(SKU, pods=1, ready=1)) as venue:
        python = venue.interpreter(SKU)
        ctx.say(f"{count} warm starts, each followed by a bare {python} -c pass …")
        samples: list[Sample] = []
        bare_s: list[float] = []
        for number in range(WARM_UP + count):
            if ctx.out_of_time():
                break
            sample, bare = start_once(), bare_python(python)
            if number >= WARM_UP:
                samples.append(sample)
                bare_s.append(bare)
        staged = stages(venue, samples)
    warm_s = [sample.ran - sample.called for sample in samples]
    report.latencies("warm", warm_s)
    report.figure("bare_python_p50_ms", percentile(bare_s, 0.5) * 1e3, len(bare_s))
    report.figure("ratio_to_bare_python", percentile(warm_s, 0.5) / percentile(bare_s, 0.5), len(warm_s))
    for stage, seconds in staged.items():
        report.figure(f"{stage}_p50_ms", percentile(seconds, 0.5) * 1e3, len(seconds))
    report.bar("warm_p50_ms", "<=", 8)
    report.bar("ratio_to_bare_python", "<=", 0.6)
    report.note(
        "accept: the call until the broker has read the request; dispatch: until the start is durable; handoff: until the "
        "agent lets the process go; first_instruction: from then on."
    )
    report.note(f"One pod of the level that this machine gives; job interpreter {python}.")
