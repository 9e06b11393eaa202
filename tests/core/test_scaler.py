"""The scaler's equations: the worked examples of the audit (§3 F1–F4) as tables, and every property of F3 on an exhaustive
enumeration of small pools (S32–S36).
"""

from dataclasses import replace
from itertools import product

import pytest

from firepool_broker.core import scaler
from firepool_broker.core.scaler import Counts
from tests.builders import a_pool


@pytest.mark.parametrize(
    ("counts", "demand", "eligible", "physical", "deficit"),
    [
        pytest.param(Counts(queued=5, starting=1, idle=1, running=2, held=1), 7, 4, 5, 3, id="F1.1"),
        pytest.param(Counts(stale=3), 0, 0, 3, 0, id="F1.2 jobs on stale pods ask for nothing"),
        pytest.param(Counts(queued=4, idle=1, held=2, matched=1), 4, 2, 3, 2, id="F1.3 matched per owner"),
        pytest.param(Counts(running=1), 1, 1, 1, 0, id="F1.4 a group counts once"),
    ],
)
def test_demand_eligible_and_physical_are_the_papers(
    counts: Counts, demand: int, eligible: int, physical: int, deficit: int
) -> None:
    assert scaler.demand(counts) == demand
    assert scaler.eligible(counts) == eligible
    assert scaler.physical(counts) == physical
    assert scaler.demand_deficit(counts) == deficit


F1_1 = Counts(queued=5, starting=1, idle=1, running=2, held=1, floor=2, ceiling=8, step=4, headroom=10)
F2_2 = Counts(floor=4, ceiling=8, step=10, headroom=10, running=1, held=1, single_use=2)


@pytest.mark.parametrize(
    ("counts", "add"),
    [
        pytest.param(F1_1, 3, id="F2.1"),
        pytest.param(F2_2, 2, id="F2.2 single-use pods satisfy no floor (S35)"),
        pytest.param(
            Counts(ceiling=4, queued=6, running=2, held=2, stale=1, step=4, headroom=10), 0, id="F2.3 not below 0"
        ),
        pytest.param(Counts(queued=7, ceiling=16, step=4, headroom=2), 2, id="F2.4"),
        pytest.param(replace(F2_2, single_use=0, stale=2), 0, id="F2.5 stale pods satisfy the floor"),
        pytest.param(Counts(queued=5, starting=5, ceiling=16, step=8), 0, id="F2.6 starting pods are supply (S33)"),
    ],
)
def test_add_is_the_papers(counts: Counts, add: int) -> None:
    assert scaler.add(counts) == add


@pytest.mark.parametrize(
    ("counts", "remove"),
    [
        pytest.param(Counts(floor=1, max_idle=2, ceiling=8, idle=6, expired_idle=5, running=1), 4, id="F3.1"),
        pytest.param(Counts(floor=4, ceiling=8, idle=3, expired_idle=3, running=1, stale=3), 0, id="F3.2"),
        pytest.param(Counts(max_idle=5, ceiling=4, idle=3, expired_idle=3, running=2), 1, id="F3.3"),
        pytest.param(Counts(ceiling=8, idle=4, expired_idle=4, queued=3, starting=1), 2, id="F3.4"),
        pytest.param(Counts(floor=2, ceiling=8, idle=2, expired_idle=2, held=2), 2, id="F3.5"),
        pytest.param(Counts(max_idle=2, ceiling=1, idle=1, expired_idle=1, running=3, held=1), 1, id="F3.6"),
    ],
)
def test_remove_is_the_papers(counts: Counts, remove: int) -> None:
    assert scaler.remove(counts) == remove


def test_s33_a_negative_idle_cap_is_harmless() -> None:
    counts = Counts(max_idle=2, ceiling=1, idle=1, expired_idle=1, running=3, held=1)
    assert scaler.idle_cap(counts) == -3
    assert scaler.retain(counts) == 0


def test_f4_ceilings_round_down_to_whole_pods() -> None:
    assert a_pool(gpus=8, max_count=12).max_pods == 1
    assert a_pool(gpus=8, max_count=16).max_pods == 2
    assert a_pool(gpus=1, max_count=3).max_pods == 3


def small_pools() -> list[Counts]:
    """Every pool of a few pods: 5 categories of 0–2, with floors, caps and ceilings around them."""
    found = []
    for floor, max_idle, ceiling in product((0, 2), (0, 1, 3), (2, 3, 5)):
        for starting, idle, running, held, stale, single, dying in product(range(2), range(4), *[range(2)] * 5):
            for queued in (0, 1, 3):
                for expired in {0, idle}:
                    for matched in {0, min(held, queued)}:
                        found.append(
                            Counts(
                                floor=floor,
                                max_idle=max_idle,
                                ceiling=ceiling,
                                step=2,
                                queued=queued,
                                starting=starting,
                                idle=idle,
                                running=running,
                                held=held,
                                matched=matched,
                                stale=stale,
                                single_use=single,
                                terminating=dying,
                                expired_idle=expired,
                            )
                        )
    return found


def test_s30_s32_s34_s35_hold_on_every_small_pool() -> None:
    """S30 never above the ceiling, S32 never both, S34 never below the floor nor unexpired, S35 no creation for the idle cap."""
    checked = 0
    for c in small_pools():
        add, remove = scaler.add(c), scaler.remove(c)
        assert not (add and remove), f"S32 {c}"
        if add:
            assert scaler.physical(c) + add <= c.ceiling, f"S30 {c}"
            assert add <= c.step
            assert scaler.add(replace(c, max_idle=0)) == add, f"S35 {c}"
        if remove:
            warm = c.starting + c.idle + c.assigned + c.running + c.held
            assert warm - remove >= min(c.floor, warm), f"S34 {c}"
            assert remove <= c.expired_idle <= c.idle, f"S34 {c}"
        checked += 1
    assert checked > 20_000


def test_s32_a_second_pass_on_the_world_that_the_first_one_made_does_nothing_more() -> None:
    for c in small_pools():
        add, remove = scaler.add(replace(c, step=99)), scaler.remove(replace(c, step=99))
        after = replace(
            c,
            step=99,
            starting=c.starting + add,
            idle=c.idle - remove,
            expired_idle=max(0, c.expired_idle - remove),
            terminating=c.terminating + remove,
        )
        assert scaler.remove(after) == 0, f"{c} -> {after}"
        if add:
            assert scaler.add(after) == 0, f"{c} -> {after}"


def test_blocked_counts_what_dying_pods_will_make_room_for() -> None:
    counts = Counts(ceiling=4, running=2, held=1, terminating=1)
    assert scaler.blocked(counts, 0) == 0
    assert scaler.blocked(counts, 1) == 0
    assert scaler.blocked(counts, 3) == 2
