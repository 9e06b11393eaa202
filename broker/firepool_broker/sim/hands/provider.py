"""Effects that make, unmake and annotate pods, and what the provider says of them."""

from dataclasses import dataclass, field, replace

from firepool_broker.core.asks import LastUse
from firepool_broker.core.effects import CreatePod, DeletePod, MarkReleased, MarkRunning
from firepool_broker.core.events import PodCreateFailed, PodGone, PodReady
from firepool_broker.core.ids import PodName
from firepool_broker.sim.hands.answers import Answers
from firepool_broker.sim.scene import Scene, failure
from firepool_broker.sim.yard import SimPod

ProviderEffect = CreatePod | DeletePod | MarkRunning | MarkReleased


@dataclass(slots=True)
class ProviderHand:
    """The provider as one life of the broker uses it."""

    scene: Scene
    answers: Answers
    #: Pods whose calls are on their way: the next call about the same pod arrives after them.
    busy_until: dict[PodName, float] = field(default_factory=dict)

    def carry(self, effect: ProviderEffect) -> None:
        """Send a call; calls about one pod arrive in their order."""
        clock = self.scene.clock
        arrives_at = clock.now + self.scene.venue.create.draw(self.scene.dice.time)
        arrives_at = max(arrives_at, self.busy_until.get(effect.pod, 0.0))
        self.busy_until[effect.pod] = arrives_at
        clock.at(arrives_at, lambda: self._provide(effect))

    def _provide(self, effect: ProviderEffect) -> None:
        yard, dice = self.scene.yard, self.scene.dice
        if not self.answers.alive and not dice.coin():
            return
        match effect:
            case CreatePod(pod):
                if dice.strikes(dice.plan.create_fails):
                    self.answers.later(
                        0.0, PodCreateFailed(pod, failure("CapacityUnavailable", "the provider is full"))
                    )
                else:
                    yard.create(effect)
            case DeletePod(pod):
                if pod in yard.pods:
                    yard.delete(pod)
                else:
                    self.answers.later(0.0, PodGone(pod, "unknown to the provider"))
            case MarkRunning():
                if not dice.strikes(dice.plan.patch_lost):
                    use = LastUse(
                        caller=effect.caller, queue=effect.queue, tag=effect.tag, retire_after=effect.retire_after
                    )
                    yard.annotate(effect.pod, use)
            case MarkReleased():
                known = yard.pods.get(effect.pod)
                if known is not None and known.annotated is not None and not dice.strikes(dice.plan.patch_lost):
                    released = replace(
                        known.annotated, released_at=effect.released_at, hold_deadline=effect.hold_deadline
                    )
                    yard.annotate(effect.pod, released)

    # -- what the provider says unasked ------------------------------------------------------------------------------

    def report_ready(self, pod: SimPod, isolation: str) -> None:
        """A pod's agent answered `hello`."""
        self.answers.later(self.scene.venue.probe.draw(self.scene.dice.time), PodReady(pod.name, pod.cards, isolation))

    def report_gone(self, pod: SimPod, why: str, oom: bool) -> None:
        """A pod is verified gone."""
        self.answers.later(self.scene.venue.probe.draw(self.scene.dice.time), PodGone(pod.name, why, oom))
