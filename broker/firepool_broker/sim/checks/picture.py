"""The world as the trace alone shows it: pods, jobs and pools, drawn record by record. No rule lives here."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from firepool_broker.sim.trace import Record
from firepool_wire.words import TERMINAL

_TERMINAL = frozenset(str(state) for state in TERMINAL)


@dataclass(slots=True)
class PoolSeen:
    """A pool as configured."""

    sku: str
    processors: int
    max_count: int
    hold_s: float
    tenure_s: float
    boundary: str
    template: str
    infra_retries: int


@dataclass(slots=True)
class PodSeen:
    """A pod's life."""

    name: str
    sku: str
    template: str
    single_use: bool
    cards: tuple[str, ...]
    #: Attempts whose user code is alive in it.
    code: set[str] = field(default_factory=set)
    uses: int = 0
    caller: str = ""
    queue: str = ""
    tag: str = ""
    #: A reset was proved clean since the last use.
    clean: bool = True
    #: Its last use crossed a tag or queue boundary, or was a single-use job: it must not run again.
    finished: bool = False
    #: Earliest and latest moment that can count as its release.
    died_at: float = 0.0
    released_at: float | None = None
    #: Hold of its pool at its release.
    hold_s: float = 0.0
    #: Whether tags were a boundary when it was claimed last ("" = as the pool says now).
    boundary: str = ""
    #: Attempt that the broker in office has leased it to.
    leased_by: str = ""
    #: The broker in office was told: prepare failed, reset unclean, agent unreachable.
    prepare_failed: bool = False
    unclean: bool = False
    #: Something went wrong with it at some time (its early retirement needs no further reason).
    tainted: bool = False
    deleted: bool = False


@dataclass(slots=True)
class JobSeen:
    """A job's life."""

    job: str
    caller: str
    sku: str
    pods: int
    queue: str
    tag: str
    single_use: bool
    priority: str
    retries: int
    #: Place among all submissions that reached a broker.
    order: int = 0
    leased: bool = False
    accepted: bool = False
    state: str = ""
    retry: int = 0
    attempt: str = ""
    #: Pods of the running (or last) attempt.
    on: tuple[str, ...] = ()
    attempts: set[str] = field(default_factory=set)
    #: Attempt → pods where its code is alive.
    code: dict[str, set[str]] = field(default_factory=dict)
    #: Attempt → pod → whether it ended well there.
    ends: dict[str, dict[str, bool]] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal for two jobs to be served in order."""
        return (self.caller, self.sku, self.pods, self.queue, self.tag, self.single_use, self.priority)


@dataclass(slots=True)
class LimitSeen:
    """A caller's limits; None = unlimited."""

    pods: int | None
    processors: int | None
    boundary: str = ""


@dataclass(slots=True)
class Picture:
    """Everything that a property may ask."""

    pools: dict[str, PoolSeen] = field(default_factory=dict)
    limits: dict[str, LimitSeen] = field(default_factory=dict)
    pods: dict[str, PodSeen] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    jobs: dict[str, JobSeen] = field(default_factory=dict)
    #: Pods ordered by the broker in office that are neither born nor refused: pod → sku.
    ordered: dict[str, str] = field(default_factory=dict)
    #: Jobs that wait, as the broker in office knows: job → place.
    waiting: dict[str, int] = field(default_factory=dict)
    started: bool = False
    arrivals: int = 0

    def take(self, record: Record) -> None:
        """Draw one record."""
        draw = _DRAW.get((record.side, record.kind))
        if draw is not None:
            draw(self, record)

    def left_open(self, at: float) -> Iterator[tuple[str, str, str]]:
        """What is wrong at the end of a run: (number, sentence, what)."""
        for job in self.jobs.values():
            if job.accepted and job.state not in _TERMINAL:
                yield "S42", "no accepted job is lost", f"{job.job} is {job.state or 'nowhere'} at {at:.0f} s"
        for pod in self.pods.values():
            if pod.unclean and not pod.deleted:
                yield "S16", "an unclean pod retires", f"{pod.name} is still there"

    def code_of(self, caller: str) -> list[PodSeen]:
        """Pods in which the caller's code is alive."""
        return [pod for pod in self.pods.values() if pod.code and pod.caller == caller]

    # -- facts of the world ------------------------------------------------------------------------------------------

    def _pool(self, r: Record) -> None:
        self.pools[r.get("sku")] = PoolSeen(
            sku=r.get("sku"),
            processors=int(r.get("processors") or 1),
            max_count=int(r.get("max_count") or 0),
            hold_s=float(r.get("hold_s") or 0.0),
            tenure_s=float(r.get("tenure_s") or 0.0),
            boundary=r.get("boundary"),
            template=r.get("template"),
            infra_retries=int(r.get("infra_retries") or 0),
        )

    def _limit(self, r: Record) -> None:
        pods, processors = r.get("max_pods"), r.get("max_processors")
        self.limits[r.get("caller")] = LimitSeen(
            int(pods) if pods else None, int(processors) if processors else None, r.get("boundary")
        )

    def _born(self, r: Record) -> None:
        name = r.get("pod")
        self.pods[name] = PodSeen(name, r.get("sku"), r.get("template"), bool(r.get("single_use")), r.names("cards"))
        self.ordered.pop(name, None)

    def _pod_gone(self, r: Record) -> None:
        self.pods.pop(r.get("pod"), None)
        self.gone.add(r.get("pod"))

    def _code(self, r: Record) -> None:
        pod, job = self.pods.get(r.get("pod")), self.jobs.get(r.get("job"))
        attempt = r.get("attempt")
        if pod is not None:
            pod.code.add(attempt)
            pod.finished = (job is not None and job.single_use) or self.crosses(pod, r)
            pod.uses += 1
            pod.caller, pod.queue, pod.tag = r.get("caller"), r.get("queue"), r.get("tag")
            pod.clean = False
            pod.released_at = None
        if job is not None:
            job.code.setdefault(attempt, set()).add(r.get("pod"))

    def crosses(self, pod: PodSeen, r: Record) -> bool:
        """Whether this use comes from another queue or (where tags are a boundary) another tag than the one before."""
        if not pod.uses:
            return False
        boundary = pod.boundary or self.boundary_of(pod.sku, r.get("caller"))
        return pod.queue != r.get("queue") or (boundary == "retire" and pod.tag != r.get("tag"))

    def boundary_of(self, sku: str, caller: str) -> str:
        """`retire` or `hint` for this caller in this pool, now."""
        limit, pool = self.limits.get(caller), self.pools.get(sku)
        return (limit.boundary if limit is not None else "") or (pool.boundary if pool is not None else "retire")

    def _dead(self, r: Record) -> None:
        pod, attempt = self.pods.get(r.get("pod")), r.get("attempt")
        if pod is not None:
            pod.code.discard(attempt)
            pod.died_at = r.at
        job = self.jobs.get(attempt.rpartition(":")[0])
        if job is not None:
            job.code.get(attempt, set()).discard(r.get("pod"))
            job.ends.setdefault(attempt, {})[r.get("pod")] = bool(r.get("ok"))

    def _reset(self, r: Record) -> None:
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.clean = r.get("verdict") == "clean"
            pod.released_at = r.at if pod.clean and pod.uses else None
            pool = self.pools.get(pod.sku)
            pod.hold_s = pool.hold_s if pool is not None else 0.0

    def _submit(self, r: Record) -> None:
        name = r.get("job")
        self.jobs[name] = JobSeen(
            job=name,
            caller=r.get("caller"),
            sku=r.get("sku"),
            pods=int(r.get("pods") or 1),
            queue=r.get("queue"),
            tag=r.get("tag"),
            single_use=bool(r.get("single_use")),
            priority=r.get("priority"),
            retries=int(r.get("retries") or 0),
        )

    def _accept(self, r: Record) -> None:
        job = self.jobs.get(r.get("job"))
        if job is not None:
            job.accepted = True

    def _row(self, r: Record) -> None:
        job = self.jobs.get(r.get("job"))
        if job is None:
            return
        job.state = r.get("state")
        job.retry = int(r.get("retry") or 0)
        if job.state == "RUNNING" and r.get("attempt") not in job.attempts:
            job.attempt, job.on = r.get("attempt"), r.names("pods")
            job.attempts.add(job.attempt)
            self._committed(job)
        if job.state in _TERMINAL:
            self.waiting.pop(job.job, None)

    def _committed(self, job: JobSeen) -> None:
        """A pod that is bound across a boundary retires afterwards, whether or not code ran in it."""
        for pod in (self.pods[name] for name in job.on if name in self.pods):
            if job.single_use or (pod.uses and (pod.queue, pod.tag) != (job.queue, job.tag)):
                pod.tainted = True

    def _crash(self, r: Record) -> None:
        self.started = False
        self.ordered.clear()
        self.waiting.clear()
        for pod in self.pods.values():
            pod.leased_by = ""
            pod.prepare_failed = pod.unclean = False
            pod.tainted = True
        for job in self.jobs.values():
            job.leased = False

    # -- what the broker in office asks for and is told --------------------------------------------------------------

    def _broker_started(self, r: Record) -> None:
        self.started = True
        for name in r.names("jobs"):
            job = self.jobs.get(name)
            if job is not None and job.state == "QUEUED":
                self.waiting[name] = job.order

    def _submitted(self, r: Record) -> None:
        job = self.jobs.get(r.get("ask"))
        if job is not None:
            self.arrivals += 1
            job.order = self.arrivals

    def _stored(self, r: Record) -> None:
        job = self.jobs.get(r.get("job"))
        if job is not None and job.state == "QUEUED" and job.attempt == "" and not job.leased:
            self.waiting[job.job] = job.order

    def _prepare(self, r: Record) -> None:
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.leased_by = r.get("attempt")
            pod.boundary = self.boundary_of(pod.sku, r.get("caller"))
        job = self.jobs.get(r.get("attempt").rpartition(":")[0])
        if job is not None:
            job.leased = True
            self.waiting.pop(job.job, None)

    def _unleased(self, r: Record) -> None:
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.leased_by = ""

    def _reset_clean(self, r: Record) -> None:
        self._unleased(r)
        pod = self.pods.get(r.get("pod"))
        if pod is not None and pod.released_at is not None:
            pod.released_at = r.at

    def _reset_unclean(self, r: Record) -> None:
        self._unleased(r)
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.unclean = pod.tainted = True

    def _prepare_failed(self, r: Record) -> None:
        """The pods of the whole set retire (spec §3), also those whose own agent did prepare; an answer to a lease that was
        undone meanwhile says nothing."""
        failed = self.pods.get(r.get("pod"))
        if failed is None or failed.leased_by != r.get("attempt"):
            return
        failed.prepare_failed = True
        for pod in self.pods.values():
            if pod.leased_by == r.get("attempt"):
                pod.tainted = True

    def _unreachable(self, r: Record) -> None:
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.tainted = True

    def _create(self, r: Record) -> None:
        if r.get("pod") not in self.pods:
            self.ordered[r.get("pod")] = r.get("sku")

    def _create_failed(self, r: Record) -> None:
        self.ordered.pop(r.get("pod"), None)

    def _delete(self, r: Record) -> None:
        pod = self.pods.get(r.get("pod"))
        if pod is not None:
            pod.deleted = True


#: Which record is drawn how.
_DRAW = {
    ("W", "pool"): Picture._pool,
    ("W", "limit"): Picture._limit,
    ("W", "born"): Picture._born,
    ("W", "gone"): Picture._pod_gone,
    ("W", "code"): Picture._code,
    ("W", "dead"): Picture._dead,
    ("W", "reset"): Picture._reset,
    ("W", "submit"): Picture._submit,
    ("W", "accept"): Picture._accept,
    ("W", "row"): Picture._row,
    ("W", "crash"): Picture._crash,
    ("E", "BrokerStarted"): Picture._broker_started,
    ("E", "JobSubmitted"): Picture._submitted,
    ("E", "JobStored"): Picture._stored,
    ("E", "ResetClean"): Picture._reset_clean,
    ("E", "ResetUnclean"): Picture._reset_unclean,
    ("E", "LeasePrepareFailed"): Picture._prepare_failed,
    ("E", "PodUnreachable"): Picture._unreachable,
    ("E", "AttemptProbed"): Picture._unreachable,
    ("E", "PodCreateFailed"): Picture._create_failed,
    ("F", "PrepareLease"): Picture._prepare,
    ("F", "AbandonLease"): Picture._unleased,
    ("F", "CreatePod"): Picture._create,
    ("F", "DeletePod"): Picture._delete,
}
