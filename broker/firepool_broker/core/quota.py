"""Per-caller limits over assigned and running pods, checked inside every claim (S2). Held pods do not count (spec §3).

A caller's use grows at a claim and shrinks when a pod's part of the attempt is over, so that a pod whose job may still
run, unreachable or being deleted, keeps counting.
"""

from typing import TYPE_CHECKING

from firepool_broker.core.ids import Caller
from firepool_broker.core.pools import UNLIMITED, CallerLimits

if TYPE_CHECKING:
    from firepool_broker.core.queue import Lane


class Usage:
    """What one caller has claimed now, and what it may."""

    __slots__ = ("caller", "limited", "limits", "parked", "pods", "processors", "waiting")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.limits: CallerLimits = UNLIMITED
        self.limited = False
        self.pods = 0
        self.processors = 0
        #: Lanes (over all pools) that were refused for this caller's quota; they come back when it shrinks.
        self.parked: dict[Lane, None] = {}
        #: Queued jobs of this caller over all pools.
        self.waiting = 0

    def limit(self, limits: CallerLimits) -> None:
        """Set the caller's limits."""
        self.limits = limits
        self.limited = limits.max_pods is not None or limits.max_processors is not None

    def allows(self, pods: int, processors: int) -> bool:
        """Whether the caller may claim so much more now."""
        return self._fits(self.pods + pods, self.processors + processors)

    def ever_allows(self, pods: int, processors: int) -> bool:
        """Whether the caller could claim so much with nothing else claimed."""
        return self._fits(pods, processors)

    def room(self, processors_per_pod: int) -> int | None:
        """Pods of that size which the caller may still claim; None = unlimited."""
        rooms = []
        if self.limits.max_pods is not None:
            rooms.append(self.limits.max_pods - self.pods)
        if self.limits.max_processors is not None:
            rooms.append((self.limits.max_processors - self.processors) // processors_per_pod)
        return max(0, min(rooms)) if rooms else None

    def _fits(self, pods: int, processors: int) -> bool:
        limits = self.limits
        if limits.max_pods is not None and pods > limits.max_pods:
            return False
        return limits.max_processors is None or processors <= limits.max_processors


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
