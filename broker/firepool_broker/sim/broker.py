"""One life of a broker: a fresh engine, the events it is given, the effects it asks for, and its death at any instant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from firepool_broker.core.asks import Ask, Failure
from firepool_broker.core.effects import Effect, Refuse
from firepool_broker.core.events import (
    BrokerStarted,
    CallerLimited,
    CancelRequested,
    ClientRenewed,
    DependencyEnded,
    Event,
    JobSubmitted,
    PoolsConfigured,
)
from firepool_broker.core.ids import Caller, JobId
from firepool_broker.core.pools import CallerLimits, Pool
from firepool_broker.sim.hands import Hands
from firepool_broker.sim.scene import Scene
from firepool_broker.sim.trace import Side
from firepool_broker.sim.yard import SimPod, Tenancy
from firepool_wire.words import TERMINAL, JobState

#: `check(everything=True)` runs once in so many events (house style: every invariant, but not at every step).
CHECK_ALL_EVERY = 1000


class Core(Protocol):
    """The engine's door, as the simulated shell uses it."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...
    def check(self, everything: bool = False) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What an operator has configured; every broker reads the same."""

    pools: tuple[Pool, ...]
    limits: tuple[tuple[Caller, CallerLimits], ...] = ()
    #: Level of isolation that every pod of this run has.
    isolation: str = "namespaces"


@dataclass(slots=True)
class Broker:
    """A broker from its start to its death."""

    scene: Scene
    config: Config
    engine: Core
    #: Writes an event or effect into the trace.
    note: Callable[[Side, Event | Effect], None]
    hands: Hands = field(init=False)
    handled: int = 0
    #: Submissions that are on their way through the engine (same key in flight joins the first request).
    arriving: set[JobId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hands = Hands(self.scene, self.give)

    def start(self) -> None:
        """Read store, provider and agents; undo prepared leases that no start stands behind; then open for business."""
        self._undo_orphans()
        self.configure(self.config)
        pods = self.scene.yard.found(self.config.isolation)
        ledger = self.scene.ledger
        jobs = ledger.unfinished()
        for found in jobs:
            self.hands.store.asks[found.ask.job] = found.ask
        self.give(BrokerStarted(pods, tuple(jobs), tuple(ledger.bindings_of(pod.pod for pod in pods))))
        for found in jobs:
            if found.state is JobState.PENDING:
                self._tell_inputs(found.ask)

    def configure(self, config: Config) -> None:
        """The operator's configuration, at the start and whenever it is edited."""
        self.config = config
        self.give(PoolsConfigured(config.pools))
        for caller, limits in config.limits:
            self.give(CallerLimited(caller, limits))

    def _undo_orphans(self) -> None:
        """A prepared lease without a row that runs it counts as never prepared (`design.md` §1)."""
        rows = self.scene.ledger.rows.values()
        running = {row.attempt for row in rows if row.state not in TERMINAL and row.pods}
        for pod in self.scene.yard.pods.values():
            if pod.now is None or pod.now.attempt in running or pod.hung_until > self.scene.clock.now:
                continue
            self.scene.yard.abandon(pod, pod.now.attempt)

    def die(self) -> None:
        """SIGKILL: nothing is given any more; the commit in flight was durable as a whole or not at all."""
        self.hands.answers.alive = False
        for row in self.scene.ledger.crash(durable=self.scene.dice.coin()):
            self.scene.log_row(row)

    def give(self, event: Event) -> None:
        """One event through the engine, and its effects into the world."""
        self.note("E", event)
        effects: Sequence[Effect] = self.engine.handle(event, self.scene.clock.now)
        for effect in effects:
            self.note("F", effect)
        self.handled += 1
        self.engine.check(self.handled % CHECK_ALL_EVERY == 0)
        for effect in effects:
            if isinstance(effect, Refuse):
                self.arriving.discard(effect.job)
            self.hands.carry(effect)

    # -- the desk where clients ask ----------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> None:
        """A submission arrives; one that is durable already is answered from its row."""
        row = self.scene.ledger.rows.get(ask.job)
        if row is not None:
            self.scene.clients.accepted(ask.job, row.state)
        elif ask.job not in self.arriving:
            self.arriving.add(ask.job)
            self.hands.store.asks[ask.job] = ask
            self.give(JobSubmitted(ask))
            self._tell_inputs(ask)

    def _tell_inputs(self, ask: Ask) -> None:
        """Inputs that ended before the engine knew of the job that waits for them."""
        for dependency in ask.depends:
            row = self.scene.ledger.rows.get(dependency)
            if row is not None and row.state in TERMINAL:
                self.give(DependencyEnded(ask.job, dependency, row.failure))

    def cancel(self, job: JobId, failure: Failure) -> None:
        """A cancel arrives."""
        self.give(CancelRequested(job, failure, "submitter"))

    def renew(self, jobs: tuple[JobId, ...]) -> None:
        """A lease renewal arrives."""
        self.give(ClientRenewed(jobs))

    # -- what the world tells a living broker ------------------------------------------------------------------------

    def pod_ready(self, pod: SimPod) -> None:
        """A pod's agent answers."""
        self.hands.provider.report_ready(pod, self.config.isolation)

    def attempt_ended(self, pod: SimPod, tenancy: Tenancy) -> None:
        """An attempt has ended on a pod."""
        self.hands.agents.report_end(pod, tenancy)
