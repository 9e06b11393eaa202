"""What `@remote(…)`, `.options(…)` and `submit(…)` take: one table, checked where it is written, sent only where it differs.

Names that Ray users try and Firepool has no use for are answered with what to write instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

Ship = Literal["auto", "value", "import"]

if TYPE_CHECKING:
    from typing import TypedDict

    from firepool_wire.jobspec import Requirements

    class OptionsDict(TypedDict, total=False):
        """Keywords of `remote`, `options` and `submit`, for type checkers."""

        sku: str
        pods: int
        queue: str
        priority: int
        lease_tag: str | None
        single_use: bool
        image: str | None
        package: str | bool | None
        requirements: str | Sequence[str] | None
        requirements_mode: Literal["layer", "in_place"] | None
        env: Mapping[str, str]
        queue_timeout_s: float | None
        start_timeout_s: float | None
        run_timeout_s: float | None
        client_lease_s: float | None
        detach: bool
        max_retries: int
        retry_on: Sequence[str | type]
        preemptible: bool
        labels: Mapping[str, str]
        run: str | None
        outputs: Sequence[str]
        isolation: str | None
        untrusted: bool | None
        memory_mib: int | None
        grace_s: float
        name: str | None
        ship: Ship
        idempotency_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a function or command; immutable. Durations are seconds, None = the pool's default."""

    #: Pool, or a name of `sku_alias`; None = the session's, else the broker's default.
    sku: str | None = None
    #: Gang size: pods claimed all or none.
    pods: int = 1
    queue: str = "default"
    priority: int = 0
    #: Reuse tag: work that may share a pod.
    lease_tag: str | None = None
    single_use: bool = False
    image: str | None = None
    #: Code to bring along: None = what the function's imports need, False = nothing, a folder, or a digest (`sha256:…`).
    package: str | bool | None = None
    #: Requirement lines, as in a requirements file.
    requirements: str | Sequence[str] | None = None
    requirements_mode: Literal["layer", "in_place"] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    queue_timeout_s: float | None = None
    start_timeout_s: float | None = None
    run_timeout_s: float | None = None
    #: None = the session's; jobs with `detach` have none.
    client_lease_s: float | None = None
    #: The job lives on without this program.
    detach: bool = False
    max_retries: int = 0
    #: Error classes (or their names) worth a retry; empty = every retryable one.
    retry_on: Sequence[str | type] = ()
    preemptible: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    outputs: Sequence[str] = ()
    isolation: str | None = None
    #: Nothing that the job produced is unpickled here; results are plain types.
    untrusted: bool | None = None
    memory_mib: int | None = None
    grace_s: float = 2.0
    #: Name in tables and stories; None = the function's.
    name: str | None = None
    #: How the function travels: by value, by import path, or whichever fits.
    ship: Ship = "auto"
    #: The caller's own key: the same key with the same arguments is the same job.
    idempotency_key: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], onto: "Options | None" = None) -> "Options":
        """Options from keywords. Raises: ValueError: unknown name or impossible value, naming what is valid."""
        for name in given:
            if name not in _NAMES:
                raise ValueError(_unknown(name))
        options = replace(onto or cls(), **given)
        options._check()
        return options

    def _check(self) -> None:
        if self.ship not in ("auto", "value", "import"):
            raise ValueError(f"ship={self.ship!r}: use 'auto', 'value' or 'import'")
        if self.pods < 1:
            raise ValueError(f"pods={self.pods}: a job needs at least one")
        for name in ("queue_timeout_s", "start_timeout_s", "run_timeout_s", "client_lease_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value}: seconds, or None for the pool's default")
        wrong = [k for k, v in {**self.env, **self.labels}.items() if not isinstance(k, str) or not isinstance(v, str)]
        if wrong:
            raise ValueError(f"env and labels are texts by name; {wrong[0]!r} is not")

    def spec(
        self, argv: tuple[str, ...] | None, *, sku: str | None, lease_s: float | None, run: str | None
    ) -> dict[str, Any]:
        """The sparse JSON of a job spec, but for the parts that differ from call to call."""
        from firepool_wire.jobspec import Entrypoint, JobSpec, sparse  # its dataclasses cost 8 ms

        chosen: dict[str, Any] = {"sku": sku} if sku is not None else {}
        wanted = JobSpec(
            entrypoint=Entrypoint(argv=argv),
            pods=self.pods,
            queue=self.queue,
            priority=self.priority,
            lease_tag=self.lease_tag,
            single_use=self.single_use,
            image=self.image,
            requirements=self._requirements(),
            env=dict(self.env),
            queue_timeout_s=self.queue_timeout_s,
            start_timeout_s=self.start_timeout_s,
            run_timeout_s=self.run_timeout_s,
            client_lease_s=None if self.detach else (self.client_lease_s or lease_s),
            max_retries=self.max_retries,
            retry_on=tuple(e if isinstance(e, str) else e.__name__ for e in self.retry_on),
            preemptible=self.preemptible,
            labels=dict(self.labels),
            run=self.run or run,
            outputs=tuple(self.outputs),
            isolation=self.isolation,
            untrusted=self.untrusted,
            memory_mib=self.memory_mib,
            grace_s=self.grace_s,
            **chosen,
        )
        body: dict[str, Any] = sparse(wanted)
        return body

    def _requirements(self) -> "Requirements | None":
        if not self.requirements:
            return None
        from firepool_wire.jobspec import Requirements

        text = self.requirements if isinstance(self.requirements, str) else "\n".join(self.requirements)
        return Requirements(text=text, mode=self.requirements_mode)

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, as keywords."""
        bare = Options()
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != getattr(bare, f.name)}


_NAMES = tuple(f.name for f in fields(Options))

#: What Ray calls it → what to write here.
_RAY = {
    "num_cpus": "sku= names a pool, whose shape has the cores",
    "num_gpus": "sku= names a pool, whose shape has the GPUs",
    "accelerator_type": "sku= names a pool, whose shape has the accelerator",
    "memory": "memory_mib= limits the job; the pool's shape has the memory",
    "resources": "sku= names a pool",
    "runtime_env": "requirements=, env= and package= are options of their own",
    "retry_exceptions": "retry_on= takes error classes, max_retries= how often",
    "num_returns": "a job returns one value; return a tuple, or yield",
    "scheduling_strategy": "pods are claimed by the broker; lease_tag= says what may share one",
    "timeout": "three clocks: queue_timeout_s=, start_timeout_s=, run_timeout_s=",
    "max_calls": "every call runs in a process of its own",
}


def _unknown(name: str) -> str:
    if name in _RAY:
        return f"no option {name!r} here: {_RAY[name]}"
    from difflib import get_close_matches

    near = get_close_matches(name, _NAMES, 1)
    return f"no option {name!r}{f'; did you mean {near[0]!r}?' if near else ''} (there are: {', '.join(_NAMES)})"
