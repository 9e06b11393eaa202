"""The doors of the real shell: what a pod provider, a job store, a blob store and an agent client must do, what they may
raise, and the plain data that crosses. Implementations are strangers to each other; `runner` and `main` join them.

Each port has one conformance suite (`firepool_broker.conformance`) that every implementation runs, fakes included.
Third parties register providers under the entry point group `firepool.providers`; `PORT_VERSION` is checked first.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol, runtime_checkable

from firepool_broker.core.asks import Binding
from firepool_broker.core.ids import Caller
from firepool_broker.core.pools import CallerLimits, Pool
from firepool_broker.shell.rows import (
    EndAttempt,
    InsertJob,
    JobFilter,
    JobRow,
    Lost,
    MoveJob,
    StartAttempt,
    StoreDown,
    Won,
    Write,
)
from firepool_wire.agentapi import (
    AttemptStatus,
    Hello,
    Launch,
    Launched,
    Prepare,
    Prepared,
    Reset,
    ResetReport,
    Stats,
    Stop,
)
from firepool_wire.frames import Frame

__all__ = [
    "EndAttempt",
    "InsertJob",
    "JobFilter",
    "JobRow",
    "Lost",
    "MoveJob",
    "StartAttempt",
    "StoreDown",
    "Won",
    "Write",
]

#: Version of the ports in this module; an out-of-tree implementation that names another is refused at load.
PORT_VERSION = 1


# -- pods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """What a new pod is made from. `name` is deterministic: the same order twice makes one pod."""

    name: str
    pool: Pool
    template: str
    single_use: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """A pod as the provider sees it."""

    name: str
    sku: str
    template: str
    #: Wall clock seconds (epoch).
    created_at: float
    #: Where its agent listens: `unix:/path/agent.sock` or `https://ip:port`; "" while starting.
    address: str
    ready: bool
    single_use: bool = False
    #: Its deletion has begun.
    terminating: bool = False
    #: Identity that changes when the pod is made anew under the same name.
    incarnation: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodBecameReady:
    """The agent's socket accepts connections."""

    pod: PodSeen


@dataclass(frozen=True, slots=True)
class PodEnded:
    """Verified gone: its processes exited (locally: pidfd). `oom`: killed for its memory."""

    name: str
    why: str
    oom: bool = False


@dataclass(frozen=True, slots=True)
class PodFailed:
    """The pod could not be made or never came up; it holds nothing any more."""

    name: str
    error: dict[str, Any]


PodFact = PodBecameReady | PodEnded | PodFailed


@runtime_checkable
class PodProvider(Protocol):
    """Makes and unmakes pods. All calls are idempotent by pod name."""

    port_version: ClassVar[int]

    async def start(self) -> None:
        """Connect, adopt what lives from an earlier broker. Raises: FirepoolError (IsolationUnavailable, …)."""

    async def list_pods(self) -> Sequence[PodSeen]:
        """Every pod of ours that is not verified gone, terminating ones included."""
        ...

    def facts(self) -> AsyncIterator[PodFact]:
        """What happens to pods, from now on; one consumer."""
        ...

    async def create(self, order: PodOrder) -> None:
        """Begin to make a pod; answers when the order is accepted, readiness comes as a fact.

        Raises: FirepoolError: typed refusal (quota, isolation, no such image); nothing was made.
        """

    async def delete(self, name: str, why: str) -> None:
        """Begin to unmake a pod (unknown name: nothing to do). `PodEnded` follows once its processes are gone."""

    async def annotate(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Merge annotations (None removes one). Raises: FirepoolError; the caller treats it as best effort."""

    async def aclose(self, *, leave_pods: bool) -> None:
        """Disconnect; with `leave_pods` they stay for the next broker, else they are deleted and verified gone."""


# -- agents ---------------------------------------------------------------------------------------------------------


class AgentUnreachable(Exception):
    """The call's outcome is unknown: timed out, reset, or refused. `refused`: nothing listens at the address."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


@runtime_checkable
class AgentClient(Protocol):
    """Calls to the agent of one pod by its address. Every call may raise `AgentUnreachable` (outcome unknown) or the
    `FirepoolError` that the agent answered."""

    async def hello(self, address: str) -> Hello: ...
    async def prepare(self, address: str, attempt: str, message: Prepare) -> Prepared: ...
    async def launch(self, address: str, attempt: str, message: Launch) -> Launched: ...
    async def status(self, address: str, attempt: str) -> AttemptStatus: ...
    def events(self, address: str, attempt: str, offset: int) -> AsyncIterator[Frame]: ...
    async def stop(self, address: str, attempt: str, message: Stop) -> None: ...
    async def abandon(self, address: str, attempt: str) -> None: ...
    async def ack(self, address: str, attempt: str) -> None: ...
    def output(self, address: str, attempt: str, path: str) -> AsyncIterator[bytes]: ...
    async def reset(self, address: str, message: Reset) -> ResetReport: ...
    async def settled(self, address: str) -> None: ...
    async def has_blob(self, address: str, digest: str) -> bool: ...
    async def put_blob(self, address: str, digest: str, path: FilePath) -> None: ...
    async def stacks(self, address: str, attempt: str) -> str: ...
    async def stats(self, address: str) -> Stats: ...
    def forget(self, address: str) -> None:
        """The pod is gone: nothing kept for it is of use any more."""

    async def aclose(self) -> None: ...


# -- blobs ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class BlobStore(Protocol):
    """Content-addressed bytes, names scoped per caller: a caller learns nothing of another's blobs. Digests are
    `sha256:<hex>` of the stored bytes."""

    async def has(self, caller: str, digest: str) -> bool: ...
    async def put(self, caller: str, chunks: AsyncIterator[bytes], expect: str | None, limit_bytes: int) -> str:
        """Store a stream; returns its digest.

        Raises: PayloadTooLarge; PackageError (digest is not `expect`); StoreUnavailable (disk full). Nothing stays then.
        """
        ...

    async def put_bytes(self, caller: str, data: bytes) -> str: ...
    async def get(self, caller: str, digest: str) -> bytes:
        """Raises: NotFound."""
        ...

    def stream(self, caller: str, digest: str, start: int = 0) -> AsyncIterator[bytes]: ...
    async def size(self, caller: str, digest: str) -> int: ...
    async def local_path(self, caller: str, digest: str) -> FilePath:
        """A readable file with the blob's bytes (fetched to a cache where the store is remote). Raises: NotFound."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class LogStore(Protocol):
    """Per attempt and rank: an append-only log addressed by byte offset, readable while it grows."""

    def append(self, attempt: str, rank: int, stream: int, data: bytes, event_offset: int) -> None:
        """Add bytes; `event_offset` is the agent's offset behind this frame, from which a re-attach continues."""

    def event_offset(self, attempt: str, rank: int) -> int:
        """Offset in the agent's event log behind the last appended frame (0: nothing stored)."""
        ...

    def read(self, attempt: str, rank: int, offset: int, limit: int) -> bytes: ...
    def size(self, attempt: str, rank: int) -> int: ...
    def finish(self, attempt: str, rank: int) -> None:
        """Nothing follows; readers get their end marker."""

    def finished(self, attempt: str, rank: int) -> bool: ...
    async def more(self, attempt: str, rank: int, offset: int) -> None:
        """Return once bytes lie behind `offset` or the log is finished (at once where that is so already)."""


# -- jobs -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class JobStore(Protocol):
    """The durable truth about jobs. One writer; `write` calls that gather while a commit is under way share the next one
    (group commit), in call order; every write is still checked on its own row."""

    async def open(self) -> None:
        """Connect, migrate forward. Raises: StoreDown; FirepoolError when the schema is newer than this broker."""

    def write(self, write: Write) -> Awaitable[Won | Lost]:
        """Queue a write; its answer comes when its group is durable. The awaitable raises `StoreDown`."""
        ...

    async def get(self, job: str) -> JobRow | None: ...
    async def get_many(self, jobs: Sequence[str]) -> list[JobRow]: ...
    async def by_key(self, caller: str, key: str) -> tuple[str, str] | None:
        """(job id, body digest) of an idempotency key, or None."""
        ...

    async def page(self, where: JobFilter) -> tuple[list[JobRow], str | None]:
        """A page, newest first, and the cursor of the next (None: no more)."""
        ...

    async def unfinished(self) -> list[JobRow]:
        """Every job that is not terminal (recovery)."""
        ...

    async def bindings(self, pods: Sequence[str]) -> list[Binding]:
        """The newest committed binding of each pod that ever had one."""
        ...

    async def ended_since(self, caller: str, seq: int, limit: int) -> list[JobRow]:
        """Terminal rows of a caller behind `seq`, in order (resumable event streams)."""
        ...

    async def newest_seq(self, caller: str) -> int:
        """The place of the caller's newest change (0: none): where an event stream that wants no history begins."""
        ...

    async def counts(self, caller: str | None, run: str | None) -> dict[str, int]:
        """Jobs by state."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a verified token speaks for."""

    caller: str
    person: str
    #: viewer | submitter | team-admin | operator
    role: str = "submitter"
    expires_at: float | None = None


@runtime_checkable
class TokenStore(Protocol):
    """Bearer tokens, stored hashed (sha256 of the token)."""

    async def identify(self, token: str) -> Identity | None:
        """None: unknown, expired or revoked."""
        ...

    async def create(self, identity: Identity, name: str) -> str:
        """A new token's text, shown once."""
        ...

    async def revoke(self, name: str, caller: str) -> bool: ...


@runtime_checkable
class ConfigStore(Protocol):
    """Running configuration that outlives the broker."""

    async def save_pools(self, pools: Sequence[Pool]) -> None: ...
    async def load_pools(self) -> list[Pool] | None:
        """The pools as last applied through the API; None: none ever were."""
        ...

    async def set_limits(self, caller: Caller, limits: CallerLimits) -> None: ...
    async def limits(self) -> Mapping[Caller, CallerLimits]: ...


#: What the runner gives a provider's or store's background work to report fatal trouble with.
Alarm = Callable[[str, BaseException], None]
