"""What may be read from outside: frozen copies of jobs, pods and pools, cheap to make, safe to keep."""

from dataclasses import dataclass

from firepool_broker.core import rows
from firepool_broker.core.ids import AttemptId, Caller, Card, JobId, PodName, Queue, ReuseTag, Sku, TemplateDigest
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.leases import OVER
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_wire.words import JobState, Path, PodState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job that is not over."""

    job: JobId
    caller: Caller
    sku: Sku
    #: None: accepted from nobody yet, its first write is on its way.
    state: JobState | None
    retry_count: int
    infra_retries: int
    version: int
    pods: tuple[PodName, ...]
    attempt: AttemptId | None
    path: Path | None
    why_not_warmer: str
    cancel_requested: bool
    waiting: bool
    #: Pods of the attempt whose agents do not answer.
    unreachable: tuple[PodName, ...]
    submitted_at: float
    #: Milestones reached so far, as the end will carry them (`CommitEnd.times`).
    times: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod that is not verified gone."""

    pod: PodName
    sku: Sku
    template: TemplateDigest
    state: PodState
    stale: bool
    single_use: bool
    used: bool
    owner: Caller | None
    queue: Queue | None
    tag: ReuseTag | None
    job: JobId | None
    cards: tuple[Card, ...]
    isolation: str
    created_at: float
    ready_at: float | None
    released_at: float | None
    hold_deadline: float | None
    unreachable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool with its counts, in pods. The categories are disjoint and sum to `physical`."""

    sku: Sku
    template: TemplateDigest
    open: bool
    floor: int
    ceiling: int
    starting: int
    idle: int
    assigned: int
    running: int
    held: int
    stale: int
    single_use: int
    terminating: int
    physical: int
    queued_jobs: int
    queued_pods: int
    create_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt and the place of a pod in it."""

    attempt: AttemptId
    job: JobId
    rank: int
    pods: tuple[PodName, ...]


def job_view(job: JobRecord) -> JobView:
    """The job as it is now."""
    lease = job.lease
    pods = lease.pods if lease is not None else []
    return JobView(
        job=job.id,
        caller=job.ask.caller,
        sku=job.pool.sku,
        state=job.state,
        retry_count=job.retry_count,
        infra_retries=job.infra_retries,
        version=job.version,
        pods=tuple(pod.name for pod in pods),
        attempt=lease.attempt if lease is not None else None,
        path=job.path,
        why_not_warmer=job.why.value if job.why is not None else "",
        cancel_requested=job.cancel is not None,
        waiting=job.lane is not None,
        unreachable=tuple(pod.name for pod in pods if pod.lease is lease and pod.unreachable_since >= 0),
        submitted_at=job.ask.submitted_at,
        times=tuple(milestone for milestone in rows.times(job, lease) if milestone[1] >= 0.0),
    )


def pod_view(pod: PodRecord) -> PodView:
    """The pod as it is now."""
    held = pod.state is PodState.HELD
    return PodView(
        pod=pod.name,
        sku=pod.rack.pool.sku,
        template=pod.rack.template,
        state=pod.state,
        stale=pod.rack.stale,
        single_use=pod.single_use,
        used=pod.owner is not None,
        owner=pod.owner,
        queue=pod.key[0] if pod.key is not None else None,
        tag=pod.key[1] if pod.key is not None else None,
        job=pod.lease.job.id if pod.lease is not None else None,
        cards=pod.cards,
        isolation=pod.isolation,
        created_at=pod.created_at,
        ready_at=pod.ready_at if pod.ready_at >= 0 else None,
        released_at=pod.released_at if held else None,
        hold_deadline=pod.hold_deadline if held else None,
        unreachable=pod.unreachable_since >= 0,
    )


def pool_view(pool: PoolRecord) -> PoolView:
    """The pool as it is now."""
    starting, idle, assigned, running, held = pool.rack.counts
    return PoolView(
        sku=pool.sku,
        template=pool.rack.template,
        open=pool.open,
        floor=pool.floor,
        ceiling=pool.ceiling,
        starting=starting,
        idle=idle,
        assigned=assigned,
        running=running,
        held=held,
        stale=pool.stale,
        single_use=pool.single_use,
        terminating=pool.terminating,
        physical=pool.physical,
        queued_jobs=pool.queue.jobs,
        queued_pods=pool.queue.warm_pods + pool.queue.single_use_pods,
        create_failures=pool.create_failures,
    )


def attempt_on(pod: PodRecord) -> Attempt | None:
    """The attempt that has the pod and is not over on it."""
    lease = pod.lease
    if lease is None or lease.parts[pod.rank] >= OVER:
        return None
    return Attempt(
        attempt=lease.attempt, job=lease.job.id, rank=pod.rank, pods=tuple(member.name for member in lease.pods)
    )
