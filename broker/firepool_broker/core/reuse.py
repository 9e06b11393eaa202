"""What may cross a reuse boundary (spec §4, paper §5): pure rules on the last use of a pod and the next job's key.

The caller is no boundary that a rule could relax: a used pod is on its owner's shelf and nowhere else.
"""

from enum import IntEnum
from typing import Literal

from firepool_broker.core.pods import ReuseKey

Mode = Literal["retire", "hint"]


class Crossing(IntEnum):
    """What a job's start on its caller's held pod would cross."""

    #: Same queue and tag, or another tag where the tag only prefers.
    NONE = 0
    TAG = 1
    QUEUE = 2


def crossing(last: ReuseKey, job: ReuseKey, mode: Mode) -> Crossing:
    """What the step from a pod's last use to a job's crosses.

    In hint mode a tag is no boundary; the queue always is (audit row 26). An absent tag equals itself.
    """
    if last == job:
        return Crossing.NONE
    if last[0] != job[0]:
        return Crossing.QUEUE
    return Crossing.TAG if mode == "retire" else Crossing.NONE


def boundary_key(job: ReuseKey, mode: Mode, run_once_across: bool) -> ReuseKey | None:
    """What a held pod's key must equal for this job; None where the job may run once across any boundary."""
    if run_once_across:
        return None
    return job if mode == "retire" else (job[0], None)


def admits(last: ReuseKey, job: ReuseKey, mode: Mode, run_once_across: bool) -> bool:
    """Whether the job may start on its caller's pod that was last used so."""
    return run_once_across or crossing(last, job, mode) is Crossing.NONE


def retires(crossed: Crossing, hold_s: float, single_use: bool) -> bool:
    """Retire-or-hold, decided at claim time: after a crossing, without a hold, or as a single-use pod it retires."""
    return crossed is not Crossing.NONE or hold_s <= 0 or single_use
