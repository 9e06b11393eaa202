"""What is asked of Firepool in a run, as data: lines of steps of work. The demo runs the same descriptions on real pods.

A *line* is one program (an RL trainer, one agent): it takes its steps one after the other, pauses before each, and goes on
when every job of the step has ended (a barrier). Lines run side by side.
"""

from dataclasses import dataclass
from typing import Literal

#: How the user code ends.
Ending = Literal["ok", "error", "oom", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One job."""

    #: What it is, for people: "rollout", "evaluation", "update", "call", "verify".
    kind: str
    #: Seconds that the user code takes.
    body_s: float
    caller: str = "team"
    sku: str = "cpu"
    pods: int = 1
    queue: str = "default"
    tag: str | None = None
    priority: int = 0
    single_use: bool = False
    ending: Ending = "ok"
    #: Leaves trash whose bytes take time to free.
    heavy: bool = False
    max_retries: int = 0
    retry_on: tuple[str, ...] = ()
    run_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    client_lease_s: float | None = None
    #: Its client goes away without a word: nobody renews the lease.
    client_gone: bool = False
    #: Places of the works of the step before whose results are arguments (the step then needs no barrier before it).
    depends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Jobs submitted together; the line goes on when all have ended."""

    works: tuple[Work, ...]
    #: Pause before the step, seconds (an agent thinks, a trainer updates).
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One program."""

    name: str
    steps: tuple[Step, ...]

    @property
    def jobs(self) -> int:
        """Jobs of the line."""
        return sum(len(step.works) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Programs that run side by side."""

    name: str
    lines: tuple[Line, ...]

    @property
    def jobs(self) -> int:
        """Jobs of all lines."""
        return sum(line.jobs for line in self.lines)

    @property
    def barriers(self) -> int:
        """Barriers of all lines: one behind each step."""
        return sum(len(line.steps) for line in self.lines)
