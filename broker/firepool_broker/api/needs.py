"""What the HTTP API asks of the runner, as one protocol: the seam between the two rooms, and all that a test needs to fake.

`firepool_broker.shell.runner.Runner` is the real one; `main` passes it to `create_app`, where the types are compared.
"""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from firepool_broker.core.engine import Engine
from firepool_broker.core.pools import CallerLimits, Pool
from firepool_broker.shell.ports import BlobStore, Identity, JobRow, JobStore, LogStore, TokenStore
from firepool_wire.errors import FirepoolError
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import JobState


class Accepted(Protocol):
    """The durable answer to a submission; `replayed`: the key was used before, with the same body."""

    @property
    def job(self) -> str: ...
    @property
    def state(self) -> JobState: ...
    @property
    def replayed(self) -> bool: ...


class Change(Protocol):
    """One visible change of a job; `row` is there when the job became terminal."""

    @property
    def job(self) -> str: ...
    @property
    def state(self) -> JobState: ...
    @property
    def seq(self) -> int: ...
    @property
    def row(self) -> JobRow | None: ...


class Subscription(Protocol):
    """A bounded window on a caller's changes. A subscriber that reads too slowly loses the oldest ones and is told."""

    #: The broker stops: nothing follows.
    ended: bool

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def take(self, timeout_s: float) -> Sequence[Change]:
        """Every change that has gathered, or those that come first within `timeout_s` (none: empty)."""
        ...

    def overflowed(self) -> bool:
        """Whether changes were lost since this was last asked."""
        ...


class Broker(Protocol):
    """The runner as the API sees it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def pools(self) -> Sequence[Pool]: ...
    @property
    def store(self) -> JobStore: ...
    @property
    def blobs(self) -> BlobStore: ...
    @property
    def logs(self) -> LogStore: ...
    @property
    def tokens(self) -> TokenStore: ...

    def now(self) -> float:
        """The engine's clock: epoch seconds that never run backwards."""
        ...

    async def submit(self, who: Identity, spec: JobSpec, body_digest: str) -> Accepted:
        """One job, durable when this returns. Raises: FirepoolError."""
        ...

    async def submit_many(
        self, who: Identity, specs: Sequence[tuple[JobSpec, str]]
    ) -> Sequence[Accepted | FirepoolError]:
        """Many jobs in one durable commit; every one has its own answer."""
        ...

    async def cancel(self, who: Identity, job: str, failure: FirepoolError | None = None) -> None:
        """Ask for the job's end; returns when that is recorded, not when the job is gone."""
        ...

    async def renew(self, who: Identity, jobs: Sequence[str]) -> None:
        """Renew the client lease of those of the jobs that live."""
        ...

    async def configure(self, pools: Sequence[Pool]) -> None:
        """Replace the pools as a whole. Raises: BadRequest with every problem at once."""
        ...

    def pool_problems(self, pools: Sequence[Pool]) -> Sequence[str]:
        """Everything that is wrong with a configuration, in words (empty: `configure` would take it)."""
        ...

    async def limit(self, caller: str, limits: CallerLimits) -> None:
        """Set a caller's hard limits, durably."""
        ...

    def watch(self, caller: str) -> Subscription: ...
    async def wait_terminal(self, job: str, timeout_s: float) -> JobRow | None:
        """The row once the job is terminal, or None when `timeout_s` passed first."""
        ...

    async def row(self, job: str) -> JobRow | None: ...
    def result_pieces(self, row: JobRow) -> AsyncIterator[bytes]:
        """Result frames of a job, while it runs as they come, to its end."""
        ...

    def interpreters(self) -> Sequence[dict[str, Any]]:
        """Job interpreters of the pools: [{"sku", "python", "version", "pickle"}], as their agents said."""
        ...

    def problems(self) -> Sequence[str]:
        """Why the broker is not ready to take jobs, in words (empty: ready)."""
        ...

    def render_metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...
