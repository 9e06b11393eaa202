"""The programs that submit: lines of steps (spec §13), each step a barrier, run against one arm's pool; and what came of it."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import firepool_ray as firepool
from benchmarks import humaneval
from benchmarks.demo import bodies
from benchmarks.demo.venue import Venue
from benchmarks.stats import percentile
from firepool_broker.sim.load import Line, Step, Work, Workload
from firepool_ray import JobRef, RemoteFunction

#: A candidate may run this long; an infinite loop ends here.
RUN_TIMEOUT_S = 1.0
MEMORY_MIB = 256
EVALUATION_PROGRAMS = 6

Advance = Callable[[str], None]
P = ParamSpec("P")
R = TypeVar("R")


def jobs_of(workload: Workload) -> int:
    """Jobs of a workload."""
    return sum(len(step.works) for line in workload.lines for step in line.steps)


@dataclass(slots=True)
class Result:
    """One workload in one arm."""

    workload: str
    arm: str
    wall_s: float
    #: (candidate kind, expected verdict, verdict) of every judged candidate.
    verdicts: list[tuple[str, str, str]]
    #: Jobs as the API shows them.
    jobs: list[dict[str, Any]]

    def span(self, name: str, q: float) -> float:
        """A percentile of one span (seconds) over the jobs that have it; NaN where none has."""
        found = [job["times"][name] for job in self.jobs if name in job["times"]]
        return percentile(found, q) if found else float("nan")

    @property
    def paths(self) -> Counter[str]:
        """Jobs by acquisition path."""
        return Counter(str(job["path"]) for job in self.jobs if job["path"])

    @property
    def reuse(self) -> float:
        """Share of jobs that started without a new pod (audit F14); NaN without jobs."""
        paths = self.paths
        return (paths["warm"] + paths["recycled"] + paths["standby"]) / paths.total() if paths else float("nan")

    @property
    def right(self) -> int:
        """Verdicts that are as expected."""
        return sum(expected == verdict for _, expected, verdict in self.verdicts)

    def figures(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "workload": self.workload,
            "arm": self.arm,
            "jobs": len(self.jobs),
            "wall_s": self.wall_s,
            "submit_to_first_p50_s": self.span("submit_to_first_s", 0.5),
            "submit_to_first_p90_s": self.span("submit_to_first_s", 0.9),
            "paths": dict(self.paths),
            "verdicts": len(self.verdicts),
            "verdicts_right": self.right,
        }


@dataclass(slots=True)
class Loop:
    """A workload bound to an arm."""

    workload: Workload
    arm: str
    seed: int
    full: bool = False
    _verdicts: list[tuple[str, str, str]] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, venue: Venue, advance: Advance) -> Result:
        """Run every line in a thread of its own, as separate agents would. Raises: what a line raised."""
        name = f"{self.workload.name}-{self.arm}"
        failed: list[BaseException] = []

        def guarded(number: int, line: Line) -> None:
            try:
                self._line(number, line, name, advance)
            except BaseException as error:  # carried over to the caller's thread, below
                failed.append(error)

        threads = [threading.Thread(target=guarded, args=(n, line)) for n, line in enumerate(self.workload.lines)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return Result(self.workload.name, self.arm, time.monotonic() - began, self._verdicts, venue.bodies(name))

    def _line(self, number: int, line: Line, run: str, advance: Advance) -> None:
        count = sum(len(step.works) for step in line.steps)
        candidates = iter(humaneval.rollouts(count, self.seed + number))
        for step in line.steps:
            time.sleep(step.pause_s)
            self._step(step, candidates, run, advance)

    def _step(self, step: Step, candidates: Any, run: str, advance: Advance) -> None:
        started = []
        for work in step.works:
            candidate = next(candidates)
            started.append((candidate, work, self._submit(work, candidate, run)))
        for candidate, work, ref in started:
            try:
                outcome: object = firepool.get(ref)
            except Exception as error:
                outcome = error
            advance(self.arm)
            self._note(work, candidate, outcome)

    def _submit(self, work: Work, candidate: humaneval.Candidate, run: str) -> JobRef[Any]:
        body_s = work.body_s if self.full else 0.0
        if work.kind == "update":
            with self._lock:
                rewards, self._rewards = self._rewards, []
            return self._bound(bodies.update, work, run).remote(rewards, body_s)
        if work.kind == "evaluation":
            known = [c.program for c in humaneval.canonical()[:EVALUATION_PROGRAMS]]
            return self._bound(bodies.evaluation, work, run).remote(known, body_s)
        if work.kind == "verify":
            candidate = humaneval.candidate(candidate.task, "canonical")
        return self._bound(bodies.rollout, work, run).remote(candidate.program, body_s)

    def _bound(self, body: Callable[P, R], work: Work, run: str) -> RemoteFunction[P, R]:
        """The body as a remote function with this arm's options."""
        return firepool.remote(body).options(
            sku=f"demo-{self.arm}",
            lease_tag=work.tag,
            single_use=work.single_use,
            run=run,
            untrusted=True,
            run_timeout_s=RUN_TIMEOUT_S + (work.body_s if self.full else 0.0),
            memory_mib=MEMORY_MIB,
        )

    def _note(self, work: Work, candidate: humaneval.Candidate, outcome: object) -> None:
        if work.kind in ("update", "evaluation"):
            if isinstance(outcome, BaseException):
                raise outcome
            return
        kind = "canonical" if work.kind == "verify" else candidate.kind
        expected, verdict = humaneval.EXPECTED[kind][0], humaneval.verdict(outcome)
        with self._lock:
            self._verdicts.append((kind, expected, verdict))
            if verdict != "no verdict":
                self._rewards.append(float(verdict == "passed"))
