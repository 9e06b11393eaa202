"""The wheel: exact on whole seconds, at most a sixteenth late elsewhere, nothing left behind by what was disarmed.

Rooms: `timers`, `records`.
"""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from firepool_broker.core.records import Record
from firepool_broker.core.timers import Timers


def test_a_whole_second_fires_exactly_on_time() -> None:
    timers, record = Timers(), Record("r")
    timers.arm(record, 160.0)
    assert timers.due(159.99, 10) == []
    assert timers.next() == 160.0
    assert timers.due(160.0, 10) == [record]
    assert timers.next() == inf


@given(st.floats(0.001, 1e10), st.floats(0, 100))
def test_a_timer_never_fires_early_and_at_most_a_sixteenth_late(due: float, before: float) -> None:
    timers, record = Timers(), Record("r")
    timers.arm(record, due)
    assert due <= timers.next() <= due + 1 / 16
    assert timers.due(due - before - 1e-3 - due * 1e-12, 10) == []
    assert timers.due(timers.next(), 10) == [record]


def test_arming_again_moves_the_timer() -> None:
    timers, record = Timers(), Record("r")
    timers.arm(record, 10.0)
    timers.arm(record, 5.0)
    assert timers.due(5.0, 10) == [record]
    assert timers.due(10.0, 10) == []


def test_a_disarmed_timer_leaves_nothing_behind() -> None:
    timers = Timers()
    records = [Record(str(number)) for number in range(100)]
    for record in records:
        timers.arm(record, 300.0)
        timers.disarm(record)
        timers.disarm(record)
    assert timers.next() == inf
    assert not timers._slots


def test_arm_by_keeps_an_earlier_time_and_takes_an_earlier_one() -> None:
    timers, record = Timers(), Record("r")
    timers.arm_by(record, 10.0)
    timers.arm_by(record, 20.0)
    assert timers.next() == 10.0
    timers.arm_by(record, 5.0)
    assert timers.next() == 5.0


def test_an_infinite_deadline_is_none() -> None:
    timers, record = Timers(), Record("r")
    timers.arm(record, 1.0)
    timers.arm(record, inf)
    assert timers.next() == inf


def test_a_limit_leaves_the_rest_due() -> None:
    timers = Timers()
    for number in range(10):
        timers.arm(Record(str(number)), 1.0)
    assert len(timers.due(1.0, 4)) == 4
    assert timers.next() == 1.0
    assert len(timers.due(1.0, 100)) == 6
