"""What an operator may say of a pool, and of a caller's limits. Validation of a whole configuration lives here too;
what the engine does with the knobs lives in the rooms that they steer.

Units (spec §1): `min_count`, `max_idle_count`, `drain_budget`, `step` in pods; `max_count`, budgets and caller limits in
processors (GPUs, or cores on CPU SKUs); names of seconds end in `_s`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from firepool_broker.core.ids import Caller, Sku, TemplateDigest
from firepool_wire.words import Isolation


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
    #: Largest result of a job; more is `ResultTooLarge`. Raise: larger results, more disk. Lower: output files instead.
    max_result_bytes: int = 512 * 1024 * 1024
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


# -- validation of a whole configuration --------------------------------------------------------------------------------


def problems(pools: Sequence[Pool], limits: Mapping[Caller, CallerLimits]) -> list[str]:
    """Everything that is wrong with a configuration, in words, every error at once; empty when it can be used."""
    found: list[str] = []
    seen: set[Sku] = set()
    for pool in pools:
        if pool.sku in seen:
            found.append(f"{pool.sku}: is defined twice")
        seen.add(pool.sku)
        found += [f"{pool.sku}: {words}" for words in (*_of_shape(pool.shape), *_of_counts(pool), *_of_times(pool))]
    for caller, limit in limits.items():
        for name, value in (("max_pods", limit.max_pods), ("max_processors", limit.max_processors)):
            if value is not None and value < 0:
                found.append(f"limits of {caller}: {name} is {value}; it must be 0 or more")
    return found


def _of_shape(shape: Shape) -> Iterator[str]:
    if shape.gpus < 0:
        yield f"shape.gpus is {shape.gpus}; it must be 0 or more"
    if not 0 < shape.cpus < inf:
        yield f"shape.cpus is {shape.cpus:g}; it must be more than 0"
    if shape.memory_mib < 16:
        yield f"shape.memory_mib is {shape.memory_mib}; no pod runs in less than 16 MiB"
    if shape.gpus and shape.accelerator == "cpu":
        yield "shape.gpus without shape.accelerator: name the model of the cards"
    if not shape.gpus and shape.accelerator != "cpu":
        yield f"shape.accelerator is {shape.accelerator!r}, but shape.gpus is 0"


def _of_counts(pool: Pool) -> Iterator[str]:
    for name, value in (
        ("min_count", pool.min_count),
        ("max_idle_count", pool.max_idle_count),
        ("max_count", pool.max_count),
    ):
        if value < 0:
            yield f"{name} is {value}; it must be 0 or more"
    for name, value in (("step", pool.step), ("drain_budget", pool.drain_budget)):
        if value < 1:
            yield f"{name} is {value}; with less than 1 the pool could never change"
    if pool.shape.gpus >= 0 and pool.min_count > max(0, pool.max_pods):
        yield (
            f"min_count (floor) is {pool.min_count} pods, above the ceiling: max_count {pool.max_count} holds "
            f"{max(0, pool.max_pods)} pods of {pool.shape.processors} processors"
        )
    if pool.enabled and 0 <= pool.max_count < pool.shape.processors:
        yield f"max_count {pool.max_count} is less than one pod of {pool.shape.processors} processors: no job could ever run"
    if pool.max_queue_length < 1:
        yield f"max_queue_length is {pool.max_queue_length}; it must be at least 1"
    for name, value in (
        ("max_infra_retries", pool.max_infra_retries),
        ("max_log_bytes", pool.max_log_bytes),
        ("max_result_bytes", pool.max_result_bytes),
    ):
        if value < 0:
            yield f"{name} is {value}; it must be 0 or more"


def _of_times(pool: Pool) -> Iterator[str]:
    for name in ("idle_timeout_s", "hold_tenure_min_s", "reset_wait_s", "simulated_start_s"):
        value: float = getattr(pool, name)
        if not 0 <= value < inf:
            yield f"{name} is {value:g}; it must be 0 or more, and finite"
    for name in ("reconcile_interval_s", "pod_start_timeout_s"):
        value = getattr(pool, name)
        if not 0 < value < inf:
            yield f"{name} is {value:g}; it must be more than 0, and finite"
    if pool.caller_hold_s is not None and not 0 <= pool.caller_hold_s < inf:
        yield f"caller_hold_s is {pool.caller_hold_s:g}; it must be 0 (retire at release) or more, and finite"
    for name in ("queue_timeout_s", "start_timeout_s", "run_timeout_s", "partition_lease_s"):
        limit: float | None = getattr(pool, name)
        if limit is not None and not 0 < limit < inf:
            yield f"{name} is {limit:g}; it must be more than 0, or absent for no limit"
    if pool.isolation not in (known := [level.value for level in Isolation]):
        yield f"isolation is {pool.isolation!r}; it must be one of {', '.join(known)}"
