"""The invariants of the engine, verified against the records themselves (audit §5): after every simulator step those of what the
step touched, and now and then, and at every test's end, all of them with a recount. Properties over time (S3, S10, S14, …) are traces:
they are checked by the tests' and the simulator's watchers, not here.
"""

from collections.abc import Sequence

from firepool_broker.core.effects import CommitStart, Effect, FollowAttempt, LaunchAttempt
from firepool_broker.core.errors import InvariantBroken
from firepool_broker.core.events import Event
from firepool_broker.core.ids import JobId
from firepool_broker.core.jobs import RUNNING, JobRecord
from firepool_broker.core.leases import COMMITTING, OVER, PREPARING, SETTLING, Lease
from firepool_broker.core.pods import ASSIGNED, HELD, IDLE, RESETTING, RETIRING, PodRecord
from firepool_broker.core.pods import RUNNING as POD_RUNNING
from firepool_broker.core.racks import CATEGORY, PoolRecord
from firepool_broker.core.state import State
from firepool_wire.words import PodState

_NOBODY = JobId("")
#: Effects whose `pods` are names (a start's event carries whole pods under that word).
_NAMING = (CommitStart, LaunchAttempt, FollowAttempt)


def check(s: State, facts: Sequence[Event | Effect]) -> None:
    """Verify what the last call touched: the pods, jobs and attempts that its event and its effects name.

    Raises:
        InvariantBroken: names the property and carries the story.
    """
    for pool in s.tracker.pools.values():
        _pool_sums(s, pool)
    for fact in facts:
        for pod in _pods_of(s, fact):
            _pod(s, pod)
            if pod.lease is not None and s.leases.get(pod.lease.attempt) is pod.lease:
                _lease(s, pod.lease)
                _job(s, pod.lease.job)
        job = s.jobs.get(getattr(fact, "job", _NOBODY))
        if job is not None:
            _job(s, job)


def check_everything(s: State) -> None:
    """Verify every record against every other, and recount every count and index.

    Raises:
        InvariantBroken: names the property and carries the story.
    """
    for pool in s.tracker.pools.values():
        _pool_sums(s, pool)
    for pod in s.tracker.pods.values():
        _pod(s, pod)
    for lease in s.leases.values():
        _lease(s, lease)
    for job in s.jobs.values():
        _job(s, job)
    _quotas(s)
    for pool in s.tracker.pools.values():
        _recount(s, pool)


def _pods_of(s: State, fact: Event | Effect) -> list[PodRecord]:
    names = (getattr(fact, "pod", ""), *(getattr(fact, "pods", ()) if isinstance(fact, _NAMING) else ()))
    return [pod for name in names if (pod := s.tracker.pods.get(name)) is not None]


def _broken(s: State, what: str, subject: str) -> InvariantBroken:
    return InvariantBroken(what, s.story.of(subject))


def _pool_sums(s: State, pool: PoolRecord) -> None:
    counts = pool.rack.counts
    if min(*counts, pool.stale, pool.single_use, pool.terminating, pool.matched, pool.queue.warm_pods) < 0:
        raise _broken(s, f"S29 pool {pool.sku}: a count is negative: {counts} {pool.stale=} {pool.matched=}", pool.sku)


def _pod(s: State, pod: PodRecord) -> None:
    lease = pod.lease
    if pod.state in (ASSIGNED, POD_RUNNING) and lease is None:
        raise _broken(s, f"S1 pod {pod.name} is {pod.state} without a lease", pod.name)
    if pod.state in (IDLE, HELD) and lease is not None:
        raise _broken(s, f"S1 pod {pod.name} is {pod.state} and has the lease {lease.attempt}", pod.name)
    if pod.state is ASSIGNED and lease is not None and s.leases.get(lease.attempt) is not lease:
        raise _broken(s, f"S1 pod {pod.name} has a lease that is over: {lease.attempt}", pod.name)
    if pod.state is IDLE and pod.owner is not None:
        raise _broken(s, f"S10 pod {pod.name} is idle, but was used by {pod.owner}", pod.name)
    if pod.state in (HELD, RESETTING) and pod.owner is None:
        raise _broken(s, f"S36 pod {pod.name} is {pod.state} without an owner", pod.name)
    for card in pod.cards:
        serving = s.tracker.serving.get(card)
        if pod.state in (ASSIGNED, POD_RUNNING) and serving is not pod:
            raise _broken(s, f"S23 card {card} of pod {pod.name} serves {serving}", pod.name)


def _lease(s: State, lease: Lease) -> None:
    job = lease.job
    if job.lease is not lease:
        raise _broken(s, f"S1 lease {lease.attempt} is not its job's", job.id)
    open_parts = sum(1 for part in lease.parts if part < OVER)
    if open_parts != lease.open:
        raise _broken(s, f"lease {lease.attempt}: {lease.open} parts counted, {open_parts} open", job.id)
    if lease.phase in (PREPARING, COMMITTING, SETTLING):
        _whole(s, lease)
    elif job.state is not RUNNING:
        raise _broken(s, f"S3 attempt {lease.attempt} is {lease.phase.name}, but the job is {job.state}", job.id)


def _whole(s: State, lease: Lease) -> None:
    """S8: a claimed gang has every pod (or has lost one to its death), all on distinct cards."""
    names = {pod.name for pod in lease.pods}
    cards = [card for pod in lease.pods for card in pod.cards]
    if len(names) != lease.job.pods or len(set(cards)) != len(cards):
        raise _broken(s, f"S8 lease {lease.attempt} has {sorted(names)} on cards {cards}", lease.job.id)
    for pod in lease.pods:
        if pod.lease is not lease and pod.state is not PodState.GONE:
            raise _broken(s, f"S8 lease {lease.attempt} has lost pod {pod.name}", lease.job.id)


def _job(s: State, job: JobRecord) -> None:
    if job.lane is not None and job.lease is not None:
        raise _broken(s, f"S8 job {job.id} waits and has a lease", job.id)
    if job.lease is not None and s.leases.get(job.lease.attempt) is not job.lease:
        raise _broken(s, f"S1 job {job.id} has a lease that is over", job.id)
    if job.end is not None and job.end.state.value == "FAILED" and job.end.failure is None:
        raise _broken(s, f"S51 job {job.id} fails without an error class", job.id)
    if job.lease is not None and job.lease.path is not None and job.lease.path.value == "new" and job.why is None:
        raise _broken(s, f"S52 job {job.id} got a new pod without a reason", job.id)
    used = job.retry_count - job.infra_retries
    if used > job.ask.max_retries:
        raise _broken(s, f"S41 job {job.id} was retried {used} times of {job.ask.max_retries}", job.id)
    if job.lease is not None and job.lease.attempt != job.attempt:
        raise _broken(s, f"S41 job {job.id} runs as {job.lease.attempt}, not as {job.attempt}", job.id)


def _quotas(s: State) -> None:
    """S2, against the leases themselves."""
    pods: dict[str, int] = {}
    processors: dict[str, int] = {}
    for lease in s.leases.values():
        caller = lease.job.ask.caller
        pods[caller] = pods.get(caller, 0) + lease.open
        processors[caller] = processors.get(caller, 0) + lease.open * lease.job.pool.processors
    for usage in s.quota.all():
        if usage.pods != pods.get(usage.caller, 0) or usage.processors != processors.get(usage.caller, 0):
            raise _broken(s, f"S2 {usage.caller}: {usage.pods} pods counted, {pods.get(usage.caller, 0)} leased", "")


def _recount(s: State, pool: PoolRecord) -> None:
    """S29, S36: every count equals what the pods say, and every claim index has exactly the pods it should have."""
    for rack in pool.racks.values():
        members = [pod for pod in s.tracker.pods.values() if pod.rack is rack and not pod.single_use]
        counts = [0, 0, 0, 0, 0]
        for pod in members:
            if pod.state is not RETIRING:
                counts[CATEGORY[pod.state]] += 1
        if counts != rack.counts:
            raise _broken(s, f"S29 {pool.sku} {rack.template}: counted {rack.counts}, found {counts}", pool.sku)
        if rack.expired != sum(1 for pod in members if pod.expired):
            raise _broken(s, f"S34 {pool.sku}: expired pods miscounted", pool.sku)
        idle = {pod for pod in members if pod.state is IDLE}
        if idle - set(rack.idle):
            raise _broken(s, f"S33 {pool.sku}: idle pods that no claim can find", pool.sku)
        for shelf in rack.shelves.values():
            mine = {pod for pod in members if pod.owner == shelf.owner and pod.state in (HELD, RESETTING)}
            ready = {pod for pod in mine if pod.state is HELD and not pod.settling}
            if len(mine) != shelf.held or ready != set(shelf.all):
                raise _broken(s, f"S36 {pool.sku}: shelf of {shelf.owner} is wrong", pool.sku)
    every = [pod for pod in s.tracker.pods.values() if pod.rack.pool is pool]
    if len(every) != pool.physical or pool.terminating != sum(1 for pod in every if pod.state is RETIRING):
        raise _broken(s, f"S30 {pool.sku}: physical {pool.physical}, found {len(every)}", pool.sku)
    _recount_queue(s, pool)


def _recount_queue(s: State, pool: PoolRecord) -> None:
    waiting = [job for lane in pool.queue.lanes.values() for job in lane.jobs()]
    shelves = pool.rack.shelves
    matched = sum(
        min(shelves[caller].held, pods) for caller, pods in pool.queue.pods_by_caller.items() if caller in shelves
    )
    if matched != pool.matched:
        raise _broken(s, f"S36 {pool.sku}: matched {pool.matched}, found {matched}", pool.sku)
    if len(waiting) != pool.queue.jobs or any(job.lane is None for job in waiting):
        raise _broken(s, f"S9 {pool.sku}: {pool.queue.jobs} jobs counted, {len(waiting)} wait", pool.sku)
