"""A start of the broker (spec §10): the tracker is rebuilt from what provider, store and agents say, then dispatch begins.

A job that was RUNNING keeps its pods until every one of them is accounted for: live → followed again, ended → its end is
written, never launched or gone → a new attempt; unreachable → it stays RUNNING, its pod is deleted, and nothing else happens
until that is verified. Who may use the other pods is `witnesses`' verdict.
"""

from firepool_broker.core import endings, fleet, podlife, queueing, starts, witnesses
from firepool_broker.core.asks import Binding, FoundJob, FoundPod
from firepool_broker.core.effects import FollowAttempt, ProbeAttempt, ResetPod, StopAttempt
from firepool_broker.core.errors import failure
from firepool_broker.core.events import AttemptProbed, BrokerStarted, PodGone
from firepool_broker.core.ids import PodName, Sku
from firepool_broker.core.jobs import PENDING, QUEUED, RUNNING, STORED, JobRecord
from firepool_broker.core.leases import ACTIVE, STARTED, Lease
from firepool_broker.core.pods import RUNNING as POD_RUNNING
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.pools import Pool
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State

#: Where a running job's part waits for its pod: pod → the newest attempt's lease and rank.
_Places = dict[PodName, tuple[Lease, int]]


def started(s: State, event: BrokerStarted) -> None:
    """Rebuild, probe, and only then dispatch (S43)."""
    if s.started:
        return
    s.born_at = s.now
    bound = {binding.pod: binding for binding in event.bindings}
    places: _Places = {}
    for found in event.jobs:
        _job(s, found, bound, places)
    for pod in event.pods:
        _pod(s, pod, bound.get(pod.pod), places.get(pod.pod))
    for lease in list(s.leases.values()):
        _miss(s, lease, {pod.pod for pod in event.pods})
    s.started = True
    for pool in s.tracker.pools.values():
        s.tend(pool)
        s.feed(pool)
        for owner in pool.queue.by_caller:
            s.feed_owner(pool, owner)


# -- jobs -----------------------------------------------------------------------------------------------------------


def _job(s: State, found: FoundJob, bound: dict[PodName, Binding], places: _Places) -> None:
    ask = found.ask
    pool = _pool(s, ask.sku)
    strength = fleet.demanded(pool, ask.isolation) if ask.isolation else 0
    job = JobRecord(ask, pool, s.quota.of(ask.caller), strength)
    s.jobs[ask.job] = job
    job.state, job.row, job.version, job.accepted = found.state, STORED, found.version, True
    job.next_attempt(found.retry_count, found.infra_retries)
    s.story.note(job, f"found {found.state}")
    if ask.client_lease_s is not None:
        job.client_until = s.now + ask.client_lease_s
    if found.cancel_requested:
        job.cancel = failure("Cancelled", f"job {ask.job} was cancelled")
    if found.state is RUNNING:
        _lease(s, job, found, bound, places)
    elif job.cancel is not None:
        queueing.end_waiting(s, job, job.cancel)
    elif found.state is PENDING and ask.depends:
        job.waits_for = dict.fromkeys(ask.depends)
        for dependency in job.waits_for:
            s.dependents.setdefault(dependency, {})[job.id] = None
        s.timers.arm_by(job, job.due())
    else:
        if found.state is PENDING:
            s.move(job, QUEUED)
        never = queueing.never_servable(pool, job.pods) if s.configured else None
        if never is not None:
            queueing.end_waiting(s, job, never)
        else:
            queueing.wait(s, job)


def _lease(s: State, job: JobRecord, found: FoundJob, bound: dict[PodName, Binding], places: _Places) -> None:
    """The running attempt with a stand-in for each pod, until the pod itself is found."""
    attempt = job.attempt
    names = found.pods or (PodName(f"{job.id} without a binding"),)
    stand_ins = [PodRecord(name, job.pool.rack, s.now) for name in names]
    flags = tuple(found.retire_after or (name in bound and bound[name].retire_after) for name in names)
    lease = Lease(job, attempt, stand_ins, s.now)
    lease.begin()
    lease.path, lease.retire_after = found.path or witnesses.UNKNOWN_PATH, flags
    lease.dedicated = (False,) * len(names)
    lease.phase = ACTIVE
    lease.cause = job.cancel
    lease.at_claimed = lease.at_committed = found.started_at if found.started_at is not None else s.now
    job.why = witnesses.reason(found.why_not_warmer)
    job.lease = lease
    s.leases[attempt] = lease
    job.usage.pods += len(names)
    job.usage.processors += len(names) * job.pool.processors
    for rank, name in enumerate(names):
        stand_ins[rank].rank = rank
        newest = bound.get(name)
        if newest is None or newest.attempt == attempt:
            places[name] = (lease, rank)
        else:
            # A newer attempt has the pod: this one ended there, and its agent still has the exit record.
            s.former.setdefault(name, []).append((lease, rank))
            s.emit(ProbeAttempt(attempt, name))


def _miss(s: State, lease: Lease, listed: set[PodName]) -> None:
    """Pods that the provider does not list are verified gone (a provider lists whatever is not)."""
    for rank, pod in enumerate(lease.pods):
        if pod.name not in listed:
            endings.pod_gone(s, lease, rank, PodGone(pod.name, "not found after a restart of the broker"))


# -- pods -----------------------------------------------------------------------------------------------------------


def _pod(s: State, found: FoundPod, binding: Binding | None, place: tuple[Lease, int] | None) -> None:
    _pool(s, found.sku)
    rack = s.tracker.rack_of(found.sku, found.template)
    pod = PodRecord(found.pod, rack, found.created_at, found.single_use)
    pod.cards = found.cards
    pod.isolation = found.isolation or rack.pool.pool.isolation
    pod.strength = fleet.strength(pod.isolation)
    if found.ready:
        rack.pool.strength_seen = pod.strength
    if place is not None:
        lease, rank = place
        lease.pods[rank] = pod
        pod.doomed = found.terminating
        s.tracker.adopt_used(pod, lease.job.ask.caller, lease.job.key, lease, rank)
        s.emit(ProbeAttempt(lease.attempt, pod.name))
        return
    _free_pod(s, pod, found, binding)


def _free_pod(s: State, pod: PodRecord, found: FoundPod, binding: Binding | None) -> None:
    """A pod without a running job: idle, starting, held, to be reset, or retired, as its witnesses say."""
    knobs = pod.rack.pool.pool
    verdict = witnesses.judge(found, binding, knobs.hold_s, s.now)
    if isinstance(verdict, witnesses.Held):
        s.tracker.adopt_held(pod, verdict.owner, verdict.key, verdict.released_at, verdict.deadline)
        s.timers.arm(pod, verdict.deadline)
        return
    if isinstance(verdict, witnesses.Dirty):
        pod.released_at, pod.hold_deadline = verdict.released_at, verdict.deadline
        s.tracker.adopt_used(pod, verdict.owner, verdict.key, None, 0)
        s.emit(ResetPod(pod.name, verdict.attempt))
        return
    s.tracker.add(pod)
    if isinstance(verdict, witnesses.Starting):
        s.timers.arm(pod, found.created_at + knobs.pod_start_timeout_s)
    elif isinstance(verdict, witnesses.NeverUsed):
        # The keep-alive clock is rebuilt from the creation time, so that a restart removes nothing early (S46).
        s.tracker.ready(pod, found.created_at)
        s.timers.arm(pod, found.created_at + knobs.idle_timeout_s)
    else:
        fleet.retire(s, pod, verdict.why)


def _pool(s: State, sku: Sku) -> PoolRecord:
    """The pool, or a stand-in that is closed until an operator configures it again."""
    pool = s.tracker.pools.get(sku)
    if pool is None:
        pool = s.tracker.open_pool(Pool(sku=sku, enabled=False, min_count=0))
        pool.removed, pool.open = True, False
    return pool


# -- what the probes say --------------------------------------------------------------------------------------------


def probed(s: State, event: AttemptProbed) -> None:
    """One pod of a running attempt is accounted for, or stays unaccounted for."""
    place = s.lease_of(event.attempt, event.pod)
    if place is None or place[0].phase is not ACTIVE:
        return
    lease, rank = place
    pod = lease.pods[rank]
    s.story.note(lease.job, f"{event.pod}: {event.verdict}")
    match event.verdict:
        case "live":
            _live(s, lease, pod)
        case "ended":
            ended = event.exit
            endings.proven_over(s, lease, rank, ended, ended.failure if ended is not None else None)
        case "unknown":
            never = failure("HostLost", f"{event.attempt} was never launched on {event.pod}", pod=event.pod)
            endings.proven_over(s, lease, rank, None, never)
        case "unreachable":
            _unreachable(s, pod, event.why)
        case "gone":
            gone = PodGone(event.pod, event.why)
            if pod.lease is lease:
                podlife.on_gone(s, gone)
            else:
                endings.pod_gone(s, lease, rank, gone)


def _live(s: State, lease: Lease, pod: PodRecord) -> None:
    """The same attempt goes on; a gang that lost a rank meanwhile, or a cancelled job, is stopped."""
    if pod.lease is not lease or pod.state is not POD_RUNNING:
        return
    s.emit(FollowAttempt(lease.attempt, (pod.name,)))
    if lease.parts[pod.rank] < STARTED:
        lease.parts[pod.rank] = STARTED
        lease.started += 1
        if lease.started == len(lease.pods):
            starts.bound_run(s, lease)
    if lease.cause is not None:
        s.emit(StopAttempt(lease.attempt, pod.name, lease.cause))
        lease.stop_by = s.now + endings.STOP_WAIT_S
        s.timers.arm_by(lease.job, lease.stop_by)


def _unreachable(s: State, pod: PodRecord, why: str) -> None:
    """Unreachable is not failed: the job stays RUNNING on it, the pod is deleted, and its verified end decides."""
    pod.unreachable_since = s.now
    if pod.lease is not None and pod.state is POD_RUNNING:
        fleet.retire(s, pod, f"unreachable after a restart of the broker: {why}")
