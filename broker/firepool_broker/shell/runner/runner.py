"""The door of the real shell: events queue here, `Engine.handle` decides, effects are started in their order.

Everything runs in the event loop's thread; `handle` is synchronous, hence atomic. What a room finds out comes back as an
event. The public methods are what `api` calls. A broken invariant ends the broker (`broken`): the store and the agents
hold the truth, and the next start rebuilds from them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from time import perf_counter
from typing import Any, Protocol

from firepool_broker.core.engine import Engine
from firepool_broker.core.events import (
    CallerLimited,
    CancelRequested,
    ClientRenewed,
    Event,
    PoolsConfigured,
    Woke,
)
from firepool_broker.core.ids import AttemptId, Caller, JobId
from firepool_broker.core.pools import CallerLimits, Pool, problems
from firepool_broker.shell.metrics import Metrics
from firepool_broker.shell.ports import BlobStore, Identity, JobRow, JobStore, LogStore, TokenStore
from firepool_broker.shell.runner.answers import Answers, row_of
from firepool_broker.shell.runner.calls import Calls
from firepool_broker.shell.runner.deliver import Deliver
from firepool_broker.shell.runner.desk import Accepted, Desk, LiveJob, Parts
from firepool_broker.shell.runner.effects import Effects
from firepool_broker.shell.runner.follow import Follow
from firepool_broker.shell.runner.intake import Intake
from firepool_broker.shell.runner.pods import Pods
from firepool_broker.shell.runner.saves import Saves
from firepool_broker.shell.runner.start import Start
from firepool_broker.shell.runner.stream import result_pieces
from firepool_broker.shell.runner.wake import Wake
from firepool_broker.shell.runner.watch import Subscription, Watch
from firepool_broker.shell.runner.words import failure_of
from firepool_wire.errors import BadRequest, Cancelled, FirepoolError, NotFound
from firepool_wire.jobspec import JobSpec
from firepool_wire.words import TERMINAL, JobState

#: A cancel returns when it is recorded; a store that hangs must not hang the request for longer.
RECORD_PATIENCE_S = 5.0


class Templates(Protocol):
    """What pods are made from: only whoever reads the settings knows."""

    def stamp(self, pools: Sequence[Pool]) -> Sequence[Pool]:
        """The pools with their template digests."""
        ...

    def interpreter(self, pool: Pool) -> dict[str, Any] | None:
        """The pool's job interpreter as its agents will say; None: not known."""
        ...


class Runner:
    """Joins engine, ports and API. Built by `main`; `start` before use, `aclose` at the end."""

    def __init__(self, parts: Parts, templates: Templates | None = None) -> None:
        self.engine = Engine()
        self.metrics = Metrics()
        self.desk = Desk(parts, self.metrics, self.emit)
        self._inbox: deque[Event] = deque()
        self._draining = False
        self._templates = templates
        self._limits: dict[Caller, CallerLimits] = {}
        #: The invariant that broke; `main` ends the broker when it is set.
        self.broken: asyncio.Event = asyncio.Event()
        self._started = False
        self._watch = Watch(self.metrics)
        self._intake = Intake(self.desk)
        self._pods = Pods(self.desk)
        self._deliver = Deliver(self.desk)
        self._follow = Follow(self.desk, self._pods, self._deliver)
        self._calls = Calls(self.desk, self._pods, self._follow)
        self._saves = Saves(self.desk, self._intake, self._end_is_durable)
        self._wake = Wake(self.desk.clock, self._woke, self._upkeep)
        self._effects = Effects(
            Answers(self.desk, self._intake, self._watch),
            self._saves,
            self._calls,
            self._follow,
            self._pods,
            wake=self._wake,
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, pools: Sequence[Pool] | None, otherwise: Sequence[Pool] = ()) -> None:
        """Open the store, adopt what lives, tell the engine, and begin to follow the providers.

        `pools` None: those that were applied last, or `otherwise` where none ever were.

        Raises:
            FirepoolError: bad pools, a provider that cannot work here, a schema from the future.
            StoreDown: the store cannot be opened.
        """
        parts = self.desk.parts
        await parts.store.open()
        for caller, limits in (await parts.config.limits()).items():
            self._limits[caller] = limits
            self.emit(CallerLimited(caller, limits))
        if pools is None:
            pools = await parts.config.load_pools()
        # Before any provider: a mistake in the pools must not touch the pods of an earlier broker.
        self._configure(otherwise if pools is None else pools)
        for provider in parts.providers.values():
            await provider.start()
        await Start(self.desk, self._intake, self._pods, self._calls).tell()
        for provider in parts.providers.values():
            self._pods.watch(provider).add_done_callback(self._deaf)
        self._wake.start_upkeep()
        self._started = True

    def end_streams(self) -> None:
        """The broker is about to stop: subscriptions end, waiters get no row."""
        self._watch.end()

    async def aclose(self, *, leave_pods: bool) -> None:
        """Stop everything; with `leave_pods` running jobs live on for the next broker."""
        self._started = False
        self._wake.stop()
        self.end_streams()
        await self.desk.stop_tasks()
        parts = self.desk.parts
        await parts.agents.aclose()
        for provider in parts.providers.values():
            await provider.aclose(leave_pods=leave_pods)
        await parts.store.aclose()
        await parts.blobs.aclose()

    # -- the door ------------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """An event from anywhere in the loop's thread; handled now, or behind the one that is being handled."""
        self._inbox.append(event)
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        if self.broken.is_set():
            return
        self._draining = True
        engine, clock, carry, inbox = self.engine, self.desk.clock, self._effects.carry, self._inbox
        took = self.metrics.handle.took
        event: Event | None = None
        try:
            while inbox:
                event = inbox.popleft()
                began = perf_counter()
                effects = engine.handle(event, clock.now())
                took(perf_counter() - began)
                for effect in effects:
                    carry(effect)
        except Exception as error:
            self.desk.log.critical("broken", during=repr(event), exc_info=error)
            self.broken.set()
            raise
        finally:
            self._draining = False

    def _woke(self) -> None:
        self.emit(Woke())

    def _upkeep(self) -> None:
        jumped_s = self.desk.clock.follow_wall()
        if jumped_s:
            self.desk.log.warning("the wall clock ran ahead", jumped_s=jumped_s)
            self.emit(Woke())

    def _deaf(self, following: "asyncio.Task[None]") -> None:
        """A broker that hears nothing of its pods any more would wait for them for ever."""
        if not self.desk.closing:
            self.desk.log.critical("a pod provider fell silent", cause=repr(following))
            self.broken.set()

    def _end_is_durable(self, attempt: AttemptId) -> None:
        runs = self.desk.runs.pop(attempt, None)
        if runs:
            self._calls.ack(attempt, list(runs))

    # -- what the API asks ---------------------------------------------------------------------------------------------

    async def submit(self, who: Identity, spec: JobSpec, body_digest: str) -> Accepted:
        """One job, durable when this returns. Raises: FirepoolError."""
        return await self._intake.submit(who, spec, body_digest)

    async def submit_many(self, who: Identity, specs: Sequence[tuple[JobSpec, str]]) -> list[Accepted | FirepoolError]:
        """Many jobs whose writes share commits; every one has its own answer."""
        return await self._intake.submit_many(who, specs)

    async def cancel(self, who: Identity, job: str, failure: FirepoolError | None = None) -> None:
        """Ask for the job's end; returns when that is recorded, not when the job is gone. A finished job stays as it is.

        Raises:
            NotFound: the caller has no such job.
        """
        live = self.desk.jobs.get(JobId(job))
        if live is None:
            row = await self.store.get(job)
            if row is None or not may_touch(who, row.caller):
                raise NotFound(f"no job {job!r}", job_id=job)
            return
        if not may_touch(who, live.ask.caller):
            raise NotFound(f"no job {job!r}", job_id=job)
        if live.cancel_requested:
            return
        live.cancel_requested = True
        recorded = self._saves.recorded(live)
        why = failure or Cancelled(f"job {job} was cancelled by {who.person}", job_id=job)
        self.emit(CancelRequested(JobId(job), failure_of(why), who.person))
        await asyncio.wait((recorded,), timeout=RECORD_PATIENCE_S)

    async def renew(self, who: Identity, jobs: Sequence[str]) -> None:
        """Renew the client lease of those of the jobs that live and are the caller's."""
        table = self.desk.jobs
        mine = tuple(JobId(j) for j in jobs if (live := table.get(JobId(j))) and live.ask.caller == who.caller)
        if mine:
            self.emit(ClientRenewed(mine))

    async def configure(self, pools: Sequence[Pool]) -> None:
        """Replace the pools as a whole; kept for the next start. Raises: BadRequest with every problem at once."""
        self._configure(pools)
        await self.desk.parts.config.save_pools(pools)

    def pool_problems(self, pools: Sequence[Pool]) -> list[str]:
        """Everything that is wrong with a configuration, in words (empty: `configure` takes it)."""
        providers = self.desk.parts.providers
        return [*problems(pools, self._limits)] + [
            f"pool {pool.sku}: no provider {pool.provider!r} (there are: {', '.join(sorted(providers))})"
            for pool in pools
            if pool.provider not in providers
        ]

    def _configure(self, pools: Sequence[Pool]) -> None:
        found = self.pool_problems(pools)
        if found:
            raise BadRequest("the pools cannot be used: " + "; ".join(found), problems=found)
        stamped = tuple(self._templates.stamp(pools) if self._templates is not None else pools)
        self.desk.pools = {pool.sku: pool for pool in stamped}
        self.emit(PoolsConfigured(stamped))

    async def limit(self, caller: str, limits: CallerLimits) -> None:
        """Set a caller's hard limits; kept for the next start."""
        name = Caller(caller)
        await self.desk.parts.config.set_limits(name, limits)
        self._limits[name] = limits
        self.emit(CallerLimited(name, limits))

    def watch(self, caller: str) -> Subscription:
        """The caller's changes from now on."""
        return Subscription(self._watch, caller)

    async def wait_terminal(self, job: str, timeout_s: float) -> JobRow | None:
        """The row once the job is terminal, or None when `timeout_s` passed first (or there is no such job)."""
        if JobId(job) not in self.desk.jobs:
            row = await self.store.get(job)
            return row if row is not None and row.state in TERMINAL else None
        return await self._watch.terminal(job, timeout_s)

    async def row(self, job: str) -> JobRow | None:
        """The store's row, or a live view of a job whose first write is under way."""
        live = self.desk.jobs.get(JobId(job))
        if live is not None and not live.stored:
            return row_of(live, self.now())
        return await self.store.get(job)

    def result_pieces(self, row: JobRow) -> AsyncIterator[bytes]:
        """Result frames of a job, while it runs as they come, to their end."""
        return result_pieces(self.desk, self._watch, row)

    def live(self, job: str) -> LiveJob | None:
        """The runner's entry of a job that is not terminal yet."""
        return self.desk.jobs.get(JobId(job))

    # -- what the API shows --------------------------------------------------------------------------------------------

    @property
    def store(self) -> JobStore:
        """The durable truth about jobs."""
        return self.desk.parts.store

    @property
    def blobs(self) -> BlobStore:
        """Content-addressed bytes."""
        return self.desk.parts.blobs

    @property
    def logs(self) -> LogStore:
        """Job output by offset."""
        return self.desk.parts.logs

    @property
    def tokens(self) -> TokenStore:
        """Who a bearer token speaks for."""
        return self.desk.parts.tokens

    @property
    def pools(self) -> Sequence[Pool]:
        """The pools as they are configured now."""
        return tuple(self.desk.pools.values())

    def now(self) -> float:
        """The engine's clock: epoch seconds that never run backwards."""
        return self.desk.clock.now()

    def interpreters(self) -> Sequence[dict[str, Any]]:
        """Job interpreters of the pools, as their agents said, or (before there is one) as they will."""
        told = list(self._pods.interpreters())
        known = {entry["sku"] for entry in told}
        if self._templates is not None:
            silent = [pool for sku, pool in self.desk.pools.items() if sku not in known]
            told += [entry for pool in silent if (entry := self._templates.interpreter(pool)) is not None]
        return told

    def problems(self) -> Sequence[str]:
        """Why the broker is not ready to take jobs, in words (empty: ready)."""
        if self.broken.is_set():
            return ["an invariant of the engine broke; the broker must be restarted"]
        return [] if self._started else ["the broker is starting or stopping"]

    def render_metrics(self) -> bytes:
        """Prometheus text exposition."""
        pods: dict[tuple[str, str], int] = {}
        for view in self.engine.pod_views():
            pods[view.sku, view.state] = pods.get((view.sku, view.state), 0) + 1
        queued: dict[str, int] = dict.fromkeys(self.desk.pools, 0)
        for live in self.desk.jobs.values():
            if live.state is JobState.QUEUED and live.stored:
                queued[live.ask.sku] = queued.get(live.ask.sku, 0) + 1
        self.metrics.standing(pods, queued, self.engine.ticks_that_helped)
        return self.metrics.render()


def may_touch(who: Identity, caller: str) -> bool:
    """A caller's jobs are its own; operators may end anybody's."""
    return who.caller == caller or who.role == "operator"
