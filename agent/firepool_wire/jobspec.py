"""The job spec of `POST /v1/jobs` (spec §2): one dataclass that the SDK fills, the broker's API validates (and publishes
as OpenAPI) and the store keeps.

Only fields that differ from their default are sent, so a newer SDK works with an older broker until it uses what that
broker lacks. Unknown fields are refused by the API with the field's path and the nearest valid name.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

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


def sparse(value: Any) -> Any:
    """A dataclass as JSON with only the fields that differ from their defaults; containers keep their items."""
    if hasattr(value, "__dataclass_fields__"):
        out: dict[str, Any] = {}
        for f in fields(value):
            item = getattr(value, f.name)
            default = f.default_factory() if callable(f.default_factory) else f.default
            if item != default:
                out[f.name] = sparse(item)
        return out
    if isinstance(value, tuple | list):
        return [sparse(v) for v in value]
    if isinstance(value, dict):
        return {k: sparse(v) for k, v in value.items()}
    return value
