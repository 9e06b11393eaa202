"""Why a job waits, or how it got its pods and why not warmer ones: in fields for programs and in words for people."""

from collections.abc import Iterable, Iterator, Mapping

from fastapi import Request, Response
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role
from firepool_broker.api.bodies import row_body, waiting_of
from firepool_broker.api.lobby import lobby, visible_row
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.schemas import ErrorBody, JobBody, WaitingBody
from firepool_wire.errors import NotFound
from firepool_wire.words import TERMINAL, JobState

api = router()


class ExplainBody(TypedDict):
    """A job explained."""

    job: str
    state: JobState
    #: How it got its pods, and why a warmer path was closed at its first refused claim.
    path: str | None
    why_not_warmer: str | None
    waiting: WaitingBody | None
    #: Milestones and the spans between them.
    times: dict[str, float]
    pods: list[str]
    retry_count: int
    error: ErrorBody | None
    #: What happened, oldest first, while the broker remembers.
    story: list[str]
    #: All of it in words.
    text: str


SHAPES = (ExplainBody,)

_PATHS = {
    "warm": "on a pod that was ready and warm",
    "recycled": "on its caller's own pod across a change of tag or queue (the pod retires afterwards)",
    "standby": "on a standby pod of a busy card",
    "new": "on a pod that became ready only after it was first refused",
    "custom_image": "on a pod of its own image",
    "single_use": "on a pod of its own that is deleted afterwards",
}

_WHYS = {
    "no_idle_pod_of_owner": "no pod of its caller and no never-used pod was free",
    "pool_at_ceiling": "the pool had reached its ceiling",
    "held_for_other_caller": "the free pods were held for other callers",
    "caller_quota": "its caller was at its limit",
    "tag_boundary": "the caller's free pods were of another tag or queue",
    "card_busy": "the card was busy",
    "card_not_exclusive": "the card was shared with strangers",
    "pods_starting": "pods were still starting",
    "gang_incomplete": "not all pods of the gang were free at once",
    "budget_exhausted": "the budget was spent",
    "stale_template": "the free pods were of an old template",
    "image_fence": "the free pods were of another image",
}

#: Spans that a sentence is made of.
_STAGES = (
    ("queue_wait_s", "waited for a pod"),
    ("handoff_s", "hand-off"),
    ("submit_to_first_s", "submission to first instruction"),
    ("run_s", "ran"),
)


@api.get("/v1/jobs/{job}/explain", **declared(Role.VIEWER, NotFound, ok={200: json_of("ExplainBody")}))
async def explain(request: Request, job: str) -> Response:
    """Explain a job."""
    row = await visible_row(request, job)
    runner = lobby(request).runner
    waiting = None if row.state in TERMINAL else waiting_of(runner, job)
    body = row_body(row, waiting)
    told: ExplainBody = {
        "job": row.job,
        "state": row.state,
        "path": body["path"],
        "why_not_warmer": body["why_not_warmer"],
        "waiting": waiting,
        "times": body["times"],
        "pods": body["pods"],
        "retry_count": row.retry_count,
        "error": body["error"],
        "story": runner.engine.story_of(job),
        "text": "\n".join((*_sentences(body), *_of_notes(row.facts.get("notes") or ()))),
    }
    return answer(told)


def _sentences(body: JobBody) -> Iterator[str]:
    yield f"Job {body['id']} ({body['name']}) on {body['sku']} is {body['state'].value}."
    if body["waiting"] is not None:
        yield from _of_waiting(body["waiting"])
    if body["path"] is not None:
        how = _PATHS.get(body["path"], body["path"])
        yield f"Path {body['path']}: it {'runs' if body['state'] is JobState.RUNNING else 'ran'} {how}."
    if body["why_not_warmer"] is not None:
        why = _WHYS.get(body["why_not_warmer"], body["why_not_warmer"])
        yield f"A warmer path was closed when it was first refused: {why} ({body['why_not_warmer']})."
    stages = [f"{words} {in_words(body['times'][span])}" for span, words in _STAGES if span in body["times"]]
    if stages:
        yield f"Times: {', '.join(stages)}."
    if body["retry_count"]:
        yield f"It was started again {body['retry_count']} times."
    if body["error"] is not None:
        yield f"{body['error']['code']} ({body['error']['fault']} fault): {body['error']['message']}"


def _of_notes(notes: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """What the agents noted while they made the attempt's inputs ready."""
    told = [str(note.get("message", "")) for note in notes]
    if told:
        yield f"In the pod: {'; '.join(told)}."


def _of_waiting(waiting: WaitingBody) -> Iterator[str]:
    place = f"Number {waiting['position']} in the queue" if waiting["position"] is not None else "Not in the queue"
    yield f"{place}, for {in_words(waiting['waiting_s'])}; {waiting['sentence']} ({waiting['blocked_by'] or 'no limit'})."
    if waiting["holders"]:
        whose = [f"{h['caller']} runs on {h['running']} and has {h['held']} held" for h in waiting["holders"]]
        yield f"Pods: {'; '.join(whose)}."


def in_words(seconds: float) -> str:
    """A span as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
