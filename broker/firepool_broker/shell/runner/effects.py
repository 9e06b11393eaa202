"""From an effect to the room that carries it out. One match over all of them; a new effect does not type-check until it
has its line here."""

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
from firepool_broker.shell.runner.answers import Answers
from firepool_broker.shell.runner.calls import Calls
from firepool_broker.shell.runner.follow import Follow
from firepool_broker.shell.runner.pods import Pods
from firepool_broker.shell.runner.saves import Saves
from firepool_broker.shell.runner.wake import Wake


class Effects:
    """The rooms, and who does what."""

    def __init__(self, answers: Answers, saves: Saves, calls: Calls, follow: Follow, pods: Pods, *, wake: Wake) -> None:
        self._answers = answers
        self._saves = saves
        self._calls = calls
        self._follow = follow
        self._pods = pods
        self._wake = wake

    def carry(self, effect: Effect) -> None:  # ordered by how often they come
        """Start carrying an effect out; returns at once."""
        match effect:
            case WakeAt():
                self._wake.at(effect.at)
            case Notify():
                self._answers.notify(effect)
            case PrepareLease():
                self._calls.prepare(effect)
            case CommitStart():
                self._saves.commit_start(effect)
            case Accept():
                self._answers.accept(effect)
            case LaunchAttempt():
                self._follow.launch(effect)
            case CommitEnd():
                self._saves.commit_end(effect)
            case ResetPod():
                self._calls.reset(effect)
            case MarkRunning():
                self._pods.mark_running(effect)
            case MarkReleased():
                self._pods.mark_released(effect)
            case StoreJob():
                self._saves.store_job(effect)
            case Refuse():
                self._answers.refuse(effect)
            case _:
                self._carry_rare(effect)

    def _carry_rare(
        self,
        effect: QueueJob
        | SettleCommit
        | RecordCancel
        | AbandonLease
        | FollowAttempt
        | StopAttempt
        | ProbeAttempt
        | CreatePod
        | DeletePod,
    ) -> None:
        match effect:
            case QueueJob():
                self._saves.queue_job(effect)
            case SettleCommit():
                self._saves.settle(effect)
            case RecordCancel():
                self._saves.record_cancel(effect)
            case AbandonLease():
                self._calls.abandon(effect)
            case FollowAttempt():
                self._follow.follow(effect)
            case StopAttempt():
                self._calls.stop(effect)
            case ProbeAttempt():
                self._calls.probe(effect)
            case CreatePod():
                self._pods.create(effect)
            case DeletePod():
                self._pods.delete(effect)
            case _:
                assert_never(effect)
