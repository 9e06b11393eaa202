"""The scaler's equations, line for line as in the paper (§7, A.5) and spec §6, on plain numbers. All integers are pods.

Pure functions without state: `controller` makes the counts and carries out what comes out. The categories are disjoint:
a pod counts in exactly one of starting, idle, assigned, running, held, stale, single_use, terminating.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """One pool at one moment."""

    #: Floor, ceiling (whole pods that fit), idle cap, creations left in this interval, and pods within the budget.
    floor: int = 0
    ceiling: int = 0
    max_idle: int = 0
    step: int = 0
    headroom: int = 1_000_000_000
    #: Pods of every queued warm job, also of jobs that wait for their caller's quota; not of single-use jobs.
    queued: int = 0
    starting: int = 0
    #: Never used, current template.
    idle: int = 0
    assigned: int = 0
    running: int = 0
    #: Used and waiting for their owner, resetting ones included.
    held: int = 0
    #: Σ over owners of min(held, queued): supply for that owner only (audit F1).
    matched: int = 0
    #: Old template, in any state.
    stale: int = 0
    single_use: int = 0
    #: Being deleted and not verified gone.
    terminating: int = 0
    #: Idle pods whose keep-alive ran out.
    expired_idle: int = 0


def demand(c: Counts) -> int:
    """`queued + assigned + running`: queued work, not utilisation, asks for pods."""
    return c.queued + c.assigned + c.running


def eligible(c: Counts) -> int:
    """`starting + idle + assigned + running`; matched held pods count as idle in this pass."""
    return c.starting + c.idle + c.matched + c.assigned + c.running


def physical(c: Counts) -> int:
    """`eligible + held + stale + terminating`: all that occupies the ceiling (matched pods are held or idle, once)."""
    return eligible(c) + (c.held - c.matched) + c.stale + c.single_use + c.terminating


def floor_deficit(c: Counts) -> int:
    """`max(0, floor − (physical − single_use − terminating))`: what serves no shared job satisfies no floor."""
    return max(0, c.floor - (physical(c) - c.single_use - c.terminating))


def demand_deficit(c: Counts) -> int:
    """`max(0, demand − eligible)`; starting pods are supply (S33)."""
    return max(0, demand(c) - eligible(c))


def add(c: Counts) -> int:
    """`max(0, min(max(floor_deficit, demand_deficit), ceiling − physical, step, headroom))`."""
    return max(0, min(max(floor_deficit(c), demand_deficit(c)), c.ceiling - physical(c), c.step, c.headroom))


def idle_cap(c: Counts) -> int:
    """`min(max_idle, ceiling − (physical − idle))`: retains, never creates; a negative cap is harmless (audit F3.6).

    Pods that are being deleted are left out here: else the pods that one pass removes would squeeze the cap of the next
    pass, which would remove more on an otherwise unchanged world (S32).
    """
    return min(c.max_idle, c.ceiling - (physical(c) - c.terminating - _idle(c)))


def retain(c: Counts) -> int:
    """`max(idle_cap, floor − (held + assigned_or_running), demand − (starting + assigned_or_running))`."""
    busy = c.assigned + c.running
    return max(idle_cap(c), c.floor - (c.held - c.matched + busy), demand(c) - (c.starting + busy))


def remove(c: Counts) -> int:
    """Idle pods to retire, 0 whenever something is created: `max(0, min(idle − retain, expired_idle, physical − floor))`.

    Only expired never-used pods go; matched held pods stay (S34).
    """
    if add(c) > 0:
        return 0
    return max(0, min(_idle(c) - retain(c), c.expired_idle, physical(c) - c.floor))


def blocked(c: Counts, deficit: int) -> int:
    """How many of `deficit` wanted pods find no room below the ceiling, not even when what is being deleted is gone."""
    return max(0, deficit - max(0, c.ceiling - physical(c)) - c.terminating)


def _idle(c: Counts) -> int:
    return c.idle + c.matched
