"""What pods report, or fail to: becoming ready, not becoming ready, not answering, being gone.

What happens to a job whose pod is gone is `endings`', how many pods there should be is `controller`'s business.
"""

from firepool_broker.core import admission, endings
from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import DeletePod
from firepool_broker.core.errors import failure
from firepool_broker.core.events import PodCreateFailed, PodGone, PodReady, PodUnreachable
from firepool_broker.core.fleet import DELETE_AGAIN_S, back_off, retire, strength
from firepool_broker.core.ids import PodName
from firepool_broker.core.pods import ASSIGNED, HELD, IDLE, RETIRING, RUNNING, STARTING, PodRecord
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State

#: A pod that missed three calls is quarantined; one that stayed silent this long since its first is deleted.
STRIKES_TO_QUARANTINE = 3
SILENT_S = 30.0


def on_ready(s: State, event: PodReady) -> None:
    """A pod's agent answered: it is supply that can be claimed, unless it is weaker than the pool demands."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None or pod.state is not STARTING:
        return
    pool = pod.rack.pool
    pool.create_failures = 0
    pod.cards = event.cards
    # A provider that reports no level vouches for the pool's own.
    pod.isolation = event.isolation or pool.pool.isolation
    pod.strength = strength(pod.isolation)
    pool.strength_seen = pod.strength
    if pod.strength < strength(pool.pool.isolation):
        retire(s, pod, f"isolation {pod.isolation} is weaker than {pool.pool.isolation}")
        _hopeless(s, pool, _too_weak(pool, pod))
        return
    s.tracker.ready(pod, s.now)
    if pod.single_use:
        s.timers.disarm(pod)
        if pod.rack.stale:
            retire(s, pod, "its template is stale")
    else:
        s.timers.arm(pod, s.now + pool.pool.idle_timeout_s)
    admission.doom_too_isolated(s, pool)
    s.feed(pool)
    s.tend(pool)


def on_create_failed(s: State, event: PodCreateFailed) -> None:
    """The provider could not make the pod: back off, and tell the waiting jobs if no pod can ever be made."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None:
        return
    pool = pod.rack.pool
    s.story.note(pod, f"{event.failure.code}: {event.failure.message}")
    s.tracker.gone(pod)
    _creation_failed(s, pool)
    if not event.failure.retryable and not pool.physical:
        _hopeless(s, pool, event.failure)


def on_gone(s: State, event: PodGone) -> None:
    """Verified gone: its capacity, its card and its part of an attempt are free."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None:
        return
    pool = pod.rack.pool
    lease, rank = pod.lease, pod.rank
    if pod.state is STARTING:
        _creation_failed(s, pool)
    if event.why:
        s.story.note(pod, event.why)
    s.tracker.gone(pod)
    if lease is not None:
        endings.pod_gone(s, lease, rank, event)
    for former, place in s.former.pop(event.pod, ()):
        endings.pod_gone(s, former, place, event)
    s.tend(pool)
    s.feed(pool)


def on_unreachable(s: State, event: PodUnreachable) -> None:
    """A strike. A pod without a job retires; one with a job keeps it: unreachable is not failed, busy is not dead."""
    pod = s.tracker.pods.get(event.pod)
    if pod is None:
        return
    s.story.note(pod, f"unreachable: {event.why}")
    state = pod.state
    if state in (IDLE, HELD):
        retire(s, pod, f"its agent does not answer: {event.why}")
        s.tend(pod.rack.pool)
    elif state in (ASSIGNED, RUNNING):
        pod.strikes += 1
        if pod.unreachable_since < 0:
            pod.unreachable_since = s.now
            s.timers.arm_by(pod, s.now + SILENT_S)
        if pod.strikes >= STRIKES_TO_QUARANTINE:
            pod.doomed = True


def on_reachable(s: State, name: PodName) -> None:
    """A struck agent answered again. A pod that is being deleted meanwhile is asked what became of its job."""
    pod = s.tracker.pods.get(name)
    if pod is None:
        return
    pod.strikes = 0
    pod.unreachable_since = -1.0
    if pod.state is RETIRING and pod.lease is not None:
        endings.ask_again(s, pod.lease, pod)


def on_timer(s: State, pod: PodRecord) -> None:
    """The pod's timer fired: it may have been armed for an earlier state, so look whether anything is due."""
    knobs = pod.rack.pool.pool
    state = pod.state
    if state is STARTING:
        due = pod.created_at + knobs.pod_start_timeout_s
    elif state is IDLE:
        due = pod.ready_at + knobs.idle_timeout_s
    elif state is HELD:
        due = pod.hold_deadline
    elif state is RETIRING:
        due = pod.deleted_at + DELETE_AGAIN_S
    elif pod.unreachable_since >= 0:
        due = pod.unreachable_since + SILENT_S
    else:
        return
    if due > s.now:
        s.timers.arm(pod, due)
    else:
        _too_long(s, pod)


def _too_long(s: State, pod: PodRecord) -> None:
    """What the pod waited for did not happen in time."""
    pool = pod.rack.pool
    state = pod.state
    if state is STARTING:
        retire(s, pod, f"not ready within {pool.pool.pod_start_timeout_s:g} s")
        _creation_failed(s, pool)
    elif state is IDLE:
        s.tracker.expire_idle(pod)
        s.tend(pool)
    elif state is HELD:
        if not pod.rack.stale:
            retire(s, pod, "hold expired")
        s.tend(pool)
    elif state is RETIRING:
        pod.deleted_at = s.now
        s.timers.arm(pod, s.now + DELETE_AGAIN_S)
        s.emit(DeletePod(pod.name, "not confirmed gone yet"))
    elif pod.strikes >= STRIKES_TO_QUARANTINE:
        retire(s, pod, f"silent for {s.now - pod.unreachable_since:.0f} s")
    else:
        pod.unreachable_since = s.now
        s.timers.arm(pod, s.now + SILENT_S)


def _creation_failed(s: State, pool: PoolRecord) -> None:
    pool.create_failures += 1
    back_off(s, pool, pool.create_failures)


def _hopeless(s: State, pool: PoolRecord, reason: Failure) -> None:
    """No pod of this pool can be made: its waiting jobs are told, instead of waiting for ever."""
    admission.doom_all(s, pool, reason)


def _too_weak(pool: PoolRecord, pod: PodRecord) -> Failure:
    return failure(
        "IsolationUnavailable",
        f"pods of {pool.sku} have isolation '{pod.isolation}', but '{pool.pool.isolation}' is demanded",
        sku=pool.sku,
        isolation=pod.isolation,
        demanded=pool.pool.isolation,
    )
