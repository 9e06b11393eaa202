"""A whole run: virtual clock, pods, store, clients, and brokers that die and are born again; all from one seed.

`World(plan).run()` gives an `Outcome` or raises `RunFailed`, whose message carries the seed, the broken property and the
trace's last lines. It never reads a clock and draws only from the plan's seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from firepool_broker.core.effects import Effect
from firepool_broker.core.engine import Engine
from firepool_broker.core.errors import CoreError
from firepool_broker.core.events import Event
from firepool_broker.core.ids import AttemptId
from firepool_broker.core.pools import Pool
from firepool_broker.sim.broker import Broker, Config, Core
from firepool_broker.sim.checks import Checks
from firepool_broker.sim.clients import Clients
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import NONE, Dice, Faults
from firepool_broker.sim.ledger import Ledger
from firepool_broker.sim.load import Workload
from firepool_broker.sim.outcome import Outcome, outcome_of
from firepool_broker.sim.scene import Scene
from firepool_broker.sim.trace import Record, Side, Trace, about, short
from firepool_broker.sim.venue import LOCAL, Venue
from firepool_broker.sim.yard import SimPod, Yard
from firepool_wire.words import TERMINAL, JobState

#: What a bug of the engine looks like from outside: a broken property or invariant, or a plain Python error.
_BUGS = (AssertionError, CoreError, LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that fixes a run."""

    seed: int
    config: Config
    workload: Workload
    venue: Venue = LOCAL
    faults: Faults = NONE
    #: What the operator configures later: (virtual seconds, the whole configuration).
    edits: tuple[tuple[float, Config], ...] = ()
    #: Virtual seconds after which a run that is not done has failed.
    horizon_s: float = 7200.0
    #: Virtual seconds that the world goes on after the last job, so that resets, holds and deletions are judged too.
    tail_s: float = 30.0
    #: Makes the engine of each broker; tests put broken ones here.
    engine: Callable[[], Core] = Engine


class RunFailed(AssertionError):
    """A run broke a property, or did not end; the message says with which seed to see it again."""

    def __init__(self, plan: Plan, why: str, trace: Trace) -> None:
        super().__init__(f"seed {plan.seed}, workload {plan.workload.name}, {plan.faults}: {why}\n{trace.tail(40)}")
        self.seed = plan.seed
        self.why = why
        self.trace = trace


@dataclass(slots=True)
class World:
    """One run."""

    plan: Plan
    trace: Trace = field(default_factory=Trace)
    checks: Checks = field(default_factory=Checks)
    clock: Clock = field(default_factory=Clock)
    broker: Broker | None = None
    crashes: int = 0
    config: Config = field(init=False)
    scene: Scene = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.config = plan.config
        dice = Dice.of(plan.seed, plan.faults)
        ledger = Ledger()
        clients = Clients(clock=self.clock, dice=dice, venue=plan.venue, log=self.log, desk=lambda: self.broker)
        yard = Yard(
            clock=self.clock,
            dice=dice,
            venue=plan.venue,
            log=self.log,
            bodies=clients.body,
            on_ready=self._pod_ready,
            on_gone=self._pod_gone,
            on_code=self._code_began,
            on_ended=lambda pod, tenancy: self.broker.attempt_ended(pod, tenancy) if self.broker else None,
        )
        self.scene = Scene(
            clock=self.clock,
            dice=dice,
            venue=plan.venue,
            log=self.log,
            yard=yard,
            ledger=ledger,
            clients=clients,
        )

    def run(self) -> Outcome:
        """Run to the last job's end and a little further.

        Raises:
            RunFailed: a property broke, or jobs were left at the horizon.
        """
        try:
            self._run()
        except _BUGS as broken:
            if isinstance(broken, RunFailed):
                raise
            raise RunFailed(self.plan, f"{type(broken).__name__}: {broken}", self.trace) from broken
        return outcome_of(self.scene, self.trace, self.crashes)

    def _run(self) -> None:
        plan = self.plan
        self._configure(plan.config)
        for at, config in plan.edits:
            self.clock.at(at, partial(self._edit, config))
        self._birth()
        self.scene.clients.begin(plan.workload)
        self._plan_crash()
        self.clock.run(plan.horizon_s, lambda: self.scene.clients.done)
        if not self.scene.clients.done:
            left = self.scene.clients.waiting_for()
            raise RunFailed(
                plan, f"S42: after {plan.horizon_s:.0f} s these jobs have not ended: {left[:8]}", self.trace
            )
        self.clock.run(self.clock.now + plan.tail_s, lambda: False)
        if self.broker is not None:
            self.broker.engine.check(True)
        self.checks.finish(self.clock.now)

    # -- the trace ---------------------------------------------------------------------------------------------------

    def log(self, kind: str, **facts: object) -> None:
        """A fact of the world into the trace."""
        named = {key: text for key, value in facts.items() if (text := short(value))}
        self._add(Record(self.clock.now, "W", kind, named))

    def _note(self, side: Side, what: Event | Effect) -> None:
        self._add(Record(self.clock.now, side, type(what).__name__, about(what)))

    def _add(self, record: Record) -> None:
        self.trace.add(record)
        self.checks.see(record)

    def _configure(self, config: Config) -> None:
        """From now on this is what the operator wants."""
        self.config = config
        self.scene.yard.pools = {pool.sku: pool for pool in config.pools}
        for pool in config.pools:
            self.log("pool", **_pool_facts(pool))
        for caller, limits in config.limits:
            self.log(
                "limit",
                caller=caller,
                max_pods=limits.max_pods,
                max_processors=limits.max_processors,
                boundary=limits.tag_boundary,
            )

    def _edit(self, config: Config) -> None:
        self._configure(config)
        if self.broker is not None:
            self.broker.configure(config)

    # -- lives of brokers --------------------------------------------------------------------------------------------

    def _birth(self) -> None:
        self.log("up")
        broker = Broker(self.scene, self.config, self.plan.engine(), self._note)
        self.broker = broker
        broker.start()

    def _plan_crash(self) -> None:
        faults = self.plan.faults
        if faults.crash_every_s > 0 and self.crashes < faults.crashes_max:
            self.clock.after(self.scene.dice.exponential(faults.crash_every_s), self._crash)

    def _crash(self) -> None:
        if self.broker is None:
            return
        self.crashes += 1
        self.broker.die()
        self.broker = None
        self.log("crash")
        self.clock.after(self.plan.venue.restart.draw(self.scene.dice.time), self._rebirth)

    def _rebirth(self) -> None:
        self._birth()
        clients = self.scene.clients
        for story in list(clients.stories.values()):
            row = self.scene.ledger.rows.get(story.job)
            if story.state is None and row is not None and row.state in TERMINAL:
                clients.ended(story.job, JobState(row.state))
        clients.broker_is_back()
        self._plan_crash()

    # -- what the world tells whichever broker lives -----------------------------------------------------------------

    def _pod_ready(self, pod: SimPod) -> None:
        if self.broker is not None:
            self.broker.pod_ready(pod)

    def _pod_gone(self, pod: SimPod, why: str, oom: bool) -> None:
        if self.broker is not None:
            self.broker.hands.provider.report_gone(pod, why, oom)

    def _code_began(self, pod: SimPod, attempt: AttemptId) -> None:
        if self.broker is not None:
            self.broker.hands.agents.report_code(pod, attempt)


def _pool_facts(pool: Pool) -> dict[str, object]:
    return {
        "sku": pool.sku,
        "processors": pool.shape.processors,
        "max_count": pool.max_count,
        "min_count": pool.min_count,
        "hold_s": pool.hold_s,
        "tenure_s": pool.hold_tenure_min_s,
        "boundary": pool.tag_boundary,
        "template": pool.template,
        "infra_retries": pool.max_infra_retries,
    }
