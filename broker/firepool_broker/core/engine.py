"""The one door: `Engine.handle(event, now) -> effects`. Pure and synchronous, owned by one thread, hence atomic.

Which room an event goes to is here; what it means is in the room. After the room, in the same call: due timers fire, what
became free is dispatched, pools are tended, and the next wake-up is asked for. Work that may be long goes on in slices: then
the wake-up is at once.
"""

from math import inf
from typing import assert_never

from firepool_broker.core import (
    admission,
    cancels,
    checks,
    configuring,
    controller,
    dispatch,
    endings,
    explain,
    podlife,
    recovery,
    rows,
    starts,
    views,
)
from firepool_broker.core.effects import Effect, WakeAt
from firepool_broker.core.events import (
    AttemptEnded,
    AttemptProbed,
    BrokerStarted,
    CallerLimited,
    CancelRequested,
    ClientRenewed,
    CommitLost,
    Committed,
    CommitUnknown,
    DependencyEnded,
    EndCommitFailed,
    EndCommitted,
    Event,
    FirstInstruction,
    JobStored,
    JobStoreFailed,
    JobSubmitted,
    Launched,
    LaunchFailed,
    LeasePrepared,
    LeasePrepareFailed,
    PodCreateFailed,
    PodGone,
    PodReachable,
    PodReady,
    PodSettled,
    PodUnreachable,
    PoolsConfigured,
    RareEvent,
    ResetClean,
    ResetUnclean,
    Woke,
)
from firepool_broker.core.ids import JobId, PodName
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.records import Record
from firepool_broker.core.state import State
from firepool_broker.core.story import DEFAULT_CAPACITY

#: The fallback look at the queue, and the controller's look at every pool.
TICK_S = 3.0
RECONCILE_S = 30.0
#: Claims, timers and other pieces of work per call at most; the rest goes on in the next.
SLICE = 128


class Engine:
    """Firepool's whole decision-making. Both shells drive it: the real one and the simulated one."""

    __slots__ = ("_last_effects", "_last_event", "_reconcile", "_state", "_tick", "_wake_at")

    def __init__(self, *, story_capacity: int = DEFAULT_CAPACITY) -> None:
        self._state = State(story_capacity)
        #: The earliest wake-up that was asked for and has not come.
        self._wake_at = inf
        #: The last call's event and effects: what `check` looks at.
        self._last_event: Event = Woke()
        self._last_effects: list[Effect] = []
        #: Timers that belong to no job, pod or pool.
        self._tick = Record("fallback tick")
        self._reconcile = Record("reconcile")

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one fact and answer with what shall be done.

        Args:
            event: what happened.
            now: seconds on the engine's clock; a step backwards is taken as no step.

        Returns:
            Effects to be started in this order.

        Raises:
            InvalidTransition, InvariantBroken: a bug of ours, with the story of what it is about.
        """
        s = self._state
        if now > s.now:
            s.now = s.story.now = now
        s.story.cause = type(event).__name__
        # Hot events first: a match is tried from top to bottom.
        match event:
            case JobSubmitted():
                admission.submit(s, event.ask)
            case LeasePrepared():
                starts.prepared(s, event)
            case Committed():
                endings.committed(s, event.attempt)
            case Launched():
                starts.launched(s, event)
            case FirstInstruction():
                starts.first_instruction(s, event)
            case AttemptEnded():
                endings.attempt_ended(s, event)
            case EndCommitted():
                endings.end_committed(s, event.attempt)
            case ResetClean():
                endings.reset_clean(s, event)
            case _:
                self._route(s, event)
        if s.stirred or s.timers.earliest <= s.now:
            self._follow_up(s)
        if s.stirred or s.timers.earliest < self._wake_at:
            self._ask_to_be_woken(s)
        effects = s.out[:]
        s.out.clear()
        # For the quick check; a start is not kept, it is as large as the fleet.
        self._last_event = event if type(event) is not BrokerStarted else Woke()
        self._last_effects = effects
        return effects

    # -- the rooms --------------------------------------------------------------------------------------------------

    def _route(self, s: State, event: RareEvent) -> None:
        match event:
            case Woke():
                self._woke(s)
            case JobStored():
                rows.stored(s, event.job)
            case PodReady():
                podlife.on_ready(s, event)
            case PodGone():
                podlife.on_gone(s, event)
            case PodSettled():
                endings.settled(s, event)
            case ClientRenewed():
                cancels.renewed(s, event)
            case CancelRequested():
                cancels.requested(s, event)
            case DependencyEnded():
                admission.dependency_ended(s, event)
            case JobStoreFailed():
                cancels.store_failed(s, event.job, event.failure)
            case LeasePrepareFailed():
                starts.prepare_failed(s, event)
            case CommitLost():
                starts.commit_lost(s, event)
            case CommitUnknown():
                starts.commit_unknown(s, event.attempt)
            case LaunchFailed():
                endings.launch_failed(s, event)
            case EndCommitFailed():
                endings.end_commit_failed(s, event)
            case ResetUnclean():
                endings.reset_unclean(s, event)
            case PodCreateFailed():
                podlife.on_create_failed(s, event)
            case PodUnreachable():
                podlife.on_unreachable(s, event)
            case PodReachable():
                podlife.on_reachable(s, event.pod)
            case AttemptProbed():
                recovery.probed(s, event)
            case PoolsConfigured():
                configuring.pools(s, event)
            case CallerLimited():
                configuring.caller(s, event)
            case BrokerStarted():
                recovery.started(s, event)
                s.timers.arm(self._reconcile, s.now + RECONCILE_S)
            case _:
                assert_never(event)

    def _woke(self, s: State) -> None:
        if s.now >= self._wake_at:
            self._wake_at = inf

    # -- what every call does ---------------------------------------------------------------------------------------

    def _follow_up(self, s: State) -> None:
        """Timers, then who became placeable, then the pools."""
        s.stirred = False
        if s.store_by and s.store_by[0][0] <= s.now:
            starts.store_late(s)
        self._fire_timers(s)
        if s.finished:
            self._tell_dependents(s)
        if s.dooming:
            admission.doom_some(s, SLICE)
        if s.rearming:
            self._rearm_some(s)
        if s.hungry_owners or s.hungry_pools:
            dispatch.feed_all(s, SLICE)
        if s.untended:
            self._tend(s)
        if s.waiting and not self._tick.slot:
            s.timers.arm(self._tick, s.now + TICK_S)
        s.stirred = bool(s.hungry_pools or s.hungry_owners or s.untended or s.dooming or s.rearming or s.finished)

    def _fire_timers(self, s: State) -> None:
        for record in s.timers.due(s.now, SLICE):
            if isinstance(record, JobRecord):
                cancels.on_timer(s, record)
            elif isinstance(record, PodRecord):
                podlife.on_timer(s, record)
            elif isinstance(record, PoolRecord):
                s.tend(record)
                s.feed(record)
            elif record is self._tick:
                self._fall_back(s)
            else:
                s.timers.arm(self._reconcile, s.now + RECONCILE_S)
                for pool in s.tracker.pools.values():
                    s.tend(pool)
        if s.store_by and s.store_by[0][0] < s.timers.earliest:
            s.timers.earliest = s.store_by[0][0]

    def _fall_back(self, s: State) -> None:
        """The 3 s tick: after everything that events asked for, look at everybody who waits."""
        dispatch.feed_all(s, SLICE)
        if not s.hungry_pools and not s.hungry_owners:
            dispatch.tick(s)
            if dispatch.feed_all(s, SLICE):
                s.ticks_that_helped += 1

    def _rearm_some(self, s: State) -> None:
        for _ in range(min(SLICE, len(s.rearming))):
            podlife.on_timer(s, s.rearming.popleft())

    def _tell_dependents(self, s: State) -> None:
        while s.finished:
            job, cause = s.finished.popleft()
            admission.resolve_dependents(s, job, cause)

    def _tend(self, s: State) -> None:
        again: list[PoolRecord] = []
        for pool in list(s.untended):
            if len(s.out) >= SLICE:
                # The pools behind it are looked at in the next call: ten pools of a full slice each took 18 ms.
                break
            del s.untended[pool]
            if controller.tend(s, pool):
                again.append(pool)
        s.untended.update(dict.fromkeys(again))

    def _ask_to_be_woken(self, s: State) -> None:
        """Only an earlier time than the one that was asked for is asked for; unfinished slices go on at once."""
        due = s.now if s.stirred else s.timers.earliest
        if due < self._wake_at:
            self._wake_at = due
            s.emit(WakeAt(due))

    # -- read-only views --------------------------------------------------------------------------------------------

    @property
    def ticks_that_helped(self) -> int:
        """Fallback ticks that placed a job: each is an event that forgot to wake dispatch."""
        return self._state.ticks_that_helped

    def check(self, everything: bool = False) -> None:
        """Verify the invariants: of what the last event touched, or of everything.

        Raises:
            InvariantBroken: names the property and carries the story.
        """
        if everything:
            checks.check_everything(self._state)
        else:
            checks.check(self._state, (self._last_event, *self._last_effects))

    def story_of(self, job_or_pod: str) -> list[str]:
        """What happened to a job or a pod, oldest first, each with its cause."""
        s = self._state
        record = s.jobs.get(JobId(job_or_pod)) or s.tracker.pods.get(PodName(job_or_pod))
        return s.story.of(job_or_pod, record)

    def pool_views(self) -> list[views.PoolView]:
        """Every pool with its counts."""
        return [views.pool_view(pool) for pool in self._state.tracker.pools.values()]

    def pod_views(self) -> list[views.PodView]:
        """Every pod."""
        return [views.pod_view(pod) for pod in self._state.tracker.pods.values()]

    def job_view(self, job: JobId) -> views.JobView | None:
        """A job that is not over, or None."""
        record = self._state.jobs.get(job)
        return views.job_view(record) if record is not None else None

    def running_on(self, pod: PodName) -> views.Attempt | None:
        """The attempt that has the pod, or None."""
        record = self._state.tracker.pods.get(pod)
        return views.attempt_on(record) if record is not None else None

    def explain(self, job: JobId, now: float) -> explain.Explanation | None:
        """Why a job waits: its position, the limit that blocks it, and who holds what."""
        record = self._state.jobs.get(job)
        return explain.explain(self._state, record, now) if record is not None else None
