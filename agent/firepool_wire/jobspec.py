"""The job spec of `POST /v1/jobs` (spec §2): one dataclass that the SDK fills, the broker's API validates (and publishes
as OpenAPI) and the store keeps.

Only fields that differ from their default are sent, so a newer SDK works with an older broker until it uses what that
broker lacks. Unknown fields are refused by the API with the field's path and the nearest valid name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

#: Arguments up to this many bytes travel inside the spec; larger ones go to the blob store first.
INLINE_ARGS_BYTES = 64 * 1024

#: Results up to this many bytes travel inside events and the job's row; larger ones go to the blob store.
INLINE_RESULT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionEntry:
    """A Python function bound late.

    Exactly one of `payload` (blob digest of the pickled function) and `import_path` (`"package.module:name"`) is set;
    exactly one of `args` and `args_blob`.
    """

    #: Digest (`sha256:<hex>`) of the cloudpickled function in the blob store.
    payload: str | None = None
    #: `module:qualname`, importable in the job's package or layers; needs no agreement on pickle formats.
    import_path: str | None = None
    #: base64 of the argument frame (`codec.pack_args`), at most `INLINE_ARGS_BYTES` before encoding.
    args: str | None = None
    #: Digest of the argument frame in the blob store.
    args_blob: str | None = None
    #: `call`: one call. `map`: the argument frame holds `items` calls, each in its own forked process.
    #: `generator`: the function yields; every item is a result frame of its own.
    kind: Literal["call", "map", "generator"] = "call"
    #: Number of calls in the frame (`map` only).
    items: int = 1
    #: Python `major.minor` and pickle format that made the payload, for `SerializationMismatch`.
    python: str = ""
    pickle: int = 5
    #: Job ids whose results are arguments, in the order of their placeholders in the frame (refs as arguments).
    depends: tuple[str, ...] = ()
    #: Name shown in tables and stories.
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """What the job runs: exactly one of `argv` and `function`."""

    argv: tuple[str, ...] | None = None
    function: FunctionEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Extra dependencies: requirement lines in the syntax of pip's requirements files, and how they reach the job."""

    text: str
    #: `layer`: read-only digest-keyed tree beside others. `in_place`: the paper's marker protocol.
    mode: Literal["layer", "in_place"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A caller's intent. Every field but `entrypoint` has a default; durations are seconds, `None` = the pool's default."""

    entrypoint: Entrypoint
    sku: str = "cpu"
    #: Gang size N: pods claimed all or none.
    pods: int = 1
    queue: str = "default"
    #: Higher first.
    priority: int = 0
    #: Reuse tag; absent counts as a value equal to itself.
    lease_tag: str | None = None
    single_use: bool = False
    image: str | None = None
    #: Digest of the code package (zip) in the blob store, and the folder inside the work dir to run in.
    package: str | None = None
    requirements: Requirements | None = None
    topology: Literal["single", "ranks", "torchrun", "ray"] = "single"
    env: dict[str, str] = field(default_factory=dict)
    queue_timeout_s: float | None = None
    start_timeout_s: float | None = None
    run_timeout_s: float | None = None
    #: The job is cancelled (`ClientGone`) when no client renewed it for this long; None = no lease (detached).
    client_lease_s: float | None = None
    max_retries: int = 0
    #: Error classes worth a retry of the user's attempt; empty = every retryable class.
    retry_on: tuple[str, ...] = ()
    preemptible: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    #: Group name for progress and resume.
    run: str | None = None
    parent: str | None = None
    #: Globs relative to the work dir whose files are stored before the reset.
    outputs: tuple[str, ...] = ()
    #: Minimum isolation level (`namespaces`, `uid`, `process`, `portable`); None = the pool's.
    isolation: str | None = None
    #: Pickled results are refused (design §5); None = the pool's.
    untrusted: bool | None = None
    #: Memory limit of the attempt in MiB; None = the pod's.
    memory_mib: int | None = None
    #: Seconds between SIGTERM and SIGKILL when the attempt is stopped.
    grace_s: float = 2.0
    idempotency_key: str | None = None

    #: Fields that arrive in the API with later issues; asking for them now is refused by name, not ignored.
    LATER: ClassVar[tuple[str, ...]] = (
        "secrets",
        "placement",
        "network",
        "api_access",
        "webhook",
    )


_PLAIN = frozenset({str, int, float, bool})


def sparse(value: Any) -> Any:
    """A dataclass as JSON with only the fields that differ from their defaults; containers keep their items."""
    if hasattr(value, "__dataclass_fields__"):
        out: dict[str, Any] = {}
        for name, default in _defaults(type(value)):
            item = getattr(value, name)
            if item is not default and item != default:
                out[name] = item if type(item) in _PLAIN else sparse(item)
        return out
    if isinstance(value, tuple | list):
        return [sparse(v) for v in value]
    if isinstance(value, dict):
        return {k: sparse(v) for k, v in value.items()}
    return value


def from_sparse(cls: type[T], body: Mapping[str, Any]) -> T:
    """The dataclass back from `sparse`'s object: lists become tuples, nested objects their classes.

    For what was validated before it was stored: values are not checked, and keys of a newer version are skipped.

    Raises:
        TypeError: a field without default is missing.
    """
    plan = _plan(cls)
    return cls(**{k: plan[k](v) for k, v in body.items() if k in plan})


_known_defaults: dict[type[Any], tuple[tuple[str, Any], ...]] = {}
_known_plans: dict[type[Any], dict[str, Callable[[Any], Any]]] = {}


def _defaults(cls: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Field names with their defaults (`MISSING`, equal to no value, where there is none)."""
    if (found := _known_defaults.get(cls)) is None:
        found = tuple((f.name, f.default_factory() if callable(f.default_factory) else f.default) for f in fields(cls))
        _known_defaults[cls] = found
    return found


def _plan(cls: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """How each field is read back, worked out once per class from its annotations."""
    if (plan := _known_plans.get(cls)) is None:
        hints = get_type_hints(cls)
        plan = _known_plans[cls] = {f.name: _reader(hints[f.name]) for f in fields(cls)}
    return plan


def _reader(hint: Any) -> Callable[[Any], Any]:
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda v: from_sparse(hint, v)
    if get_origin(hint) is tuple:
        item = _reader(get_args(hint)[0])
        return tuple if item is _same else lambda v: tuple(item(x) for x in v)
    if get_origin(hint) in (Union, UnionType):
        inner = next((r for r in map(_reader, get_args(hint)) if r is not _same), _same)
        return inner if inner is _same else lambda v: None if v is None else inner(v)
    return _same


def _same(value: Any) -> Any:
    return value
