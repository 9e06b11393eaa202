"""Commands as jobs: `submit(argv)` gives a `Job`, which any process can pick up again by its id.

These calls do wait for the network: a command is submitted once it is durable. Nothing is kept here but the id.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from firepool_ray import _front, _package
from firepool_ray._context import current_run
from firepool_ray._errors import GetTimeoutError, job_error
from firepool_ray._http import Disconnected, path_of
from firepool_ray._options import Options
from firepool_ray._session import Session
from firepool_ray._source import Blob
from firepool_wire.errors import BrokerUnavailable, Cancelled
from firepool_wire.words import TERMINAL, JobState

if TYPE_CHECKING:
    from typing import Unpack

    from firepool_ray._options import OptionsDict

#: One long poll; the broker may answer earlier.
_POLL_S = 30.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a command ended."""

    job_id: str
    state: JobState
    exit_code: int | None
    signal: int | None
    #: The whole row: times, path, usage, outputs, …
    body: dict[str, Any]


def submit(argv: Sequence[str], **options: "Unpack[OptionsDict]") -> "Job":
    """Run a command in a pod. Returns once the job is durable; it outlives this program.

    Args:
        argv: the command; a text is refused, since nobody splits it for you.
        options: as in `@remote`. `package="."` sends a folder along and runs in it.

    Raises:
        FirepoolError: refused, or no broker.
        ValueError, TypeError: a wrong option or argv.
    """
    if isinstance(argv, str) or not all(isinstance(a, str) for a in argv):
        raise TypeError("argv is a list of texts: ['python', 'train.py'], or ['sh', '-c', '…']")
    chosen = Options.of(options)
    session = _front.current()
    lease = chosen.client_lease_s
    spec = chosen.spec(tuple(argv), sku=session.sku(chosen.sku), lease_s=lease, run=current_run())
    if chosen.package:
        spec["package"] = _upload(session, chosen.package)
    spec["idempotency_key"] = chosen.idempotency_key or f"{session.client}-{os.urandom(8).hex()}"
    body = session.api.json("POST", "/v1/jobs", spec)
    return Job(body["id"])


def _upload(session: Session, package: str | bool) -> str:
    if isinstance(package, str) and package.startswith("sha256:"):
        return package
    folder = Path(package) if isinstance(package, str) else Path.cwd()
    blob: Blob = _package.of_folder(folder)
    missing = session.api.json("POST", "/v1/blobs:missing", {"digests": [blob.digest]})["missing"]
    if missing:
        session.api.raw("PUT", path_of("blobs", blob.digest), blob.read())
    return blob.digest


class Job:
    """A job by its id. Making one asks nobody; every method asks the broker."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id

    @classmethod
    def from_id(cls, job_id: str) -> "Job":
        """The job of an id; whether it exists is found by the first question."""
        return cls(job_id)

    @property
    def _api(self) -> Any:
        return _front.current().api

    @property
    def url(self) -> str:
        """Where the broker shows it."""
        return f"{_front.current().api.target.address}{path_of('jobs', self.id)}"

    def body(self) -> dict[str, Any]:
        """The whole row. Raises: NotFound."""
        body: dict[str, Any] = self._api.json("GET", path_of("jobs", self.id))
        return body

    def status(self) -> JobState:
        """Its state now. Raises: NotFound."""
        return JobState(self.body()["state"])

    def explain(self) -> dict[str, Any]:
        """How it got its pods and why not warmer ones, or what it waits for."""
        body: dict[str, Any] = self._api.json("GET", path_of("jobs", self.id, "explain"))
        return body

    def wait(self, timeout: float | None = None) -> JobResult:
        """Wait for the end, however it ends. Raises: GetTimeoutError; NotFound."""
        _front.warn_if_in_loop("waiting for a job", "use `await asyncio.to_thread(job.wait)`")
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            left = _POLL_S if deadline is None else max(0.0, min(_POLL_S, deadline - monotonic()))
            body = self._api.json("GET", f"{path_of('jobs', self.id, 'wait')}?timeout_s={left:.3f}")
            state = JobState(body["state"])
            if state in TERMINAL:
                return JobResult(self.id, state, body.get("exit_code"), body.get("signal"), body)
            if deadline is not None and monotonic() >= deadline:
                raise GetTimeoutError(f"job {self.id} was not over after {timeout:g} s ({state})", job_id=self.id)

    def result(self, timeout: float | None = None) -> JobResult:
        """Wait for success. Raises: GetTimeoutError; the job's own error (NonZeroExit, OOM, Cancelled, …)."""
        ended = self.wait(timeout)
        if ended.body.get("error"):
            raise job_error(ended.body["error"], self.id)
        if ended.state is JobState.CANCELLED:
            raise Cancelled(f"job {self.id} was cancelled", job_id=self.id)
        return ended

    def cancel(self, *, wait: bool = False) -> JobState:
        """Ask for its end; twice is once. `wait` until its process tree is verified gone. Returns the state then."""
        body = self._api.json("POST", path_of("jobs", f"{self.id}:cancel"))
        return self.wait().state if wait else JobState(body["state"])

    @property
    def logs(self) -> "Logs":
        """What it wrote."""
        return Logs(self)

    def outputs(self) -> list[dict[str, Any]]:
        """Its stored output files: path, bytes, digest."""
        return list(self._api.json("GET", path_of("jobs", self.id, "outputs"))["outputs"])

    def fetch_output(self, path: str) -> bytes:
        """The bytes of one output file. Raises: NotFound."""
        data: bytes = self._api.raw("GET", path_of("jobs", self.id, "outputs", *path.split("/"))).body
        return data

    def events(self) -> Iterator[dict[str, Any]]:
        """Its changes from now on, the last one being its end."""
        first = self.body()
        if JobState(first["state"]) in TERMINAL:
            yield {"job": self.id, "state": first["state"], "terminal": True, "body": first}
            return
        yield {"job": self.id, "state": first["state"], "terminal": False}
        with self._api.stream(f"/v1/events?from={first.get('seq', 0)}") as (_, _, pieces):
            rest = b""
            for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event.get("job") == self.id:
                        yield event
                        if event.get("terminal"):
                            return

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Job {self.id}>"


class Logs:
    """What a job wrote, by byte offset; stdout and stderr as they came."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def fetch(self, offset: int = 0) -> bytes:
        """Everything from a byte offset on that is there now; negative counts from the end."""
        path = f"{path_of('jobs', self._job.id, 'logs')}?offset={offset}"
        data: bytes = _front.current().api.raw("GET", path).body
        return data

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines that are there now."""
        size = 4096
        while True:
            data = self.fetch(-size)
            if data.count(b"\n") > lines or len(data) < size:
                return data.decode("utf-8", "replace").splitlines()[-lines:]
            size *= 4

    def stream(self, offset: int = 0) -> Iterator[bytes]:
        """Bytes as they come, to the end of the job; a broken connection is taken up where it broke.

        Raises:
            BrokerUnavailable: nobody answers any more.
        """
        session = _front.current()
        tries = 0
        while True:
            path = f"{path_of('jobs', self._job.id, 'logs')}?offset={offset}&follow=true"
            try:
                with session.api.stream(path, silence_s=None) as (_, connection, pieces):
                    connection.sock.settimeout(None)
                    for piece in pieces:
                        tries, offset = 0, offset + len(piece)
                        yield piece
                return
            except Disconnected as why:
                tries += 1
                if tries > 10 or session.api.closing.wait(min(2.0, 0.05 * 2**tries)):
                    raise BrokerUnavailable(
                        f"the log of job {self._job.id} broke off: {why}", job_id=self._job.id
                    ) from why
