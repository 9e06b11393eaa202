"""A small model world around the engine: a store with versions, a provider, agents with processes. Every effect becomes a
piece of work that a test lets happen when and how it likes; every safety property that is a trace is asserted where it
could be broken (audit §5), so each test that uses the world also tests those.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from firepool_broker.core.asks import Ask, Binding, Exit, Failure, FoundJob, FoundPod, LastUse
from firepool_broker.core.effects import (
    AbandonLease,
    Accept,
    CommitEnd,
    CommitStart,
    CreatePod,
    DeletePod,
    Effect,
    FollowAttempt,
    LaunchAttempt,
    MarkReleased,
    MarkRunning,
    Notify,
    PrepareLease,
    ProbeAttempt,
    QueueJob,
    RecordCancel,
    Refuse,
    ResetPod,
    SettleCommit,
    StopAttempt,
    StoreJob,
    WakeAt,
)
from firepool_broker.core.engine import Engine
from firepool_broker.core.events import (
    AttemptEnded,
    AttemptProbed,
    BrokerStarted,
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
    PodReady,
    PodSettled,
    PodUnreachable,
    PoolsConfigured,
    ResetClean,
    ResetUnclean,
    Woke,
)
from firepool_broker.core.ids import AttemptId, Caller, Card, JobId, PodName, job_of
from firepool_broker.core.pools import Pool
from firepool_wire.words import TERMINAL, JobState, Path, PodState
from tests.builders import a_bad_exit, a_failure, a_good_exit


@dataclass
class Row:
    """A job in the store."""

    ask: Ask
    state: JobState
    version: int = 1
    retry_count: int = 0
    infra_retries: int = 0
    cancel_requested: bool = False
    attempt: AttemptId | None = None
    pods: tuple[PodName, ...] = ()
    path: Path | None = None
    retire_after: tuple[bool, ...] = ()
    why: str = ""
    exit: Exit | None = None
    failure: Failure | None = None


@dataclass
class Agent:
    """A pod with its agent: what it has on disk, which process runs in it."""

    name: PodName
    order: CreatePod
    cards: tuple[Card, ...]
    created_at: float
    ready: bool = False
    deleting: bool = False
    silent: bool = False
    #: attempt → prepared | running | ended
    attempts: dict[AttemptId, str] = field(default_factory=dict)
    exits: dict[AttemptId, Exit] = field(default_factory=dict)
    #: Attempts that were launched here, in order, with the owner of each.
    history: list[tuple[AttemptId, Caller]] = field(default_factory=list)
    last_user: LastUse | None = None
    user_before: LastUse | None = None
    dirty: bool = False
    #: The binding that the store has of it.
    binding: Binding | None = None


@dataclass
class Work:
    """Something under way: what it is, and what happens when it is done in one way or another."""

    kind: str
    subject: str
    ways: dict[str, Callable[[], list[Event]]]


class World:
    """The engine, and everything around it."""

    def __init__(self, pools: Iterable[Pool] = (), *, start: bool = True, check: bool = True) -> None:
        self.pools = tuple(pools)
        self.check = check
        self.now = 0.0
        self.engine = Engine(story_capacity=4096)
        self.rows: dict[JobId, Row] = {}
        self.agents: dict[PodName, Agent] = {}
        self.writes: list[Effect] = []
        self.work: list[Work] = []
        self.effects: list[Effect] = []
        self.accepted: dict[JobId, JobState] = {}
        self.refused: dict[JobId, Failure] = {}
        self.submitted: dict[JobId, Ask] = {}
        self.wake_at = float("inf")
        self.retired_after: set[PodName] = set()
        self.won: set[AttemptId] = set()
        if start:
            self.send(PoolsConfigured(self.pools))
            self.send(BrokerStarted())

    # -- driving ----------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> list[Effect]:
        """One fact into the engine; its effects become work."""
        effects = self.engine.handle(event, self.now)
        if self.check:
            self.engine.check(everything=True)
        for effect in effects:
            self.effects.append(effect)
            self.take(effect)
        return effects

    def send_all(self, events: Iterable[Event]) -> None:
        """Facts one after the other."""
        for event in events:
            self.send(event)

    def submit(self, ask: Ask) -> list[Effect]:
        """A job comes in now."""
        self.submitted[ask.job] = ask
        return self.send(JobSubmitted(ask))

    def advance(self, seconds: float) -> None:
        """Let time pass, with every wake-up in it."""
        until = self.now + seconds
        while self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.wake_at = float("inf")
            self.send(Woke())
        self.now = until

    def run(self, ask: Ask) -> Row:
        """A job from its submission to its good end, its pods reset."""
        self.submit(ask)
        self.settle()
        while self.do("end"):
            self.settle()
        return self.rows[ask.job]

    def do(self, kind: str, way: str = "ok", subject: str = "") -> bool:
        """Finish the first piece of work of that kind (and subject) in that way; False when there is none."""
        if kind == "write":
            return self.write(way)
        for index, work in enumerate(self.work):
            if work.kind == kind and (not subject or subject in work.subject):
                del self.work[index]
                self.finish(work, way)
                return True
        return False

    def finish(self, work: Work, way: str) -> None:
        """Finish a piece of work that was taken off the list."""
        for event in work.ways[way]():
            self.send(event)

    def settle(self, but: tuple[str, ...] = (), rounds: int = 400) -> None:
        """Everything under way ends well, without time passing; jobs run on, and so does what is named in `but`."""
        for _ in range(rounds):
            if not (self.write("ok") or self._first({"end", *but})):
                return
        raise AssertionError("the world does not come to rest")

    def run_out(self, rounds: int = 3000) -> None:
        """Everything ends well, jobs included, and time passes until nothing waits any more (liveness)."""
        for _ in range(rounds):
            if self.write("ok") or self._first(set()):
                continue
            if all(row.state in TERMINAL for row in self.rows.values()) and not self.work:
                return
            self.advance(1.0)
        waiting = {job: row.state for job, row in self.rows.items() if row.state not in TERMINAL}
        stories = ["\n".join(self.engine.story_of(job)) for job in waiting]
        raise AssertionError(f"never ended: {waiting}\n{self.engine.pool_views()}\n{stories}")

    def _first(self, without: set[str]) -> bool:
        for index, work in enumerate(self.work):
            if work.kind not in without:
                del self.work[index]
                self.finish(work, "ok")
                return True
        return False

    def crash(self) -> None:
        """The broker dies: what was only in its memory or under way is lost; processes and pods live on."""
        self.engine = Engine(story_capacity=4096)
        self.now += 0.5
        self.writes.clear()
        self.wake_at = float("inf")
        self.work = [work for work in self.work if work.kind in ("delete",)]
        for agent in self.agents.values():
            agent.silent = False

    def recover(self) -> list[Effect]:
        """A new broker starts."""
        self.send(PoolsConfigured(self.pools))
        for agent in self.agents.values():
            self._abandon_unbound(agent)
        jobs = tuple(self._found_job(row) for row in self.rows.values() if row.state not in TERMINAL)
        bindings = tuple(agent.binding for agent in self.agents.values() if agent.binding is not None)
        pods = tuple(self._found_pod(agent) for agent in self.agents.values())
        effects = self.send(BrokerStarted(pods, jobs, bindings))
        for row in list(self.rows.values()):
            if row.state is JobState.PENDING:
                self._tell_ended_inputs(row)
        return effects

    def _tell_ended_inputs(self, row: Row) -> None:
        """The shell knows which inputs ended before the restart."""
        for name in row.ask.depends:
            found = self.rows.get(name)
            if found is None:
                self.send(DependencyEnded(row.ask.job, name, a_failure("NotFound")))
            elif found.state in TERMINAL:
                self.send(DependencyEnded(row.ask.job, name, found.failure))

    # -- looking ----------------------------------------------------------------------------------------------------

    def row(self, job: str) -> Row:
        """The job's row."""
        return self.rows[JobId(job)]

    def states(self) -> dict[str, PodState]:
        """Pods by state."""
        return {view.pod: view.state for view in self.engine.pod_views()}

    def of(self, kind: type[Effect]) -> list[Effect]:
        """Effects of that kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def alive(self, job: JobId) -> list[tuple[PodName, AttemptId]]:
        """Where processes of the job run."""
        return [
            (agent.name, attempt)
            for agent in self.agents.values()
            for attempt, state in agent.attempts.items()
            if state == "running" and job_of(attempt) == job
        ]

    # -- effects become work ----------------------------------------------------------------------------------------

    def take(self, effect: Effect) -> None:
        """What the shell would begin."""
        match effect:
            case StoreJob() | QueueJob() | CommitStart() | SettleCommit() | RecordCancel() | CommitEnd():
                self.writes.append(effect)
            case Accept():
                assert effect.job not in self.accepted and effect.job not in self.refused, "answered twice"
                assert effect.job in self.rows, "accepted, but not durable"
                self.accepted[effect.job] = effect.state
            case Refuse():
                assert effect.job not in self.accepted and effect.job not in self.refused, "answered twice"
                self.refused[effect.job] = effect.failure
            case WakeAt():
                assert effect.at < self.wake_at, "only an earlier wake-up may be asked for"
                self.wake_at = effect.at
            case CreatePod():
                self._create(effect)
            case DeletePod():
                self._delete(effect)
            case PrepareLease():
                self._prepare(effect)
            case AbandonLease():
                self._abandon(effect)
            case LaunchAttempt():
                for rank, pod in enumerate(effect.pods):
                    self._launch(effect, pod, rank)
            case FollowAttempt():
                for pod in effect.pods:
                    self._follow(self.agents[pod], effect.attempt)
            case StopAttempt():
                self._stop(effect)
            case ProbeAttempt():
                self._probe(effect)
            case ResetPod():
                self._reset(effect)
            case MarkRunning() | MarkReleased() | Notify():
                pass

    def write(self, way: str) -> bool:
        """The store takes the next write."""
        if not self.writes:
            return False
        effect = self.writes.pop(0)
        for event in self._write(effect, way):
            self.send(event)
        return True

    def _write(self, effect: Effect, way: str) -> list[Event]:
        match effect:
            case StoreJob():
                if way == "fail":
                    return [JobStoreFailed(effect.ask.job, a_failure("StoreUnavailable"))]
                self.rows[effect.ask.job] = Row(effect.ask, effect.state)
                return [JobStored(effect.ask.job)]
            case QueueJob():
                row = self.rows.get(effect.job)
                if row is not None:
                    assert (row.version, row.state) == (effect.version, JobState.PENDING), "S4"
                    row.state, row.version = JobState.QUEUED, row.version + 1
            case RecordCancel():
                row = self.rows[effect.job]
                assert row.version == effect.version, "S4"
                row.cancel_requested, row.version = True, row.version + 1
            case CommitStart():
                return self._commit_start(effect, way)
            case SettleCommit():
                row = self.rows.get(job_of(effect.attempt))
                if row is not None and row.attempt == effect.attempt:
                    return [Committed(effect.attempt)]
                return [CommitLost(effect.attempt, a_failure("StoreUnavailable"))]
            case CommitEnd():
                return self._commit_end(effect, way)
        return []

    def _commit_start(self, effect: CommitStart, way: str) -> list[Event]:
        job = job_of(effect.attempt)
        if way == "fail" or (not effect.insert and job not in self.rows):
            return [CommitLost(effect.attempt, a_failure("StoreUnavailable"))]
        if way != "unknown_lost":
            if effect.insert:
                assert job not in self.rows, "inserted twice"
                self.rows[job] = Row(self.submitted[job], JobState.RUNNING)
            row = self.rows[job]
            if not effect.insert:
                assert (row.version, row.state) == (effect.version, JobState.QUEUED), "S4"
                row.state, row.version = JobState.RUNNING, row.version + 1
            assert effect.attempt not in self.won, "S41 an attempt id came back"
            self.won.add(effect.attempt)
            row.attempt, row.pods, row.path = effect.attempt, effect.pods, effect.path
            row.retire_after, row.why = effect.retire_after, effect.why_not_warmer
            for pod, retire in zip(effect.pods, effect.retire_after, strict=True):
                if pod in self.agents:
                    self.agents[pod].binding = Binding(
                        pod=pod,
                        attempt=effect.attempt,
                        caller=effect.caller,
                        queue=effect.queue,
                        tag=effect.tag,
                        retire_after=retire,
                    )
        return [CommitUnknown(effect.attempt)] if way.startswith("unknown") else [Committed(effect.attempt)]

    def _commit_end(self, effect: CommitEnd, way: str) -> list[Event]:
        job = job_of(effect.attempt)
        row = self.rows.get(job)
        if way == "fail" or row is None:
            return [EndCommitFailed(effect.attempt, a_failure("StoreUnavailable"))]
        assert row.version == effect.version, f"S4 {row.version} != {effect.version}"
        assert row.state not in TERMINAL, "a terminal job changed"
        if effect.state is JobState.FAILED:
            assert effect.failure is not None, "S51 failed without an error class"
        if effect.state is JobState.CANCELLED:
            assert not self.alive(job), "S26 cancelled while a process of it runs"
        if effect.state is JobState.QUEUED:
            assert effect.retry_count == row.retry_count + 1, "S41 every re-queue raises the retry count"
            used = effect.retry_count - effect.infra_retries
            assert used <= row.ask.max_retries, "S41 more retries than asked for"
        row.state, row.version = effect.state, row.version + 1
        row.retry_count, row.infra_retries = effect.retry_count, effect.infra_retries
        row.exit, row.failure = effect.exit, effect.failure
        return [EndCommitted(effect.attempt)]

    # -- provider ---------------------------------------------------------------------------------------------------

    def _create(self, effect: CreatePod) -> None:
        assert effect.pod not in self.agents, "a pod name came back"
        pool = next(pool for pool in self.pools if pool.sku == effect.sku)
        mine = [agent for agent in self.agents.values() if agent.order.sku == effect.sku]
        assert len(mine) + 1 <= pool.max_pods, "S30 created above the ceiling"
        cards = tuple(Card(f"{effect.pod}/{index}") for index in range(pool.shape.gpus))
        agent = self.agents[effect.pod] = Agent(effect.pod, effect, cards, self.now)

        def ready() -> list[Event]:
            if effect.pod not in self.agents:
                return []
            agent.ready = True
            return [PodReady(effect.pod, agent.cards, "namespaces")]

        def failed() -> list[Event]:
            if self.agents.pop(effect.pod, None) is None:
                return []
            return [PodCreateFailed(effect.pod, a_failure("ImagePullError"))]

        self.work.append(Work("create", effect.pod, {"ok": ready, "fail": failed}))

    def _delete(self, effect: DeletePod) -> None:
        agent = self.agents.get(effect.pod)
        if agent is not None and not agent.deleting:
            agent.deleting = True
            gone = lambda: self.die(effect.pod)  # noqa: E731
            self.work.append(Work("delete", effect.pod, {"ok": gone, "fail": gone}))

    def die(self, pod: PodName, oom: bool = False) -> list[Event]:
        """The pod and everything in it is gone."""
        if self.agents.pop(pod, None) is None:
            return []
        self.work = [work for work in self.work if work.subject != pod]
        return [PodGone(pod, "died", oom)]

    # -- agents -----------------------------------------------------------------------------------------------------

    def _prepare(self, effect: PrepareLease) -> None:
        view = next(view for view in self.engine.pod_views() if view.pod == effect.pod)
        if view.used:
            assert view.owner == effect.caller, "S10 a used pod is claimed by another caller"
        assert effect.pod not in self.retired_after, "S11 a pod that must retire is claimed again"

        def ok() -> list[Event]:
            agent = self.agents.get(effect.pod)
            if agent is None:
                return []
            agent.attempts[effect.attempt] = "prepared"
            agent.user_before = agent.last_user
            agent.last_user = LastUse(caller=effect.caller, queue=effect.queue, tag=effect.tag)
            return [LeasePrepared(effect.attempt, effect.pod)]

        def fail() -> list[Event]:
            return [LeasePrepareFailed(effect.attempt, effect.pod, a_failure("HostLost"))]

        self.work.append(Work("prepare", effect.pod, {"ok": ok, "fail": fail}))

    def _abandon(self, effect: AbandonLease) -> None:
        self.work = [w for w in self.work if not (w.kind == "prepare" and w.subject == effect.pod)]
        agent = self.agents.get(effect.pod)
        if agent is not None and agent.attempts.pop(effect.attempt, None) is not None:
            agent.last_user = agent.user_before

    def _abandon_unbound(self, agent: Agent) -> None:
        """At a start the shell abandons prepared leases that no committed start belongs to."""
        for attempt, state in list(agent.attempts.items()):
            if state == "prepared" and attempt not in self.won:
                del agent.attempts[attempt]
                agent.last_user = agent.user_before

    def _launch(self, effect: LaunchAttempt, pod: PodName, rank: int) -> None:
        row = self.rows[job_of(effect.attempt)]
        assert row.state is JobState.RUNNING and row.attempt == effect.attempt, "S3 launched before its commit"
        assert pod == row.pods[rank]

        def ok() -> list[Event]:
            agent = self.agents.get(pod)
            if agent is None or agent.attempts.get(effect.attempt) != "prepared":
                return []
            self._start_process(agent, effect.attempt)
            return [Launched(effect.attempt, pod)]

        def fail() -> list[Event]:
            agent = self.agents.get(pod)
            if agent is None or agent.attempts.get(effect.attempt) != "prepared":
                return []
            return [LaunchFailed(effect.attempt, pod, a_failure("PackageError"))]

        self.work.append(Work("launch", pod, {"ok": ok, "fail": fail}))

    def _start_process(self, agent: Agent, attempt: AttemptId) -> None:
        job = job_of(attempt)
        others = [other for _, other in self.alive(job) if other != attempt]
        assert not others, f"S47 {attempt} overlaps {others}"
        assert "running" not in agent.attempts.values(), "S1 two attempts run on one pod"
        assert not agent.dirty, "S16 used again without a clean reset"
        caller = self.rows[job].ask.caller
        assert all(before == caller for _, before in agent.history), "S10 consecutive users differ"
        assert not (agent.order.single_use and agent.history), "S20 a single-use pod ran twice"
        agent.history.append((attempt, caller))
        agent.attempts[attempt] = "running"
        agent.dirty = True
        row = self.rows[job]
        if row.retire_after[row.pods.index(agent.name)]:
            self.retired_after.add(agent.name)
        self._follow(agent, attempt)

    def _follow(self, agent: Agent, attempt: AttemptId) -> None:
        pod = agent.name

        def ending(ended: Exit) -> Callable[[], list[Event]]:
            return lambda: self._end(pod, attempt, ended)

        def first() -> list[Event]:
            return [FirstInstruction(attempt, pod, self.now)] if self._runs(pod, attempt) else []

        self.work.append(Work("first", pod, {"ok": first, "fail": first}))
        ways = {"ok": ending(a_good_exit()), "fail": ending(a_bad_exit())}
        self.work.append(Work("end", pod, ways))

    def _runs(self, pod: PodName, attempt: AttemptId) -> bool:
        agent = self.agents.get(pod)
        return agent is not None and agent.attempts.get(attempt) == "running"

    def _end(self, pod: PodName, attempt: AttemptId, ended: Exit) -> list[Event]:
        agent = self.agents.get(pod)
        if agent is None or agent.attempts.get(attempt) not in ("running", "prepared"):
            return []
        agent.attempts[attempt] = "ended"
        agent.exits[attempt] = ended
        return [AttemptEnded(attempt, pod, ended)]

    def _stop(self, effect: StopAttempt) -> None:
        def stopped() -> list[Event]:
            agent = self.agents.get(effect.pod)
            ran = agent is not None and agent.attempts.get(effect.attempt) == "running"
            code, signal = (143, 15) if ran else (None, None)
            return self._end(effect.pod, effect.attempt, Exit(exit_code=code, signal=signal, failure=effect.failure))

        self.work.append(Work("stop", effect.pod, {"ok": stopped, "fail": lambda: []}))

    def _reset(self, effect: ResetPod) -> None:
        pod = effect.pod

        def clean(settling: bool) -> list[Event]:
            agent = self.agents.get(pod)
            if agent is None:
                return []
            for attempt, state in agent.attempts.items():
                if state in ("running", "prepared"):
                    agent.attempts[attempt] = "ended"
                    agent.exits.setdefault(attempt, a_bad_exit("Signaled", 137, 9))
            agent.dirty = False
            if agent.last_user is not None:
                agent.last_user = _released(agent.last_user, self.now)
            if settling:
                settled: Callable[[], list[Event]] = lambda: [PodSettled(pod)] if pod in self.agents else []  # noqa: E731
                full: Callable[[], list[Event]] = lambda: (  # noqa: E731
                    [ResetUnclean(pod, effect.attempt, "its space did not come back")] if pod in self.agents else []
                )
                self.work.append(Work("settle", pod, {"ok": settled, "fail": full}))
            return [ResetClean(pod, effect.attempt, settling)]

        def unclean() -> list[Event]:
            return [ResetUnclean(pod, effect.attempt, "a process is left")] if pod in self.agents else []

        ways = {"ok": lambda: clean(False), "settling": lambda: clean(True), "fail": unclean}
        self.work.append(Work("reset", pod, ways))

    def _probe(self, effect: ProbeAttempt) -> None:
        def truth() -> list[Event]:
            agent = self.agents.get(effect.pod)
            if agent is None:
                return [AttemptProbed(effect.attempt, effect.pod, "gone")]
            state = agent.attempts.get(effect.attempt, "unknown")
            if state == "running":
                return [AttemptProbed(effect.attempt, effect.pod, "live")]
            if state == "ended":
                return [AttemptProbed(effect.attempt, effect.pod, "ended", agent.exits[effect.attempt])]
            # Prepared and never launched: the agent is told to forget it, so it cannot be launched later.
            agent.attempts.pop(effect.attempt, None)
            return [AttemptProbed(effect.attempt, effect.pod, "unknown")]

        def silent() -> list[Event]:
            return [AttemptProbed(effect.attempt, effect.pod, "unreachable", why="timed out")]

        self.work.append(Work("probe", effect.pod, {"ok": truth, "fail": silent}))

    def unreachable(self, pod: PodName) -> None:
        """A call to the pod's agent timed out."""
        self.send(PodUnreachable(pod, "timed out"))

    # -- what a start finds -----------------------------------------------------------------------------------------

    def _found_job(self, row: Row) -> FoundJob:
        running = row.state is JobState.RUNNING
        return FoundJob(
            ask=row.ask,
            state=row.state,
            retry_count=row.retry_count,
            version=row.version,
            infra_retries=row.infra_retries,
            cancel_requested=row.cancel_requested,
            pods=row.pods if running else (),
            path=row.path if running else None,
            retire_after=any(row.retire_after) if running else False,
            why_not_warmer=row.why,
            started_at=self.now,
        )

    def _found_pod(self, agent: Agent) -> FoundPod:
        return FoundPod(
            pod=agent.name,
            sku=agent.order.sku,
            template=agent.order.template,
            created_at=agent.created_at,
            ready=agent.ready,
            single_use=agent.order.single_use,
            terminating=agent.deleting,
            cards=agent.cards,
            isolation="namespaces" if agent.ready else "",
            agent=agent.last_user,
            agent_answered=agent.ready,
        )


def _released(use: LastUse, now: float) -> LastUse:
    return LastUse(caller=use.caller, queue=use.queue, tag=use.tag, released_at=now)
