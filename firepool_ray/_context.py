"""Where code stands: `context()` inside a job, `run(name)` around submissions."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import time
from typing import Any, NamedTuple

_run: ContextVar[str | None] = ContextVar("firepool_run", default=None)
#: Set by SIGTERM once `cancelled` was looked at.
_stop_asked = threading.Event()
_handling = False


class Run(NamedTuple):
    """A group of jobs under one name."""

    name: str

    def status(self) -> dict[str, Any]:
        """Progress, counts by class and fault, wait percentiles. Waits for the network. Raises: FirepoolError."""
        from firepool_ray import _front
        from firepool_ray._http import path_of

        body: dict[str, Any] = _front.current().api.json("GET", path_of("runs", self.name))
        return body


@contextmanager
def run(name: str) -> Iterator[Run]:
    """Everything submitted inside belongs to the run `name`, in this thread and in tasks started here."""
    token = _run.set(name)
    try:
        yield Run(name)
    finally:
        _run.reset(token)


def current_run() -> str | None:
    """The run that submissions belong to now; inside a job that of the job itself."""
    return _run.get() or os.environ.get("FIREPOOL_RUN") or None


class Context(NamedTuple):
    """What a job knows of itself. Outside of a job `job_id` is None and the figures are those of a lone process."""

    job_id: str | None
    #: `<job>:<retry-count>`, never repeated.
    attempt: str | None
    retry_count: int
    rank: int
    world_size: int
    caller: str | None
    person: str | None
    sku: str | None
    queue: str | None
    lease_tag: str | None
    run: str | None
    pod: str | None
    #: Epoch seconds at which the attempt is stopped, or None.
    deadline: float | None
    #: Files written here outlive the job.
    output_dir: str | None

    @property
    def in_job(self) -> bool:
        """Whether this code runs in a job."""
        return self.job_id is not None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, or None."""
        return None if self.deadline is None else max(0.0, self.deadline - time())

    @property
    def cancelled(self) -> bool:
        """Whether the job was asked to stop.

        Looking at it for the first time (in the main thread) takes SIGTERM over: from then on the job is expected to stop by
        itself within its `grace_s`, after which it is killed.
        """
        global _handling
        if not _handling and self.in_job and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: _stop_asked.set())
            _handling = True
        return _stop_asked.is_set()


def context() -> Context:
    """What this job knows of itself; see `Context`."""
    env = os.environ.get
    deadline = env("FIREPOOL_DEADLINE")
    return Context(
        job_id=env("FIREPOOL_JOB_ID"),
        attempt=env("FIREPOOL_ATTEMPT"),
        retry_count=int(env("FIREPOOL_RETRY_COUNT") or 0),
        rank=int(env("FIREPOOL_RANK") or 0),
        world_size=int(env("FIREPOOL_WORLD_SIZE") or 1),
        caller=env("FIREPOOL_CALLER"),
        person=env("FIREPOOL_PERSON"),
        sku=env("FIREPOOL_SKU"),
        queue=env("FIREPOOL_QUEUE"),
        lease_tag=env("FIREPOOL_LEASE_TAG"),
        run=env("FIREPOOL_RUN"),
        pod=env("FIREPOOL_POD"),
        deadline=float(deadline) if deadline else None,
        output_dir=env("FIREPOOL_OUTPUT_DIR"),
    )
