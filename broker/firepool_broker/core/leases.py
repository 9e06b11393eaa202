"""The record that a pod set is claimed by an attempt: who takes part, how far each part got, and what was decided at
claim time (path, retire or hold afterwards), so that the release path stays fast.

Data only: `claims` makes leases, `starts` and `endings` move them on.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

from firepool_broker.core.asks import Exit, Failure
from firepool_broker.core.ids import AttemptId, PodName
from firepool_wire.words import Path, WhyNotWarmer

if TYPE_CHECKING:
    from firepool_broker.core.jobs import JobRecord
    from firepool_broker.core.pods import PodRecord


class Phase(IntEnum):
    """Where the saga of an attempt stands; between two phases the engine waits for an answer."""

    #: Agents record the attempt; no user code, nothing durable.
    PREPARING = 0
    #: The start is being written; it may or may not be durable.
    COMMITTING = 1
    #: The outcome of the write is unknown and being read back.
    SETTLING = 2
    #: The start is durable: launched, running or being stopped.
    RUNNING = 3
    #: Every part is over; the end is being written.
    ENDING = 4


class Part(IntEnum):
    """How far one pod's part of the attempt got."""

    CLAIMED = 0
    PREPARED = 1
    LAUNCHED = 2
    STARTED = 3
    #: The attempt does not run here any more.
    OVER = 4
    #: Its process tree is proven gone: reset clean, or pod gone.
    VERIFIED = 5


# Members by their own names: on the hot path a lookup in an enumeration costs as much as a call.
PREPARING, COMMITTING, SETTLING, ENDING = Phase.PREPARING, Phase.COMMITTING, Phase.SETTLING, Phase.ENDING
ACTIVE = Phase.RUNNING
CLAIMED, PREPARED, LAUNCHED, STARTED, OVER, VERIFIED = Part


class Lease:
    """A claimed pod set and the attempt that has it."""

    path = Path.WARM
    #: Boundary decision per pod, taken at claim time (spec §3).
    retire_after: tuple[bool, ...] = (False,)
    #: Per pod: it was made for single-use jobs, so an undone claim leaves it so.
    dedicated: tuple[bool, ...] = (False,)
    #: Names of its pods, in rank order.
    names: tuple[PodName, ...]
    #: How far each pod's part got (`Part`).
    parts: list[Part]
    #: Parts that are not over, and parts whose process tree is not proven gone.
    open = 1
    unverified = 1
    #: Why a warmer path was closed to this claim; the job keeps only the first such reason.
    why: WhyNotWarmer | None = None
    phase = PREPARING
    #: Written once, already running: the start inserts the row.
    insert = False
    #: Parts that are prepared, and parts that run user code.
    prepared = 0
    started = 0
    #: First failure of any part, its rank and exit: what the whole attempt ends as.
    cause: Failure | None = None
    cause_rank = -1
    cause_exit: Exit | None = None
    #: When the first instruction must have come on every pod, and when the run must be over; 0 = unbounded.
    start_by = 0.0
    run_by = 0.0
    #: When pods that did not confirm a stop are deleted; 0 = no stop was asked for.
    stop_by = 0.0
    #: Milestones on the engine's clock; −1 = not reached.
    at_prepared = -1.0
    at_committed = -1.0
    at_launched = -1.0
    at_first = -1.0
    at_ended = -1.0

    # Defaults live on the class and only what differs on the instance: a lease is made for every job, and filling 25
    # slots would cost as much as finding its pod.
    def __init__(
        self,
        job: "JobRecord",
        attempt: AttemptId,
        pods: "list[PodRecord]",
        now: float,
    ) -> None:
        self.job = job
        self.attempt = attempt
        #: In rank order; rank 0 is the coordinator.
        self.pods = pods
        self.at_claimed = now
        if len(pods) != 1:
            self.open = self.unverified = len(pods)

    def begin(self) -> None:
        """The saga begins: keep track of every part."""
        count = len(self.pods)
        self.parts = [CLAIMED] * count
        self.exits: list[Exit | None] = [None] * count
        self.names = (self.pods[0].name,) if count == 1 else tuple([pod.name for pod in self.pods])

    def __repr__(self) -> str:
        return f"<lease {self.attempt} {self.phase.name} open={self.open}>"
