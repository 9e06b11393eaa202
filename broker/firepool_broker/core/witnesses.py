"""Who used a pod last, judged at a start of the broker from three witnesses (spec §3): the store's newest binding, written
before any user code; the agent's own record, written before that; and the annotations, a best-effort copy.

Pure. The rule is strict, because a wrong verdict would show one caller's leftovers to another: a pod is never-used only if all
say so, it is an owner's only if all who know a caller know the same one, and everything else retires.
The shell has abandoned prepared leases without a committed start before it asked the agents.
"""

from dataclasses import dataclass

from firepool_broker.core.asks import Binding, FoundPod
from firepool_broker.core.ids import AttemptId, Caller
from firepool_broker.core.pods import ReuseKey
from firepool_wire.words import Path, WhyNotWarmer

#: A running attempt whose row carries no path was written by an older broker.
UNKNOWN_PATH = Path.WARM


@dataclass(frozen=True, slots=True)
class Starting:
    """Its agent has not answered yet, and nobody ever used it."""


@dataclass(frozen=True, slots=True)
class NeverUsed:
    """All witnesses agree that no job ever started on it."""


@dataclass(frozen=True, slots=True)
class Held:
    """Reset and released before the restart: same owner, same deadline (S15)."""

    owner: Caller
    key: ReuseKey
    released_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Dirty:
    """Its owner is known, but its reset was not confirmed: it must be reset. A known deadline is kept (0 = unknown)."""

    owner: Caller
    key: ReuseKey
    attempt: AttemptId
    released_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Retire:
    """It must not be used any more."""

    why: str


Verdict = Starting | NeverUsed | Held | Dirty | Retire


def judge(found: FoundPod, binding: Binding | None, hold_s: float, now: float) -> Verdict:
    """What becomes of a pod without a running job."""
    agent, annotated = found.agent, found.annotated
    if found.terminating:
        return Retire("its deletion was under way")
    used = binding is not None or annotated is not None
    if not found.ready:
        return Retire("it was used, and its agent is not there") if used else Starting()
    if not found.agent_answered:
        return Retire("its agent does not answer after a restart of the broker")
    if not used and agent is None:
        return NeverUsed()
    if binding is None:
        return Retire("it was used, but the store knows no owner")
    if agent is None:
        return Retire("the store says that it was used, its agent that it was not")
    callers = {binding.caller, agent.caller} | ({annotated.caller} if annotated is not None else set())
    if len(callers) > 1:
        return Retire("its witnesses name different owners")
    key: ReuseKey = (binding.queue, binding.tag)
    if (agent.queue, agent.tag) != key:
        # An annotation may lag behind by one lost patch; the store and the agent's disk may not.
        return Retire("store and agent disagree on its last queue or tag")
    if binding.retire_after or agent.retire_after or found.single_use or hold_s <= 0:
        return Retire("it was to retire after its last job")
    return _of_owner(found, binding, key, hold_s, now)


def _of_owner(found: FoundPod, binding: Binding, key: ReuseKey, hold_s: float, now: float) -> Verdict:
    agent, annotated = found.agent, found.annotated
    assert agent is not None
    released, deadline = agent.released_at, agent.hold_deadline
    same_release = annotated is not None and released is not None and annotated.released_at == released
    if deadline is None and annotated is not None and (released is None or same_release):
        deadline = annotated.hold_deadline
    if released is None:
        if deadline is not None and deadline <= now:
            return Retire("hold expired")
        known = annotated.released_at if annotated is not None else None
        return Dirty(binding.caller, key, binding.attempt, known or 0.0, deadline or 0.0)
    if deadline is None:
        deadline = released + hold_s
    if deadline <= now:
        return Retire("hold expired")
    return Held(binding.caller, key, released, deadline)


def reason(text: str) -> WhyNotWarmer | None:
    """A stored reason; "" and words of a newer broker are none."""
    return WhyNotWarmer(text) if text in tuple(WhyNotWarmer) else None
