"""A pod's annotations: the cheap copy of who used it last, so that it can be retired without asking the store (spec §3).

Writing (`MarkRunning`, `MarkReleased`) and reading back (recovery) live together here so that they cannot drift apart.
"""

from collections.abc import Mapping

from firepool_broker.core.asks import LastUse
from firepool_broker.core.effects import MarkReleased, MarkRunning
from firepool_broker.core.ids import Caller, Queue, ReuseTag

PREFIX = "firepool.dev/"
_CALLER, _QUEUE, _TAG = PREFIX + "caller", PREFIX + "queue", PREFIX + "tag"
_RETIRE, _RELEASED, _HOLD = PREFIX + "retire-after", PREFIX + "released-at", PREFIX + "hold-deadline"


def running(effect: MarkRunning) -> dict[str, str | None]:
    """Annotations of a pod that a job runs on."""
    return {
        _CALLER: effect.caller,
        _QUEUE: effect.queue,
        _TAG: effect.tag,
        _RETIRE: "true" if effect.retire_after else None,
        _RELEASED: None,
        _HOLD: None,
    }


def released(effect: MarkReleased) -> dict[str, str | None]:
    """Annotations of a pod that is held for its owner."""
    return {_RELEASED: repr(effect.released_at), _HOLD: repr(effect.hold_deadline)}


def last_use(annotations: Mapping[str, str]) -> LastUse | None:
    """What the annotations say; None = never used (or not annotated)."""
    caller = annotations.get(_CALLER)
    if caller is None:
        return None
    tag = annotations.get(_TAG)
    return LastUse(
        caller=Caller(caller),
        queue=Queue(annotations.get(_QUEUE, "default")),
        tag=ReuseTag(tag) if tag is not None else None,
        released_at=_seconds(annotations.get(_RELEASED)),
        hold_deadline=_seconds(annotations.get(_HOLD)),
        retire_after=annotations.get(_RETIRE) == "true",
    )


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:  # someone edited it: as if it were not there, the other two witnesses decide
        return None
