"""The statistics against the worked examples of `audit §3`."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stats import (
    bootstrap_ci,
    crossover,
    held_capacity,
    hit_ratio,
    jain,
    median,
    paired_effect,
    percentile,
    speed_up,
    williams,
    zipf,
)


@pytest.mark.parametrize(
    ("values", "q", "answer"),
    [
        ([1, 2, 3, 4], 0.5, 2.5),
        ([1, 2, 3, 4], 0.9, 3.7),
        ([0.5, 0.6, 0.6, 60], 0.9, 42.18),
        (range(1, 12), 0.9, 10),
        ([7], 0.9, 7),
    ],
)
def test_a_percentile_is_interpolated_linearly(values, q, answer):
    assert percentile(values, q) == pytest.approx(answer)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_the_extremes(values, q):
    assert min(values) - 1e-6 <= percentile(values, q) <= max(values) + 1e-6


def test_a_percentile_of_nothing_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 0.5)


def test_a_start_effect_is_the_median_of_differences_not_the_difference_of_medians():
    on, off = [1, 2, 9], [8, 3, 10]
    assert paired_effect(on, off) == 1
    assert median(off) - median(on) == 6


def test_arms_with_different_repeats_cannot_be_paired():
    with pytest.raises(ValueError, match="zip"):
        paired_effect([1, 2], [1])


@pytest.mark.parametrize(
    ("fast", "slow", "answer"),
    [
        ([50, 40, 100], [100, 200, 300], 4.0),
        ([119.3], [1554.2], 13.03),
        ([163.0], [1761.9], 10.81),
        ([51.8], [186.4], 3.598),
        ([337], [1023], 3.04),
    ],
)
def test_a_speed_up_is_the_ratio_of_median_makespans(fast, slow, answer):
    assert speed_up(fast, slow) == pytest.approx(answer, abs=0.005)


@pytest.mark.parametrize(
    ("values", "interval"), [([4.0, 4.0, 4.0], (4.0, 4.0)), ([0, 10], (0, 10)), ([1, 2, 3], (1, 3))]
)
def test_a_bootstrap_interval_covers_the_resampled_medians(values, interval):
    assert bootstrap_ci(values) == interval


def test_the_same_seed_gives_the_same_interval_and_another_seed_may_not():
    values = [place**1.7 for place in range(23)]

    def mean(drawn):
        return sum(drawn) / len(drawn)

    assert bootstrap_ci(values, mean) == bootstrap_ci(values, mean)
    assert bootstrap_ci(values, mean) != bootstrap_ci(values, mean, seed=1)


@pytest.mark.parametrize(
    ("shares", "answer"),
    [([10, 10, 10], 1.0), ([1, 2, 3], 0.857), ([1, 0, 0], 1 / 3), ([8, 10, 12], 0.974), ([0, 0], None)],
)
def test_jain_is_one_for_equal_shares_and_absent_without_any(shares, answer):
    assert jain(shares) == (None if answer is None else pytest.approx(answer, abs=0.0005))


@pytest.mark.parametrize(
    ("peak", "horizon_s", "lives", "answer"),
    [
        (5, 600, [(0, 240)] * 5, 0.40),
        (5, 960, [(0, 960)] * 11, 2.20),
        (5, 300, [(0, 27)] * 100, 1.80),
    ],
)
def test_held_capacity_is_over_an_always_on_pool_of_the_peak(peak, horizon_s, lives, answer):
    assert held_capacity(lives, 1, peak, horizon_s) == pytest.approx(answer)


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ({"warm": 171, "standby": 11, "recycled": 4, "new": 4}, 0.979),
        ({"warm": 33, "standby": 66, "recycled": 71, "new": 20}, 0.895),
        ({}, None),
    ],
)
def test_the_hit_ratio_counts_what_needed_no_new_pod(counts, answer):
    paths = list(Counter(counts).elements())
    assert hit_ratio(paths) == (None if answer is None else pytest.approx(answer, abs=0.0005))


def test_zipf_shares_match_the_harmonic_numbers():
    assert zipf(1) == [1.0]
    assert zipf(4) == pytest.approx([0.48, 0.24, 0.16, 0.12])
    assert (zipf(64)[0], zipf(64)[63]) == pytest.approx((0.210797, 0.003294), abs=1e-6)


@pytest.mark.parametrize(
    ("arms", "orders"),
    [
        ("AB", ["AB", "BA"]),
        ("ABC", ["ABC", "BCA", "CAB", "CBA", "ACB", "BAC"]),
        ("ABCD", ["ABDC", "BCAD", "CDBA", "DACB"]),
    ],
)
def test_a_williams_design_is_the_paper_s(arms, orders):
    assert ["".join(order) for order in williams(arms)] == orders


@given(st.integers(2, 9))
def test_every_ordered_pair_of_neighbours_comes_equally_often(count):
    pairs = Counter(pair for order in williams(range(count)) for pair in pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) == 1


def test_a_crossover_gives_each_repeat_its_own_order():
    orders = crossover("ABC", 8)
    assert ["".join(order) for order in orders] == ["ABC", "BCA", "CAB", "CBA", "ACB", "BAC", "ABC", "BCA"]
