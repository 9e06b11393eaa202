"""Per-caller limits over assigned and running pods, checked inside every claim (S2). Held pods do not count (spec §3).

A caller's use grows at a claim and shrinks when a pod's part of the attempt is over, so that a pod whose job may still
run, unreachable or being deleted, keeps counting.
"""

from typing import TYPE_CHECKING

from firepool_broker.core.ids import Caller
from firepool_broker.core.pools import UNLIMITED, CallerLimits

if TYPE_CHECKING:
    from firepool_broker.core.queue import Lane


#: "Unlimited", as a number that no fleet reaches.
NO_LIMIT = 1 << 62


class Usage:
    """What one caller has claimed now, and what it may."""

    __slots__ = ("caller", "limits", "max_pods", "max_processors", "parked", "pods", "processors", "waiting")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.limits: CallerLimits = UNLIMITED
        self.max_pods = NO_LIMIT
        self.max_processors = NO_LIMIT
        self.pods = 0
        self.processors = 0
        #: Lanes (over all pools) that were refused for this caller's quota; they come back when it shrinks.
        self.parked: dict[Lane, None] = {}
        #: Queued jobs of this caller over all pools.
        self.waiting = 0

    def limit(self, limits: CallerLimits) -> None:
        """Set the caller's limits."""
        self.limits = limits
        self.max_pods = NO_LIMIT if limits.max_pods is None else limits.max_pods
        self.max_processors = NO_LIMIT if limits.max_processors is None else limits.max_processors

    def allows(self, pods: int, processors: int) -> bool:
        """Whether the caller may claim so much more now."""
        return self.pods + pods <= self.max_pods and self.processors + processors <= self.max_processors

    def ever_allows(self, pods: int, processors: int) -> bool:
        """Whether the caller could claim so much with nothing else claimed."""
        return pods <= self.max_pods and processors <= self.max_processors

    def room(self, processors_per_pod: int) -> int:
        """Pods of that size which the caller may still claim."""
        return max(0, min(self.max_pods - self.pods, (self.max_processors - self.processors) // processors_per_pod))


class Quota:
    """All callers that were ever seen, by name."""

    __slots__ = ("_usages",)

    def __init__(self) -> None:
        self._usages: dict[Caller, Usage] = {}

    def of(self, caller: Caller) -> Usage:
        """The caller's usage, made on first sight."""
        usage = self._usages.get(caller)
        if usage is None:
            usage = self._usages[caller] = Usage(caller)
        return usage

    def all(self) -> list[Usage]:
        """Every caller's usage."""
        return list(self._usages.values())
