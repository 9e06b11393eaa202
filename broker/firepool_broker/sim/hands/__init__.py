"""Effects carried out in virtual time: each becomes calls to store, agents and provider now, and events later.

One `Hands` belongs to one life of the broker. When that ends, its answers go nowhere; calls that were on their way may still
arrive, or not. Nothing here gives an event at once: answers always take time, as in the real shell.
"""

from collections.abc import Callable
from typing import assert_never

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
from firepool_broker.core.events import Event
from firepool_broker.sim.hands.agents import AgentHand
from firepool_broker.sim.hands.answers import Answers
from firepool_broker.sim.hands.provider import ProviderHand
from firepool_broker.sim.hands.store import StoreHand
from firepool_broker.sim.scene import Scene
from firepool_wire.words import TERMINAL


class Hands:
    """Carries effects out for one life of the broker."""

    def __init__(self, scene: Scene, give: Callable[[Event], None]) -> None:
        self.scene = scene
        self.answers = Answers(scene.clock, scene.dice, give)
        self.store = StoreHand(scene, self.answers)
        self.agents = AgentHand(scene, self.answers)
        self.provider = ProviderHand(scene, self.answers)

    def carry(self, effect: Effect) -> None:
        """Start one effect."""
        match effect:
            case WakeAt(at):
                self.answers.wake(at)
            case Accept() | Refuse() | Notify():
                self._tell(effect)
            case StoreJob() | QueueJob() | CommitStart() | RecordCancel() | CommitEnd() | SettleCommit():
                self.store.carry(effect)
            case PrepareLease() | AbandonLease() | StopAttempt() | ProbeAttempt() | ResetPod():
                self.agents.carry(effect)
            case LaunchAttempt(attempt, pods):
                for rank, pod in enumerate(pods):
                    self.agents.launch(attempt, pod, rank)
            case FollowAttempt(attempt, pods):
                for pod in pods:
                    self.agents.follow(attempt, pod)
            case MarkRunning() | MarkReleased() | CreatePod() | DeletePod():
                self.provider.carry(effect)
            case _:
                assert_never(effect)

    def _tell(self, effect: Accept | Refuse | Notify) -> None:
        clients = self.scene.clients
        match effect:
            case Accept(job, state):
                clients.accepted(job, state)
            case Refuse(job, why):
                clients.refused(job, why)
            case Notify(job, state):
                if state in TERMINAL:
                    delay_s = self.scene.venue.accept.draw(self.scene.dice.time)
                    self.scene.clock.after(delay_s, lambda: clients.ended(job, state) if self.answers.alive else None)
