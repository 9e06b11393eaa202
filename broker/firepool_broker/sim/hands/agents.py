"""Effects that call agents, and what agents say of attempts: half of a call's time before it acts, half after.

Calls to one agent arrive in the order in which they were sent, and it serves one after the other. A hung agent answers nothing
until it wakes; then it serves what waited, in order, and refuses what is past its deadline.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from firepool_broker.core.asks import Exit, Failure
from firepool_broker.core.effects import AbandonLease, PrepareLease, ProbeAttempt, ResetPod, StopAttempt
from firepool_broker.core.events import (
    AttemptEnded,
    AttemptProbed,
    Event,
    FirstInstruction,
    Launched,
    LaunchFailed,
    LeasePrepared,
    LeasePrepareFailed,
    PodReachable,
    PodSettled,
    PodUnreachable,
    ResetClean,
    ResetUnclean,
)
from firepool_broker.core.ids import AttemptId, PodName
from firepool_broker.sim.hands.answers import Answers
from firepool_broker.sim.scene import Scene, failure
from firepool_broker.sim.venue import Delay
from firepool_broker.sim.yard import SimPod, Tenancy

AgentEffect = PrepareLease | AbandonLease | StopAttempt | ProbeAttempt | ResetPod
#: Longest that a hung agent earns strikes: afterwards the real shell has long quarantined it too.
_STRIKES_MAX = 8


@dataclass(slots=True)
class Call:
    """One call to an agent that has not been answered."""

    pod: PodName
    sent_at: float
    act: Callable[[SimPod], Event | None]
    #: Given when the agent refuses because the call's deadline passed; None for calls without a deadline.
    too_late: Event | None
    #: Time that the agent needs for it beyond the usual.
    work_s: float = 0.0
    answered: bool = False


@dataclass(slots=True)
class AgentHand:
    """The agents as one life of the broker knows them."""

    scene: Scene
    answers: Answers
    #: Event streams that this broker reads.
    followed: set[tuple[AttemptId, PodName]] = field(default_factory=set)
    #: Unanswered calls per pod.
    calls: dict[PodName, int] = field(default_factory=dict)
    #: When the newest call to each pod arrives: the next one does not overtake it.
    arrives_at: dict[PodName, float] = field(default_factory=dict)

    def carry(self, effect: AgentEffect) -> None:
        """Send the call of one effect."""
        match effect:
            case PrepareLease():
                self._prepare(effect)
            case AbandonLease(attempt, pod):
                self._call(pod, self.scene.venue.prepare, lambda p: self.scene.yard.abandon(p, attempt))
            case StopAttempt(attempt, pod, why):
                self.followed.add((attempt, pod))
                self._call(pod, self.scene.venue.prepare, lambda p: self._stop(p, attempt, why))
            case ProbeAttempt(attempt, pod):
                self._probe(attempt, pod, self.scene.venue.probes)
            case ResetPod(pod, attempt):
                unclean = ResetUnclean(pod, attempt, "the agent did not answer")
                call = self._call(pod, self.scene.venue.reset, lambda p: self._reset(p, attempt), unclean)
                self._time_out(call, unclean)

    def _call(
        self,
        pod: PodName,
        delay: Delay,
        act: Callable[[SimPod], Event | None],
        too_late: Event | None = None,
        work_s: float = 0.0,
    ) -> Call:
        """Send a call; `act` happens half-way, its event comes back after the other half."""
        call = Call(pod, self.scene.clock.now, act, too_late, work_s)
        self.calls[pod] = self.calls.get(pod, 0) + 1
        half_s = delay.draw(self.scene.dice.time) / 2.0
        arrives_at = max(self.scene.clock.now + half_s, self.arrives_at.get(pod, 0.0))
        self.arrives_at[pod] = arrives_at
        self.scene.clock.at(arrives_at, lambda: self._arrive(call, half_s))
        return call

    def _arrive(self, call: Call, back_s: float) -> None:
        scene = self.scene
        if not self.answers.alive and not scene.dice.coin():
            return
        pod = scene.yard.pods.get(call.pod)
        if pod is None or not pod.ready:
            self._answer(call, back_s, PodUnreachable(call.pod, "refused: nothing listens"))
            return
        if pod.hung_until <= scene.clock.now and scene.dice.strikes(scene.dice.plan.hang):
            self._hang(pod)
        if pod.hung_until > scene.clock.now:
            if pod.hung_until < inf:
                scene.clock.at(pod.hung_until, lambda: self._arrive(call, back_s))
            return
        if pod.busy_until > scene.clock.now:
            scene.clock.at(pod.busy_until, lambda: self._arrive(call, back_s))
            return
        if call.work_s:
            pod.busy_until = scene.clock.now + call.work_s
            call.work_s = 0.0
            scene.clock.at(pod.busy_until, lambda: self._serve(call, back_s))
            return
        self._serve(call, back_s)

    def _serve(self, call: Call, back_s: float) -> None:
        scene = self.scene
        pod = scene.yard.pods.get(call.pod)
        if pod is None:
            self._answer(call, back_s, PodUnreachable(call.pod, "reset by peer"))
            return
        late = call.too_late is not None and scene.clock.now - call.sent_at > scene.venue.call_deadline_s
        event = call.too_late if late else call.act(pod)
        if scene.dice.strikes(scene.dice.plan.late):
            back_s += scene.dice.between(0.0, 2.0)
        self._answer(call, back_s, event)

    def _answer(self, call: Call, back_s: float, event: Event | None) -> None:
        self.scene.clock.after(back_s, lambda: self._answered(call, event))

    def _answered(self, call: Call, event: Event | None) -> None:
        if call.answered:
            return
        call.answered = True
        self.calls[call.pod] -= 1
        if event is not None:
            self.answers.later(0.0, event)

    def _time_out(self, call: Call, event: Event) -> None:
        """Give `event` in place of an answer that has not come in time."""
        self.scene.clock.after(self.scene.venue.call_timeout_s, lambda: self._answered(call, event))

    def _hang(self, pod: SimPod) -> None:
        scene = self.scene
        for_ever = scene.dice.fate.random() < 0.2
        hang_s = inf if for_ever else scene.dice.exponential(scene.dice.plan.hang_s)
        pod.hung_until = scene.clock.now + hang_s
        scene.log("hung", pod=pod.name, until=pod.hung_until)
        strikes = min(_STRIKES_MAX, int(hang_s / scene.venue.call_timeout_s) if not for_ever else _STRIKES_MAX)
        for number in range(strikes):
            scene.clock.after((number + 1) * scene.venue.call_timeout_s, lambda: self._strike(pod))
        if not for_ever and strikes:
            scene.clock.at(pod.hung_until, lambda: self.answers.later(0.0, PodReachable(pod.name)))

    def _strike(self, pod: SimPod) -> None:
        """A call or a stream of this broker has waited too long."""
        cares = self.calls.get(pod.name, 0) > 0 or any(name == pod.name for _, name in self.followed)
        if self.answers.alive and cares and pod.name in self.scene.yard.pods:
            self.answers.later(0.0, PodUnreachable(pod.name, "timed out"))

    def _prepare(self, lease: PrepareLease) -> None:
        dice, attempt, pod = self.scene.dice, lease.attempt, lease.pod
        no = LeasePrepareFailed(attempt, pod, failure("HostLost", "the agent did not prepare"))

        def act(p: SimPod) -> Event:
            if dice.strikes(dice.plan.prepare_fails):
                return no
            self.scene.yard.prepare(p, lease)
            return LeasePrepared(attempt, pod)

        slow_s = dice.between(0.02, 1.0) if dice.strikes(dice.plan.prepare_slow) else 0.0
        self._time_out(self._call(pod, self.scene.venue.prepare, act, no, slow_s), no)

    def launch(self, attempt: AttemptId, pod: PodName, rank: int) -> None:
        """Launch on one pod and follow its event stream."""
        dice = self.scene.dice
        no = LaunchFailed(attempt, pod, failure("Internal", "the agent did not launch"))
        self.followed.add((attempt, pod))

        def act(p: SimPod) -> Event:
            if dice.strikes(dice.plan.launch_fails):
                return no
            refused = self.scene.yard.launch(p, attempt, rank)
            return Launched(attempt, pod) if refused is None else LaunchFailed(attempt, pod, refused)

        self._call(pod, self.scene.venue.launch, act, no)

    def follow(self, attempt: AttemptId, pod: PodName) -> None:
        """Re-attach to the event stream of one pod."""
        self.followed.add((attempt, pod))

        def act(p: SimPod) -> None:
            tenancy = p.tenancy(attempt)
            if tenancy is not None and tenancy.state == "ended":
                self.report_end(p, tenancy)

        self._call(pod, self.scene.venue.probe, act)

    def _stop(self, pod: SimPod, attempt: AttemptId, why: Failure) -> Event | None:
        if pod.tenancy(attempt) is None:
            return AttemptEnded(attempt, pod.name, Exit(failure=why))
        self.scene.yard.stop(pod, attempt, why)
        return None

    def _reset(self, pod: SimPod, attempt: AttemptId) -> Event:
        clean, settling = self.scene.yard.reset(pod, attempt)
        if not clean:
            return ResetUnclean(pod.name, attempt, "a mount was left")
        if settling:
            self.answers.later(self.scene.venue.settle.draw(self.scene.dice.time) + 2.1, PodSettled(pod.name))
        return ResetClean(pod.name, attempt, settling)

    def _probe(self, attempt: AttemptId, pod: PodName, left: int) -> None:
        venue, clock = self.scene.venue, self.scene.clock
        found = self.scene.yard.pods.get(pod)
        if found is None:
            self.answers.later(venue.probe.draw(self.scene.dice.time), AttemptProbed(attempt, pod, "gone"))
        elif found.ready and found.hung_until <= clock.now + venue.probe_timeout_s:
            delay_s = max(0.0, found.hung_until - clock.now) + venue.probe.draw(self.scene.dice.time)
            clock.after(delay_s, lambda: self._probed(attempt, pod))
        elif left > 1:
            gap_s = venue.probe_timeout_s + venue.probe_gap_s
            clock.after(gap_s, lambda: self._probe(attempt, pod, left - 1) if self.answers.alive else None)
        else:
            self.answers.later(
                venue.probe_timeout_s, AttemptProbed(attempt, pod, "unreachable", None, "three probes timed out")
            )

    def _probed(self, attempt: AttemptId, pod: PodName) -> None:
        found = self.scene.yard.pods.get(pod)
        if found is None:
            self.answers.later(0.0, AttemptProbed(attempt, pod, "gone"))
            return
        tenancy = found.tenancy(attempt)
        if tenancy is None or tenancy.state == "prepared":
            self.answers.later(0.0, AttemptProbed(attempt, pod, "unknown"))
        elif tenancy.state == "ended":
            self.answers.later(0.0, AttemptProbed(attempt, pod, "ended", tenancy.exit))
        else:
            self.answers.later(0.0, AttemptProbed(attempt, pod, "live"))

    # -- what agents say unasked -------------------------------------------------------------------------------------

    def report_code(self, pod: SimPod, attempt: AttemptId) -> None:
        """User code began on a pod."""
        if (attempt, pod.name) in self.followed:
            delay_s = self._stream_s(pod)
            if delay_s is not None:
                self.answers.later(delay_s, FirstInstruction(attempt, pod.name, self.scene.clock.now))

    def report_end(self, pod: SimPod, tenancy: Tenancy) -> None:
        """An attempt has its exit record on a pod."""
        if (tenancy.attempt, pod.name) in self.followed and tenancy.exit is not None:
            delay_s = self._stream_s(pod)
            if delay_s is not None:
                self.answers.later(delay_s, AttemptEnded(tenancy.attempt, pod.name, tenancy.exit))

    def _stream_s(self, pod: SimPod) -> float | None:
        """Time on the event stream; a hung agent holds it back, None = for ever."""
        held_s = max(0.0, pod.hung_until - self.scene.clock.now)
        if held_s == inf:
            return None
        return held_s + self.scene.venue.report.draw(self.scene.dice.time)
