"""Rows, live views and fresh submissions as `JobBody`: what every endpoint that shows a job answers."""

from collections.abc import Sequence
from typing import Any, cast

from firepool_broker.api.needs import Accepted, Broker
from firepool_broker.api.schemas import ErrorBody, JobBody, OutputBody, UsageBody, WaitingBody
from firepool_broker.core.ids import JobId
from firepool_broker.shell.ports import Identity, JobRow
from firepool_wire.errors import FirepoolError
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import TERMINAL

#: Span, from, to (spec §2): Submit→first, Pod→first, queue wait, hand-off, the function's own run time.
_SPANS = (
    ("submit_to_first_s", "submitted", "first_instruction"),
    ("pod_to_first_s", "claimed", "first_instruction"),
    ("queue_wait_s", "submitted", "claimed"),
    ("handoff_s", "committed", "launched"),
    ("run_s", "first_instruction", "ended"),
)

#: Looks at queued jobs that one list may cost (about 0.2 µs each).
_LOOKS = 20_000

_NO_FACTS: dict[str, Any] = {}


def name_of(spec: JobSpec) -> str:
    """The job's name in tables: its function's, or the program it runs."""
    if spec.entrypoint.function is not None:
        return spec.entrypoint.function.name or spec.entrypoint.function.import_path or "function"
    argv = spec.entrypoint.argv or ("",)
    return argv[0].rpartition("/")[2]


def fresh_body(taken: Accepted, who: Identity, spec: JobSpec, now: float) -> JobBody:
    """A job that was taken just now, without reading its row back."""
    row = JobRow(
        job=taken.job,
        caller=who.caller,
        person=who.person,
        spec=spec,
        state=taken.state,
        version=1,
        retry_count=0,
        infra_retries=0,
        cancel_requested=False,
        submitted_at=now,
        updated_at=now,
        attempt=None,
        token=None,
        pods=(),
        retire_after=(),
        path=None,
        why_not_warmer="",
        facts=_NO_FACTS,
        result=None,
        result_blob=None,
        seq=0,
    )
    return row_body(row)


def row_body(row: JobRow, waiting: WaitingBody | None = None) -> JobBody:
    """A job from its row; `waiting` where the engine still knows why it does not run."""
    facts, spec = row.facts, row.spec
    times: dict[str, float] = facts.get("times") or {}
    ended = row.state in TERMINAL
    return {
        "id": row.job,
        "state": row.state,
        "caller": row.caller,
        "person": row.person,
        "name": name_of(spec),
        "sku": spec.sku,
        "queue": spec.queue,
        "lease_tag": spec.lease_tag,
        "labels": spec.labels,
        "run": spec.run,
        "idempotency_key": spec.idempotency_key,
        "submitted_at": row.submitted_at,
        "started_at": _started(times),
        "ended_at": times.get("ended", row.updated_at) if ended else None,
        "retry_count": row.retry_count,
        "cancel_requested": row.cancel_requested,
        "path": row.path or facts.get("path"),
        "why_not_warmer": row.why_not_warmer or facts.get("why_not_warmer") or None,
        "exit_code": facts.get("exit_code"),
        "signal": facts.get("signal"),
        "error": facts.get("error"),
        "times": with_spans(times, row.submitted_at, facts.get("launch_to_first_instruction_s")),
        "usage": _usage(facts),
        "dropped_env": list(facts.get("dropped_env") or ()),
        "outputs": outputs_of(row),
        "discarded_bytes": facts.get("discarded_bytes") or 0,
        "waiting": waiting,
        "pods": list(row.pods),
        "result_bytes": facts.get("result_bytes") or len(row.result or b""),
        "log_bytes": facts.get("log_bytes") or 0,
        "seq": row.seq,
    }


def _started(times: dict[str, float]) -> float | None:
    return times.get("first_instruction") or times.get("launched") or times.get("committed")


def error_body(error: FirepoolError) -> ErrorBody:
    """An error inside an answer that is itself good."""
    return cast("ErrorBody", error.to_json())


def live_body(runner: Broker, row: JobRow) -> JobBody:
    """A job from its row; while it is not over with what it waits for, and the milestones that only the engine has."""
    if row.state in TERMINAL:
        return row_body(row)
    body = row_body(row, waiting_of(runner, row.job))
    view = runner.engine.job_view(JobId(row.job))
    if view is not None and view.times:
        times = dict(view.times)
        body["times"] = with_spans(times, row.submitted_at)
        body["started_at"] = _started(times)
    return body


def listed_bodies(runner: Broker, rows: Sequence[JobRow]) -> list[JobBody]:
    """Jobs from their rows. What they wait for is left out where finding it would hold the event loop up: it costs a
    look at the whole queue for each."""
    queued = sum(view.queued_jobs for view in runner.engine.pool_views())
    waits = [row for row in rows if row.state not in TERMINAL]
    cheap = len(waits) * queued <= _LOOKS
    return [live_body(runner, row) if cheap else row_body(row) for row in rows]


def waiting_of(runner: Broker, job: str) -> WaitingBody | None:
    """What keeps the job from running, as the engine sees it now; None: it runs, or is over."""
    told = runner.engine.explain(JobId(job), runner.now())
    if told is None or (told.position is None and not told.blocked_by):
        return None
    return {
        "position": told.position,
        "blocked_by": told.blocked_by or None,
        "sentence": told.sentence,
        "waiting_s": told.waiting_s,
        "holders": [{"caller": h.caller, "running": h.running, "held": h.held} for h in told.holders],
    }


def outputs_of(row: JobRow) -> list[OutputBody]:
    """The stored output files of a job."""
    return [
        {"path": entry["path"], "bytes": entry["bytes"], "digest": entry["digest"]}
        for entry in row.facts.get("outputs") or ()
    ]


def with_spans(
    times: dict[str, float], submitted_at: float, launch_to_first_s: float | None = None
) -> dict[str, float]:
    """Milestones with the paper's spans (seconds) derived from them, as far as they were reached.

    `launch_to_first_s`: by the pod's own clock (the broker hears of a launch later than it happens).
    """
    if not times:
        return {}
    out = {"submitted": submitted_at, **times}
    for span, begin, end in _SPANS:
        if begin in out and end in out:
            out[span] = max(0.0, out[end] - out[begin])
    if launch_to_first_s is not None:
        out["launch_to_first_s"] = launch_to_first_s
    return out


def _usage(facts: dict[str, Any]) -> UsageBody:
    usage = facts.get("usage") or {}
    return {
        "peak_rss_bytes": usage.get("peak_rss_bytes"),
        "cpu_s": usage.get("cpu_s"),
        "peak_device_bytes": usage.get("peak_device_bytes"),
    }
