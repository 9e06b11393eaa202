"""What jobs used, by caller, person and SKU: from the facts of jobs that are over."""

from typing import Annotated, Any

from fastapi import Query, Request, Response
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role
from firepool_broker.api.lobby import caller_asked_for, lobby
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.scan import Scan
from firepool_broker.shell.ports import JobFilter, JobRow
from firepool_wire.words import TERMINAL

api = router()


class UsageRow(TypedDict):
    """One caller's, person's use of one SKU."""

    caller: str
    person: str
    sku: str
    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    #: Attempts that were started, retries included.
    attempts: int
    #: Seconds from a start's commit to its end, times the pods it held (final attempts).
    pod_s: float
    cpu_s: float
    peak_rss_bytes: int | None
    peak_device_bytes: int | None


class UsageList(TypedDict):
    """Use, largest first."""

    usage: list[UsageRow]
    since: float | None
    #: Only the newest jobs were counted: there are more than one answer reads. Narrow it with `since`.
    truncated: bool


SHAPES = (UsageList,)


@api.get("/v1/usage", **declared(Role.VIEWER, ok={200: json_of("UsageList")}))
async def usage(
    request: Request,
    caller: Annotated[str | None, Query(description="operators only; absent: every caller")] = None,
    sku: str | None = None,
    run: str | None = None,
    since: Annotated[float | None, Query(ge=0, description="jobs submitted since (epoch seconds)")] = None,
) -> Response:
    """Use of the caller's jobs that are over."""
    where = JobFilter(caller=caller_asked_for(request, caller), states=tuple(TERMINAL), sku=sku, run=run)
    scan = Scan(lobby(request), where)
    rows: dict[tuple[str, str, str], UsageRow] = {}
    async for row in scan.rows():
        if since is not None and row.submitted_at < since:
            break
        key = (row.caller, row.person, row.spec.sku)
        _add(rows.setdefault(key, _empty(*key)), row)
    ordered = sorted(rows.values(), key=lambda r: (-r["pod_s"], r["caller"], r["person"], r["sku"]))
    body: UsageList = {"usage": ordered, "since": since, "truncated": scan.truncated}
    return answer(body)


def _empty(caller: str, person: str, sku: str) -> UsageRow:
    return {
        "caller": caller,
        "person": person,
        "sku": sku,
        "jobs": 0,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 0,
        "attempts": 0,
        "pod_s": 0.0,
        "cpu_s": 0.0,
        "peak_rss_bytes": None,
        "peak_device_bytes": None,
    }


def _add(to: UsageRow, row: JobRow) -> None:
    facts = row.facts
    times: dict[str, float] = facts.get("times") or {}
    used: dict[str, Any] = facts.get("usage") or {}
    to["jobs"] += 1
    if row.state.value == "SUCCEEDED":
        to["succeeded"] += 1
    elif row.state.value == "FAILED":
        to["failed"] += 1
    else:
        to["cancelled"] += 1
    began = times.get("committed")
    to["attempts"] += row.retry_count + (1 if began is not None else 0)
    if began is not None and "ended" in times:
        to["pod_s"] += max(0.0, times["ended"] - began) * row.spec.pods
    to["cpu_s"] += used.get("cpu_s") or 0.0
    to["peak_rss_bytes"] = _most(to["peak_rss_bytes"], used.get("peak_rss_bytes"))
    to["peak_device_bytes"] = _most(to["peak_device_bytes"], used.get("peak_device_bytes"))


def _most(a: int | None, b: int | None) -> int | None:
    return max((v for v in (a, b) if v is not None), default=None)
