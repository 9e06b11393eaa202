"""A pod as the core knows it, and the edges that its state may take. Only `tracker` writes a pod's state.

Diagrams in the docs are drawn from `EDGES`.
"""

from typing import TYPE_CHECKING

from firepool_broker.core.ids import Caller, Card, PodName, Queue, ReuseTag
from firepool_broker.core.records import Record
from firepool_wire.words import PodState

if TYPE_CHECKING:
    from firepool_broker.core.leases import Lease
    from firepool_broker.core.racks import Rack

STARTING = PodState.STARTING
IDLE = PodState.IDLE
ASSIGNED = PodState.ASSIGNED
RUNNING = PodState.RUNNING
RESETTING = PodState.RESETTING
HELD = PodState.HELD
RETIRING = PodState.RETIRING
GONE = PodState.GONE

#: What a pod was used for last, as far as reuse asks: queue and tag (an absent tag equals itself, spec §1).
ReuseKey = tuple[Queue, ReuseTag | None]

#: Every edge of a pod's life, and why it is taken.
EDGES: dict[tuple[PodState, PodState], str] = {
    (STARTING, IDLE): "its agent answered",
    (STARTING, RETIRING): "not ready in time, too weakly isolated, or no longer wanted",
    (STARTING, GONE): "the provider could not make it",
    (IDLE, ASSIGNED): "claimed by a job",
    (IDLE, RETIRING): "keep-alive over, stale, or its agent does not answer",
    (IDLE, GONE): "died",
    (ASSIGNED, RUNNING): "the start is committed",
    (ASSIGNED, IDLE): "the claim is undone; it was never used",
    (ASSIGNED, HELD): "the claim is undone; it was its owner's",
    (ASSIGNED, RETIRING): "the lease could not be prepared, or its hold ran out meanwhile",
    (ASSIGNED, GONE): "died",
    (RUNNING, RESETTING): "its part of the attempt is over",
    (RUNNING, RETIRING): "retires after this job, or cannot be reached",
    (RUNNING, GONE): "died",
    (RESETTING, HELD): "the reset is proven",
    (RESETTING, RETIRING): "the reset is not proven",
    (RESETTING, GONE): "died",
    (HELD, ASSIGNED): "claimed by its owner again",
    (HELD, RETIRING): "hold expired or broken, stale, or its agent does not answer",
    (HELD, GONE): "died",
    (RETIRING, GONE): "verified gone",
}

#: state → states that may follow.
NEXT: dict[PodState, frozenset[PodState]] = {
    state: frozenset(to for (start, to) in EDGES if start is state) for state in PodState
}


class Claimable(Record):
    """What a claim reads and writes of a pod. CPython lays slots out class by class, so these few lie together: among 100,000
    pods nearly every record is cold, and a claim pays for every place in memory that it visits."""

    __slots__ = (
        "cards",
        "doomed",
        "hold_deadline",
        "key",
        "layers",
        "lease",
        "owner",
        "rack",
        "rank",
        "state",
        "strength",
    )


class PodRecord(Claimable):
    """One pod. Its timer means: ready in time (starting), keep-alive (idle), hold (held), unreachable (in use)."""

    __slots__ = (
        "created_at",
        "deleted_at",
        "drained",
        "expired",
        "isolation",
        "ready_at",
        "released_at",
        "settling",
        "single_use",
        "strikes",
        "unreachable_since",
    )

    def __init__(self, name: PodName, rack: "Rack", created_at: float, single_use: bool = False) -> None:
        self.slot = 0
        self.noted = -1
        self.name: PodName = name
        #: Pool and template digest that the pod was made from.
        self.rack = rack
        self.state = STARTING
        #: Dedicated to one job and deleted after it: outside warm demand, idle cap and floor.
        self.single_use = single_use
        self.cards: tuple[Card, ...] = ()
        self.isolation = ""
        self.strength = 0
        self.created_at = created_at
        #: When its agent first answered (engine's clock); -1 before.
        self.ready_at = -1.0
        #: Last caller whose start was committed here; None = never used. Never changes to another caller (S10).
        self.owner: Caller | None = None
        self.key: ReuseKey | None = None
        self.released_at = 0.0
        self.hold_deadline = 0.0
        #: Requirement sets that its last reset reported as installed.
        self.layers: tuple[str, ...] = ()
        #: Held, but bytes of its last job are still being freed: not claimable yet.
        self.settling = False
        #: Retires instead of being held after what it does now (quarantined, or unreachable).
        self.doomed = False
        #: Retired because its template is stale: counts against `drain_budget` until it is gone.
        self.drained = False
        #: Idle longer than its keep-alive.
        self.expired = False
        self.lease: Lease | None = None
        #: Its place in the lease.
        self.rank = 0
        self.strikes = 0
        #: First missed call of a row of misses; −1 = it answers.
        self.unreachable_since = -1.0
        self.deleted_at = 0.0

    def __repr__(self) -> str:
        return f"<pod {self.name} {self.state}>"
