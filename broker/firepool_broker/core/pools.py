"""What an operator may say of a pool, and of a caller's limits. Validation of a whole configuration lives here too;
what the engine does with the knobs lives in the rooms that they steer.

Units (spec §1): `min_count`, `max_idle_count`, `drain_budget`, `step` in pods; `max_count`, budgets and caller limits in
processors (GPUs, or cores on CPU SKUs); names of seconds end in `_s`.
"""

from dataclasses import dataclass, field
from typing import Literal

from firepool_broker.core.ids import Sku, TemplateDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one pod of a SKU is: its accelerator and its share of the host."""

    #: Accelerator model ("h200", "cpu" for none) and cards per pod (0 on CPU SKUs).
    accelerator: str = "cpu"
    gpus: int = 0
    cpus: float = 1.0
    memory_mib: int = 1024
    #: Cards are made up (`--simulate`); shown wherever the pool is shown.
    simulated: bool = False

    @property
    def processors(self) -> int:
        """Processors of one pod in ceilings, budgets and limits: GPUs, or whole cores on CPU SKUs (at least 1)."""
        return self.gpus if self.gpus else max(1, round(self.cpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One SKU's pool over all template digests. Every knob says what it costs to raise and to lower it."""

    sku: Sku
    shape: Shape = field(default_factory=Shape)
    #: Hash of everything that a new pod is made from; pods of another digest are stale.
    template: TemplateDigest = TemplateDigest("t0")
    enabled: bool = True
    #: Floor: pods kept ready at zero demand. Raise: faster first starts, more idle cost. Lower: cold first starts.
    min_count: int = 0
    #: Idle cap: never-used pods retained past their keep-alive. Raise: more idle cost. Lower: more pod starts.
    max_idle_count: int = 0
    #: Ceiling in processors, terminating pods included. Raise: more cost at peak. Lower: longer queue.
    max_count: int = 8
    #: Keep-alive of never-used idle pods. Raise: survives longer think times, costs idle time. Lower: more pod starts.
    idle_timeout_s: float = 120.0
    #: Hold of a used pod for its owner; None = `idle_timeout_s`, 0 = retire at release. Raise: warmer loops, less for
    #: others. Lower: the reverse.
    caller_hold_s: float | None = None
    #: A hold younger than this is never broken (strictly more; paper A.3).
    hold_tenure_min_s: float = 60.0
    #: `retire`: a new tag runs once on the old pod, which then retires. `hint`: the tag only prefers (paper App. D).
    tag_boundary: Literal["retire", "hint"] = "retire"
    #: Whether a job may run once on its caller's pod across a tag or queue change (spec §3 claim order 2).
    run_once_across: bool = True
    #: Pods created per reconcile interval at most (a token bucket). Raise: faster ramps, more load on the provider.
    step: int = 8
    reconcile_interval_s: float = 30.0
    #: A starting pod that is not ready after this retires. Raise: slow images get their time. Lower: faults show sooner.
    pod_start_timeout_s: float = 600.0
    #: Stale pods drained at a time.
    drain_budget: int = 1
    max_queue_length: int = 100_000
    max_infra_retries: int = 5
    #: Defaults of the job's durations; None = unbounded.
    queue_timeout_s: float | None = None
    start_timeout_s: float | None = 300.0
    run_timeout_s: float | None = None
    partition_lease_s: float | None = None
    reset_wait_s: float = 5.0
    max_log_bytes: int = 64 * 1024 * 1024
    untrusted: bool = False
    #: Minimum isolation level that pods of this pool must have.
    isolation: str = "process"
    requirements_mode: Literal["layer", "in_place"] = "layer"
    #: Modules that the zygote imports before it serves forks.
    preload: tuple[str, ...] = ()
    #: Added to every pod start, to try cluster-like start times out; labelled "simulated" wherever it shows.
    simulated_start_s: float = 0.0
    #: Provider-specific template settings (python, image, base environment, installer …), part of the digest.
    provider: str = "local"
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def hold_s(self) -> float:
        """Seconds that a used pod is held for its owner (paper §5; audit F5)."""
        return self.idle_timeout_s if self.caller_hold_s is None else self.caller_hold_s

    @property
    def max_pods(self) -> int:
        """Whole pods within the ceiling: rounded down, or the cap would be broken (audit F4)."""
        return self.max_count // self.shape.processors


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """Hard limits of one caller over assigned and running pods; None = unlimited. Held pods do not count (spec §3)."""

    max_pods: int | None = None
    max_processors: int | None = None
    #: Overrides the pools' `tag_boundary` for this caller (paper App. D).
    tag_boundary: Literal["retire", "hint"] | None = None


#: Caller without configured limits.
UNLIMITED = CallerLimits()
