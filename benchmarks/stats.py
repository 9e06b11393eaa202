"""The statistics of spec §13, each as the paper defines it (B.4) and with its worked examples in `audit §3` (F15–F21).

Plain Python on lists of seconds or counts; nothing here measures.
"""

from collections.abc import Callable, Iterable, Sequence
from math import floor
from random import Random
from typing import TypeVar

#: Seed and number of the paper's bootstrap (B.4).
BOOTSTRAP_SEED = 2027
RESAMPLES = 2000

T = TypeVar("T")


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-quantile (0 to 1) by linear interpolation between order statistics, at h = (n − 1) q.

    Raises:
        ValueError: no values, or `q` outside 0 to 1.
    """
    ordered = sorted(values)
    if not ordered or not 0.0 <= q <= 1.0:
        raise ValueError(f"a percentile needs values and 0 <= q <= 1, not {len(ordered)} values and {q}")
    h = (len(ordered) - 1) * q
    low = floor(h)
    if low + 1 >= len(ordered):
        return ordered[low]
    return ordered[low] + (h - low) * (ordered[low + 1] - ordered[low])


def median(values: Iterable[float]) -> float:
    """The middle value."""
    return percentile(values, 0.5)


def paired_effect(base: Sequence[float], other: Sequence[float]) -> float:
    """Median over repeats of `other − base`: the effect of an arm on a figure of each repeat (F16)."""
    return median(differences(base, other))


def differences(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """`other − base` repeat by repeat.

    Raises:
        ValueError: the arms have not the same repeats.
    """
    return [after - before for before, after in zip(base, other, strict=True)]


def speed_up(fast: Sequence[float], slow: Sequence[float]) -> float:
    """Ratio of median makespans (not the median of ratios; paper Table 5)."""
    return median(slow) / median(fast)


def bootstrap_ci(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = median,
    resamples: int = RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> tuple[float, float]:
    """95 % interval of a statistic over repeats: percentiles 2.5 and 97.5 of its resampled values (F17).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a bootstrap needs values")
    dice = Random(seed)
    drawn = [statistic(dice.choices(values, k=len(values))) for _ in range(resamples)]
    return percentile(drawn, 0.025), percentile(drawn, 0.975)


def jain(shares: Sequence[float]) -> float | None:
    """Jain's fairness index (Σx)² / (n Σx²); None where nobody got anything (F18)."""
    squares = sum(share * share for share in shares)
    return None if squares == 0 else sum(shares) ** 2 / (len(shares) * squares)


def williams(arms: Sequence[T]) -> list[list[T]]:
    """Orders of arms in which every ordered pair of neighbours comes equally often (F21): n orders for an even number of
    arms, 2 n for an odd one."""
    n = len(arms)
    first = [0]
    for step in range(1, n):
        first.append((step + 1) // 2 if step % 2 else n - step // 2)
    orders = [[(place + shift) % n for place in first] for shift in range(n)]
    if n % 2:
        orders += [order[::-1] for order in orders]
    return [[arms[place] for place in order] for order in orders]


def crossover(arms: Sequence[T], repeats: int) -> list[list[T]]:
    """One order of arms per repeat, going round the Williams design."""
    orders = williams(arms)
    return [orders[repeat % len(orders)] for repeat in range(repeats)]


def held_capacity(lives: Iterable[tuple[float, float]], processors: int, peak: int, horizon_s: float) -> float:
    """Σ (deleted − bound) × processors over an always-on pool of `peak` processors for `horizon_s` (F19)."""
    return sum(end - start for start, end in lives) * processors / (peak * horizon_s)


def hit_ratio(paths: Sequence[str]) -> float | None:
    """Share of acquisitions that needed no new pod: warm, recycled or standby (F14); None without data."""
    if not paths:
        return None
    return sum(path in ("warm", "recycled", "standby") for path in paths) / len(paths)


def zipf(count: int, s: float = 1.0) -> list[float]:
    """Shares p_k ∝ 1 / k^s of `count` items (F20)."""
    weights = [1.0 / k**s for k in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]
