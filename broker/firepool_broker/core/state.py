"""Everything that the rooms of the engine share: the tables, the wheel of timers, the story, what `handle` emits, and what
still has to be looked at before `handle` returns. Data with a few verbs on it; decisions live in the rooms.
"""

from collections import deque
from math import inf

from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import Effect
from firepool_broker.core.errors import InvalidTransition
from firepool_broker.core.ids import AttemptId, Caller, JobId, PodName
from firepool_broker.core.jobs import NEXT, JobRecord
from firepool_broker.core.leases import Lease
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.quota import Quota
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.story import DEFAULT_CAPACITY, Story
from firepool_broker.core.timers import Timers
from firepool_broker.core.tracker import Tracker
from firepool_wire.words import JobState


class State:
    """The engine's whole memory."""

    __slots__ = (
        "born_at",
        "configured",
        "dependents",
        "dooming",
        "emit",
        "finished",
        "former",
        "hungry_owners",
        "hungry_pools",
        "jobs",
        "leases",
        "made",
        "now",
        "out",
        "quota",
        "rearming",
        "started",
        "stirred",
        "store_by",
        "story",
        "ticks_that_helped",
        "timers",
        "tracker",
        "untended",
        "waiting",
    )

    def __init__(self, story_capacity: int = DEFAULT_CAPACITY) -> None:
        #: Time of the event being handled, seconds on the engine's clock.
        self.now = 0.0
        self.out: list[Effect] = []
        self.emit = self.out.append
        self.story = Story(story_capacity)
        self.timers = Timers()
        self.tracker = Tracker(self.story, self.timers)
        self.quota = Quota()
        self.jobs: dict[JobId, JobRecord] = {}
        #: Attempts whose lease is not settled yet.
        self.leases: dict[AttemptId, Lease] = {}
        #: job → jobs that wait for its result.
        self.dependents: dict[JobId, dict[JobId, None]] = {}
        #: Jobs that are over and have dependents which do not know it yet.
        self.finished: deque[tuple[JobId, Failure | None]] = deque()
        #: Recovery: pod → running attempts that ended there before a newer one got the pod.
        self.former: dict[PodName, list[tuple[Lease, int]]] = {}
        #: Jobs of all pools that wait for pods.
        self.waiting = 0
        #: (deadline, lease): leases of jobs that nobody has stored, written QUEUED if not prepared by then.
        self.store_by: deque[tuple[float, Lease]] = deque()
        #: Pools with new idle pods, owners with new held pods, pools whose counts call for the controller (ordered sets).
        self.hungry_pools: dict[PoolRecord, None] = {}
        self.hungry_owners: dict[tuple[PoolRecord, Caller], None] = {}
        self.untended: dict[PoolRecord, None] = {}
        #: Jobs to fail and idle pods to time anew after a change of configuration, worked off in slices.
        self.dooming: deque[tuple[JobRecord, Failure]] = deque()
        self.rearming: deque[PodRecord] = deque()
        #: Something above waits to be looked at in this call, or in the next.
        self.stirred = False
        self.started = False
        self.configured = False
        #: Pods made so far, and when this broker was born: together a pod name that no other broker's life repeats.
        self.made = 0
        self.born_at = inf
        #: Fallback ticks that placed a job which no event had placed (a missing wake-up: watch this metric).
        self.ticks_that_helped = 0

    def move(self, job: JobRecord, to: JobState) -> None:
        """Take an edge of the job's table."""
        if to not in NEXT[job.state]:
            raise InvalidTransition(f"job {job.id}: no edge {job.state} -> {to}", self.story.of(job.id, job))
        job.state = to
        self.story.note(job, to)

    def lease_of(self, attempt: AttemptId, pod: PodName) -> tuple[Lease, int] | None:
        """The live lease of an attempt and the pod's rank in it; None for late answers of old attempts (S41)."""
        lease = self.leases.get(attempt)
        if lease is None:
            return None
        for rank, member in enumerate(lease.pods):
            if member.name == pod:
                return lease, rank
        return None

    def feed(self, pool: PoolRecord) -> None:
        """Somebody in this pool may be placeable now."""
        if pool.queue.jobs:
            self.hungry_pools[pool] = None
            self.stirred = True

    def feed_owner(self, pool: PoolRecord, owner: Caller) -> None:
        """A job of this owner may be placeable on its held pods now."""
        if pool.queue.jobs and owner in pool.queue.by_caller:
            self.hungry_owners[pool, owner] = None
            self.stirred = True

    def tend(self, pool: PoolRecord) -> None:
        """The pool's counts call for the controller."""
        self.untended[pool] = None
        self.stirred = True
