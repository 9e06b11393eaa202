"""A run is the jobs that carry its name: progress, what went wrong by class and fault, how long they waited; cancel."""

from collections import Counter
from typing import Any

from fastapi import Request, Response
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role, no_such
from firepool_broker.api.bodies import with_spans
from firepool_broker.api.lobby import caller_asked_for, lobby, who
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.scan import Scan, percentile
from firepool_broker.shell.ports import JobFilter, JobRow
from firepool_wire.errors import NotFound
from firepool_wire.words import JobState

api = router()


class Percentiles(TypedDict):
    """A distribution in seconds; null: no figures."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class RunBody(TypedDict):
    """A run so far."""

    run: str
    jobs: int
    by_state: dict[str, int]
    #: Errors of jobs that are over, by class and by whose fault.
    by_class: dict[str, int]
    by_fault: dict[str, int]
    #: How jobs got their pods.
    by_path: dict[str, int]
    retries: int
    submitted_at: float | None
    ended_at: float | None
    queue_wait_s: Percentiles
    submit_to_first_s: Percentiles
    #: The figures below `by_state` cover only the newest jobs of a very large run.
    truncated: bool


class Cancelling(TypedDict):
    """Jobs that were asked to end."""

    cancelling: int


SHAPES = (RunBody, Cancelling)


@api.get("/v1/runs/{run:path}", **declared(Role.VIEWER, NotFound, ok={200: json_of("RunBody")}))
async def get(request: Request, run: str, caller: str | None = None) -> Response:
    """Progress and outcome of a run."""
    desk = lobby(request)
    owner = caller_asked_for(request, caller)
    counts = await desk.runner.store.counts(owner, run)
    if not sum(counts.values()):
        raise no_such("run", run)
    tally = _Tally()
    scan = Scan(desk, JobFilter(caller=owner, run=run))
    async for row in scan.rows():
        tally.add(row)
    body: RunBody = {
        "run": run,
        "jobs": sum(counts.values()),
        "by_state": {str(state): count for state, count in counts.items()},
        "by_class": dict(tally.classes),
        "by_fault": dict(tally.faults),
        "by_path": dict(tally.paths),
        "retries": tally.retries,
        "submitted_at": tally.first,
        "ended_at": tally.last,
        "queue_wait_s": _spread(tally.spans["queue_wait_s"]),
        "submit_to_first_s": _spread(tally.spans["submit_to_first_s"]),
        "truncated": scan.truncated,
    }
    return answer(body)


@api.post("/v1/runs/{run:path}:cancel", **declared(Role.SUBMITTER, NotFound, ok={202: json_of("Cancelling")}))
async def cancel(request: Request, run: str) -> Response:
    """Ask for the end of every job of the caller's run that is not over."""
    desk, me = lobby(request), who(request)
    if not sum((await desk.runner.store.counts(me.caller, run)).values()):
        raise no_such("run", run)
    alive = (JobState.PENDING, JobState.QUEUED, JobState.RUNNING)
    jobs = [row.job async for row in Scan(desk, JobFilter(caller=me.caller, run=run, states=alive)).rows()]
    for job in jobs:
        await desk.runner.cancel(me, job)
    told: Cancelling = {"cancelling": len(jobs)}
    return answer(told, 202)


class _Tally:
    """Figures of a run, gathered row by row."""

    def __init__(self) -> None:
        self.classes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.spans: dict[str, list[float]] = {"queue_wait_s": [], "submit_to_first_s": []}
        self.retries = 0
        self.first: float | None = None
        self.last: float | None = None

    def add(self, row: JobRow) -> None:
        error: dict[str, Any] | None = row.facts.get("error")
        if error is not None:
            self.classes[str(error.get("code"))] += 1
            self.faults[str(error.get("fault"))] += 1
        if row.path:
            self.paths[row.path] += 1
        self.retries += row.retry_count
        times = with_spans(row.facts.get("times") or {}, row.submitted_at)
        for span, values in self.spans.items():
            if span in times:
                values.append(times[span])
        self.first = min(self.first or row.submitted_at, row.submitted_at)
        if "ended" in times:
            self.last = max(self.last or 0.0, times["ended"])


def _spread(values: list[float]) -> Percentiles:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": percentile(ordered, 0.5),
        "p90": percentile(ordered, 0.9),
        "p99": percentile(ordered, 0.99),
    }
