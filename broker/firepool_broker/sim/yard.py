"""The physical world: pods, the agents in them, and the processes they run. It knows what really happens, whether or not a
broker lives to hear of it.

Every method acts at the present instant; how long the way there and back takes is the broker's business (`hands`). The
agent here believes whatever it is told (it does not defend itself against a confused broker), so that `checks` sees the confusion.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

from firepool_broker.core.asks import Exit, Failure, FoundPod, LastUse
from firepool_broker.core.effects import CreatePod, PrepareLease
from firepool_broker.core.ids import AttemptId, Card, PodName, Sku, TemplateDigest, job_of
from firepool_broker.core.pools import Pool
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import Dice
from firepool_broker.sim.venue import Venue
from firepool_wire.words import Fault

#: Writes a fact of the world into the trace: kind, then what it is about.
Log = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Body:
    """What user code will do on one pod: run so long, end so; `heavy` leaves trash that takes time to free."""

    run_s: float
    exit: Exit
    heavy: bool = False


class Bodies(Protocol):
    """Tells what an attempt's code does on a pod."""

    def __call__(self, attempt: AttemptId, rank: int) -> Body: ...


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """The agent's record of one attempt, as on its disk."""

    attempt: AttemptId
    use: LastUse
    state: Literal["prepared", "running", "ended"] = "prepared"
    body: Body | None = None
    exit: Exit | None = None
    first_instruction_at: float | None = None


@dataclass(slots=True, kw_only=True)
class SimPod:
    """One pod and its agent."""

    name: PodName
    sku: Sku
    template: TemplateDigest
    born_at: float
    single_use: bool
    cards: tuple[Card, ...]
    ready: bool = False
    deleting: bool = False
    #: The agent answers nothing until then.
    hung_until: float = 0.0
    #: The agent does one thing after the other: calls that arrive before then wait their turn.
    busy_until: float = 0.0
    #: Who used the pod last, as the agent's disk says; `released_at` set only by a clean reset.
    last_use: LastUse | None = None
    #: What `last_use` was before the present tenancy (for an undone prepare).
    before: LastUse | None = None
    now: Tenancy | None = None
    #: Ended tenancies whose exit the broker may still ask for.
    ended: dict[AttemptId, Tenancy] = field(default_factory=dict)
    annotated: LastUse | None = None

    def tenancy(self, attempt: AttemptId) -> Tenancy | None:
        """What the agent knows of an attempt."""
        if self.now is not None and self.now.attempt == attempt:
            return self.now
        return self.ended.get(attempt)


@dataclass(slots=True, kw_only=True)
class Yard:
    """All pods that are not verified gone, and what happens to them."""

    clock: Clock
    dice: Dice
    venue: Venue
    log: Log
    bodies: Bodies
    #: Told when a pod's agent answers, a pod is gone, user code begins (attempt, pod), and an attempt has ended on a pod.
    on_ready: Callable[[SimPod], None]
    on_gone: Callable[[SimPod, str, bool], None]
    on_code: Callable[[SimPod, AttemptId], None]
    on_ended: Callable[[SimPod, Tenancy], None]
    pods: dict[PodName, SimPod] = field(default_factory=dict)
    pools: dict[Sku, Pool] = field(default_factory=dict)
    #: Statistics: pods ever made, and (pod, born, gone) of those that are gone.
    made: int = 0
    lives: list[tuple[PodName, float, float]] = field(default_factory=list)

    # -- the provider ------------------------------------------------------------------------------------------------

    def create(self, order: CreatePod) -> None:
        """The provider accepts an order; the same name twice makes one pod."""
        if order.pod in self.pods:
            return
        pod = SimPod(
            name=order.pod,
            sku=order.sku,
            template=order.template,
            born_at=self.clock.now,
            single_use=order.single_use,
            cards=self._free_cards(order.sku),
        )
        self.pods[pod.name] = pod
        self.made += 1
        self.log("born", pod=pod.name, sku=pod.sku, template=pod.template, single_use=pod.single_use, cards=pod.cards)
        plan = self.dice.plan
        if self.dice.strikes(plan.never_ready):
            return
        start_s = self.venue.start.draw(self.dice.time)
        pool = self.pools.get(order.sku)
        start_s += pool.simulated_start_s if pool is not None else 0.0
        if self.dice.strikes(plan.start_slow):
            start_s *= 10.0
        self.clock.after(start_s, lambda: self._become_ready(pod))

    def _free_cards(self, sku: Sku) -> tuple[Card, ...]:
        pool = self.pools.get(sku)
        need = pool.shape.gpus if pool is not None else 0
        taken = {card for pod in self.pods.values() for card in pod.cards}
        cards: list[Card] = []
        number = 0
        while len(cards) < need:
            card = Card(f"{sku}-card-{number}")
            number += 1
            if card not in taken:
                cards.append(card)
        return tuple(cards)

    def _become_ready(self, pod: SimPod) -> None:
        if pod.name not in self.pods or pod.deleting:
            return
        pod.ready = True
        self.log("ready", pod=pod.name)
        self.on_ready(pod)
        mean_s = self.dice.plan.pod_lost_every_s
        if mean_s > 0:
            self.clock.after(self.dice.exponential(mean_s), lambda: self._lose(pod))

    def _lose(self, pod: SimPod) -> None:
        if pod.name in self.pods:
            self._unmake(pod, "host lost", oom=self.dice.strikes(0.2))

    def delete(self, name: PodName) -> None:
        """The provider accepts a delete; the pod is gone some time later."""
        pod = self.pods.get(name)
        if pod is None or pod.deleting:
            return
        pod.deleting = True
        delay_s = self.venue.delete.draw(self.dice.time)
        if self.dice.strikes(self.dice.plan.delete_stuck):
            delay_s *= 100.0
        self.clock.after(delay_s, lambda: self._unmake(pod, "deleted", oom=False))

    def _unmake(self, pod: SimPod, why: str, *, oom: bool) -> None:
        if self.pods.pop(pod.name, None) is None:
            return
        if pod.now is not None:
            self._die(pod, pod.now, why)
        self.lives.append((pod.name, pod.born_at, self.clock.now))
        self.log("gone", pod=pod.name, why=why)
        self.on_gone(pod, why, oom)

    def annotate(self, name: PodName, use: LastUse) -> None:
        """Merge annotations."""
        pod = self.pods.get(name)
        if pod is not None:
            pod.annotated = use

    # -- the agent ---------------------------------------------------------------------------------------------------

    def prepare(self, pod: SimPod, lease: PrepareLease) -> None:
        """Record the attempt and fork its process, blocked. A repeated call gets the first answer."""
        if pod.now is not None and pod.now.attempt == lease.attempt:
            return
        if pod.now is not None and pod.now.state == "running":
            self.log("clash", pod=pod.name, attempt=lease.attempt, running=pod.now.attempt)
        use = LastUse(caller=lease.caller, queue=lease.queue, tag=lease.tag)
        if pod.now is None or pod.now.state != "prepared":
            pod.before = pod.last_use
        pod.now = Tenancy(attempt=lease.attempt, use=use)
        pod.last_use = use
        self.log("bound", pod=pod.name, attempt=lease.attempt)

    def abandon(self, pod: SimPod, attempt: AttemptId) -> None:
        """Undo a prepare that was not launched: the pod counts as if it had never happened."""
        if pod.now is not None and pod.now.attempt == attempt and pod.now.state == "prepared":
            pod.now, pod.last_use, pod.before = None, pod.before, None
            self.log("unbound", pod=pod.name, attempt=attempt)

    def launch(self, pod: SimPod, attempt: AttemptId, rank: int) -> Failure | None:
        """Release the attempt's process; refused for an attempt that this agent did not prepare."""
        tenancy = pod.tenancy(attempt)
        if tenancy is None:
            message = f"{pod.name} was not prepared for {attempt}"
            return Failure(code="Internal", message=message, fault=Fault.INFRA, retryable=True)
        if tenancy.state != "prepared":
            return None
        tenancy.state = "running"
        tenancy.body = self.bodies(attempt, rank)
        self.clock.after(self.venue.first_instruction.draw(self.dice.time), lambda: self._begin(pod, tenancy))
        return None

    def _begin(self, pod: SimPod, tenancy: Tenancy) -> None:
        if tenancy.state != "running" or pod.now is not tenancy or pod.name not in self.pods:
            return
        tenancy.first_instruction_at = self.clock.now
        use = tenancy.use
        self.log(
            "code",
            pod=pod.name,
            attempt=tenancy.attempt,
            job=job_of(tenancy.attempt),
            caller=use.caller,
            queue=use.queue,
            tag=use.tag,
        )
        self.on_code(pod, tenancy.attempt)
        assert tenancy.body is not None
        if tenancy.body.run_s < inf:
            self.clock.after(tenancy.body.run_s, lambda: self._finish(pod, tenancy))

    def _finish(self, pod: SimPod, tenancy: Tenancy) -> None:
        if tenancy.state == "running" and pod.name in self.pods:
            assert tenancy.body is not None
            self._end(pod, tenancy, tenancy.body.exit, "exited")

    def _end(self, pod: SimPod, tenancy: Tenancy, how_it_ended: Exit, how: str) -> None:
        tenancy.exit = how_it_ended
        self._die(pod, tenancy, how)
        pod.ended[tenancy.attempt] = tenancy
        self.on_ended(pod, tenancy)

    def _die(self, pod: SimPod, tenancy: Tenancy, how: str) -> None:
        """The process tree is gone, verified."""
        had_code = tenancy.state == "running" and tenancy.first_instruction_at is not None
        tenancy.state = "ended"
        if had_code:
            ok = tenancy.exit is not None and tenancy.exit.failure is None
            self.log("dead", pod=pod.name, attempt=tenancy.attempt, how=how, ok=ok)

    def stop(self, pod: SimPod, attempt: AttemptId, failure: Failure) -> None:
        """End the attempt; its exit record carries `failure`."""
        tenancy = pod.tenancy(attempt)
        if tenancy is None:
            return
        if tenancy.state == "ended":
            self.on_ended(pod, tenancy)
            return
        if tenancy.state == "prepared":
            self._end(pod, tenancy, Exit(failure=failure), "stopped")
            return
        delay_s = self.venue.stop.draw(self.dice.time)
        self.clock.after(delay_s, lambda: self._stop_now(pod, tenancy, failure))

    def _stop_now(self, pod: SimPod, tenancy: Tenancy, failure: Failure) -> None:
        if tenancy.state == "running" and pod.name in self.pods:
            self._end(pod, tenancy, Exit(exit_code=143, signal=15, failure=failure), "stopped")

    def reset(self, pod: SimPod, attempt: AttemptId) -> tuple[bool, bool]:
        """Kill, prove, clean. Returns (clean, settling)."""
        tenancy = pod.now
        heavy = False
        if tenancy is not None:
            if tenancy.state != "ended":
                failure = Failure(code="Internal", message="ended by a reset", fault=Fault.INFRA, retryable=True)
                self._end(pod, tenancy, Exit(exit_code=137, signal=9, failure=failure), "reset")
            heavy = tenancy.body is not None and tenancy.body.heavy
        clean = not self.dice.strikes(self.dice.plan.reset_unclean)
        self.log("reset", pod=pod.name, attempt=attempt, verdict="clean" if clean else "unclean")
        if clean:
            pod.now, pod.before = None, None
            if pod.last_use is not None:
                use = pod.last_use
                pod.last_use = LastUse(caller=use.caller, queue=use.queue, tag=use.tag, released_at=self.clock.now)
        return clean, heavy and clean

    def found(self, isolation: str) -> tuple[FoundPod, ...]:
        """Every live pod as a starting broker finds it: the provider's list joined with its agent's answer."""
        return tuple(self._found(pod, isolation) for pod in self.pods.values())

    def _found(self, pod: SimPod, isolation: str) -> FoundPod:
        answers = pod.ready and not pod.deleting and self.clock.now >= pod.hung_until
        return FoundPod(
            pod=pod.name,
            sku=pod.sku,
            template=pod.template,
            created_at=pod.born_at,
            ready=pod.ready,
            single_use=pod.single_use,
            cards=pod.cards,
            isolation=isolation if answers else "",
            annotated=pod.annotated,
            agent=pod.last_use if answers else None,
            agent_answered=answers,
            terminating=pod.deleting,
        )
