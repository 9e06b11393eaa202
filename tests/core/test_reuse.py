"""Reuse boundaries as a table (spec §4, S11, S12)."""

import pytest

from firepool_broker.core.ids import Queue, ReuseTag
from firepool_broker.core.pods import ReuseKey
from firepool_broker.core.reuse import Crossing, Mode, admits, boundary_key, crossing, retires


def key(queue: str = "q", tag: str | None = None) -> ReuseKey:
    return Queue(queue), ReuseTag(tag) if tag is not None else None


@pytest.mark.parametrize(
    ("last", "job", "mode", "crossed"),
    [
        (key(), key(), "retire", Crossing.NONE),
        (key(tag="a"), key(tag="a"), "retire", Crossing.NONE),
        (key(tag="a"), key(tag="b"), "retire", Crossing.TAG),
        (key(tag="a"), key(), "retire", Crossing.TAG),
        (key(), key(tag="a"), "retire", Crossing.TAG),
        (key("q"), key("r"), "retire", Crossing.QUEUE),
        (key("q", "a"), key("r", "b"), "retire", Crossing.QUEUE),
        (key(tag="a"), key(tag="b"), "hint", Crossing.NONE),
        (key("q", "a"), key("r", "a"), "hint", Crossing.QUEUE),
    ],
)
def test_s11_s12_what_a_step_crosses(last: ReuseKey, job: ReuseKey, mode: Mode, crossed: Crossing) -> None:
    assert crossing(last, job, mode) is crossed
    assert admits(last, job, mode, run_once_across=True)
    assert admits(last, job, mode, run_once_across=False) is (crossed is Crossing.NONE)


def test_a_job_without_a_policy_to_cross_waits_for_an_equal_key() -> None:
    assert boundary_key(key(tag="a"), "retire", False) == key(tag="a")
    assert boundary_key(key(tag="a"), "hint", False) == key()
    assert boundary_key(key(tag="a"), "retire", True) is None


@pytest.mark.parametrize(
    ("crossed", "hold_s", "single_use", "retire"),
    [
        (Crossing.NONE, 60.0, False, False),
        (Crossing.NONE, 0.0, False, True),
        (Crossing.TAG, 60.0, False, True),
        (Crossing.QUEUE, 60.0, False, True),
        (Crossing.NONE, 60.0, True, True),
    ],
)
def test_retire_or_hold_is_decided_at_claim_time(
    crossed: Crossing, hold_s: float, single_use: bool, retire: bool
) -> None:
    assert retires(crossed, hold_s, single_use) is retire
