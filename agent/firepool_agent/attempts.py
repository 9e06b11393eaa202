"""Which attempts this agent knows, and what may be asked of each: unknown → prepared → running → ended → (acknowledged) unknown.

Every call is idempotent by attempt id and refused after its deadline. One attempt at a time; between two of them stands a reset.
One waiting process is always kept ready, so that `prepare` only has to write down who will run. How an attempt runs is
`running`'s business, what its inputs become is `inputs`'.
"""

import asyncio
import contextlib
import shutil
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from firepool_agent.cells import Cell
from firepool_agent.eventlog import EventLog, exit_frame
from firepool_agent.inputs import Inputs
from firepool_agent.parts import Parts
from firepool_agent.running import Running, Work
from firepool_agent.usage import Meter
from firepool_wire.agentapi import (
    AttemptStatus,
    ExitRecord,
    Launch,
    Launched,
    Prepare,
    Prepared,
    Reset,
    ResetReport,
    Stop,
)
from firepool_wire.errors import Cancelled, Conflict, FirepoolError, HostLost, NotFound, from_json


class State(StrEnum):
    """What `AttemptStatus.state` says."""

    UNKNOWN = "unknown"
    PREPARED = "prepared"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Attempt:
    """One attempt that this agent holds records of."""

    id: str
    log: EventLog
    #: Where its kept output files lie.
    keep_dir: Path
    state: State
    prepared: Prepared | None = None
    cell: Cell | None = None
    #: Answers a repeated launch, and one that arrives while the first still installs.
    launch: asyncio.Task[Launched] | None = None
    running: Running | None = None
    exit: ExitRecord | None = None
    #: A stop that came while inputs were still being prepared.
    stopped: FirepoolError | None = None


class Attempts:
    """The records, and the one attempt that has the pod now."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._folder = Path(parts.config.state_dir) / "attempts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Attempt] = {}
        #: The attempt that was prepared last and whose reset has not been proved yet.
        self._current: Attempt | None = None
        self._spare: asyncio.Task[Cell] | None = None
        self._user_before: dict[str, Any] | None = None
        for attempt_id, record in parts.journal.attempts.items():
            self._recover(attempt_id, record["exit"])

    # -- records of an earlier agent --------------------------------------------------------------------------------

    def _recover(self, attempt_id: str, exit_record: dict[str, Any] | None) -> None:
        """Serve what an earlier agent of this pod has left; what it was running died with it."""
        attempt = self._record(attempt_id, State.ENDED)
        if exit_record is None:
            lost = HostLost("the agent that ran this attempt is gone, and the attempt with it")
            attempt.exit = ExitRecord(attempt=attempt_id, error=lost.to_json())
            self._finish(attempt, attempt.exit)
        else:
            attempt.exit = ExitRecord.from_json(exit_record)
            if not attempt.log.ended:
                attempt.log.end(exit_frame(attempt.exit))

    def _record(self, attempt_id: str, state: State) -> Attempt:
        name = quote(attempt_id, safe="")
        attempt = Attempt(
            attempt_id, EventLog(self._folder / f"{name}.events"), self._folder / f"{name}.outputs", state
        )
        self._known[attempt_id] = attempt
        return attempt

    # -- the spare --------------------------------------------------------------------------------------------------

    def make_spare(self) -> asyncio.Task[Cell]:
        """Have a process waiting for whoever is prepared next."""
        if self._spare is None or (self._spare.done() and self._spare.exception() is not None):
            slot = self._parts.scratch.fresh(self._parts.uids.next())
            self._spare = asyncio.ensure_future(self._parts.zygote.cell(slot))
        return self._spare

    async def _take_spare(self) -> Cell:
        """The waiting process; one that died with its zygote, waiting or still being made, is replaced. Raises: Internal."""
        begun_before = self._spare is not None
        while True:
            try:
                cell = await asyncio.shield(self.make_spare())
            except FirepoolError:
                if not begun_before:
                    raise
                begun_before = False
                continue
            self._spare = None
            if cell.alive():
                return cell
            cell.discard()

    # -- calls ------------------------------------------------------------------------------------------------------

    async def prepare(self, attempt_id: str, message: Prepare) -> Prepared:
        """Record who will run here and give the attempt the waiting process. Raises: Conflict; Internal."""
        if (attempt := self._known.get(attempt_id)) is not None:
            if attempt.prepared is None:
                raise Conflict(f"attempt {attempt_id} has already ended here")
            return attempt.prepared
        check_deadline(message.deadline_s)
        if self._current is not None:
            raise Conflict(f"the pod belongs to attempt {self._current.id} until it is reset", holder=self._current.id)
        self._current = attempt = self._record(attempt_id, State.PREPARED)
        user = {"caller": message.caller, "person": message.person, "queue": message.queue, "tag": message.tag}
        self._user_before = self._parts.journal.last_user
        self._parts.journal.prepared(attempt_id, user)
        try:
            attempt.cell = await self._take_spare()
        except FirepoolError:
            self._undo(attempt)
            raise
        attempt.prepared = Prepared(uid=attempt.cell.slot.uid, pid=attempt.cell.pid)
        return attempt.prepared

    async def abandon(self, attempt_id: str) -> None:
        """Undo a prepare: nothing of the user's came near the process, so it waits for the next one. Raises: Conflict."""
        attempt = self._known.get(attempt_id)
        if attempt is None:
            return
        if attempt.state is not State.PREPARED or attempt.launch is not None:
            raise Conflict(f"attempt {attempt_id} was launched; stop it")
        if attempt.cell is not None:
            self._spare = asyncio.ensure_future(_already(attempt.cell))
        self._undo(attempt)

    def _undo(self, attempt: Attempt) -> None:
        self._parts.journal.abandoned(attempt.id, self._user_before)
        attempt.log.drop()
        del self._known[attempt.id]
        self._current = None

    async def launch(self, attempt_id: str, message: Launch) -> Launched:
        """Deliver, unpack, install, release. Raises: Conflict; NotFound; what is wrong with the inputs."""
        attempt = self._get(attempt_id)
        if attempt.launch is None:
            check_deadline(message.deadline_s)
            if attempt.state is not State.PREPARED or attempt.cell is None:
                raise Conflict(f"attempt {attempt_id} is {attempt.state}, not prepared")
            # A task of its own: a client that hangs up does not interrupt it, and asks for its outcome later.
            attempt.launch = asyncio.ensure_future(self._launch(attempt, attempt.cell, message))
        return await asyncio.shield(attempt.launch)

    async def _launch(self, attempt: Attempt, cell: Cell, message: Launch) -> Launched:
        asked = time.monotonic()
        try:
            inputs = await Inputs.gather(self._parts, cell.slot, message, attempt.log.note)
            if attempt.stopped is not None:
                raise attempt.stopped
            with inputs.opened() as blobs:
                return await self._release(attempt, cell, inputs, blobs, asked)
        except FirepoolError as error:
            self._fail(attempt, cell, error)
            raise

    async def _release(
        self, attempt: Attempt, cell: Cell, inputs: Inputs, blobs: dict[str, int], asked_at_s: float
    ) -> Launched:
        """Let the process go. From here on its end is told by its guard, whatever happens."""
        config = self._parts.config
        work = Work(
            attempt=attempt.id,
            launch=inputs.launch,
            dropped_env=inputs.dropped_env,
            keep_dir=attempt.keep_dir,
            asked_at_s=asked_at_s,
            nested=config.nested,
            guarded=config.nested or cell.slot.uid != 0,
        )
        order = inputs.order(attempt.id, blobs).pack()
        meter = Meter(config, self._parts.group, cell.guard, inputs.launch.memory_bytes)
        attempt.running = Running(cell, work, attempt.log, meter)
        attempt.running.record.add_done_callback(lambda done: self._ended(attempt, done.result()))
        attempt.state = State.RUNNING
        return Launched(at_s=await attempt.running.release(order, list(blobs.values())))

    def _fail(self, attempt: Attempt, cell: Cell, error: FirepoolError) -> None:
        """The launch failed: no process ever ran user code, and the pod is reset like after any attempt."""
        cell.discard()
        record = ExitRecord(attempt=attempt.id, error=error.to_json(), ended_at_s=time.monotonic())
        attempt.log.end(exit_frame(record))
        self._finish(attempt, record)

    def _ended(self, attempt: Attempt, record: ExitRecord) -> None:
        """Its process has ended. Where its namespace took everything along, the next one is forked while the broker hears of
        it and asks for the reset: a busy pod would wait for that fork (the reset leaves it alone)."""
        self._finish(attempt, record)
        if self._parts.config.nested:
            self.make_spare()

    def _finish(self, attempt: Attempt, record: ExitRecord) -> None:
        attempt.exit = record
        attempt.state = State.ENDED
        if not attempt.log.ended:
            attempt.log.end(exit_frame(record))
        self._parts.journal.ended(attempt.id, record.to_json())

    def status(self, attempt_id: str) -> AttemptStatus:
        """What is known of an attempt."""
        attempt = self._known.get(attempt_id)
        if attempt is None:
            return AttemptStatus(state=State.UNKNOWN)
        return AttemptStatus(state=attempt.state, exit=None if attempt.exit is None else attempt.exit.to_json())

    def events(self, attempt_id: str) -> EventLog:
        """The attempt's event log. Raises: NotFound."""
        return self._get(attempt_id).log

    def stop(self, attempt_id: str, message: Stop) -> None:
        """Begin to end the attempt; its exit record will carry the message's error. Raises: NotFound."""
        attempt = self._get(attempt_id)
        error = Cancelled("the attempt was stopped") if message.error is None else from_json(message.error)
        if attempt.running is not None:
            attempt.running.stop(error, message.grace_s)
        elif attempt.launch is not None:
            attempt.stopped = error
        elif attempt.state is State.PREPARED and attempt.cell is not None:
            self._fail(attempt, attempt.cell, error)

    async def stacks(self, attempt_id: str) -> str:
        """Stacks of all threads. Raises: NotFound."""
        running = self._get(attempt_id).running
        return "" if running is None else await running.stacks()

    def keep_dir(self, attempt_id: str) -> Path:
        """Where the attempt's output files are. Raises: NotFound."""
        return self._get(attempt_id).keep_dir

    async def acknowledge(self, attempt_id: str) -> None:
        """The broker has stored exit record, log and outputs: drop them. Raises: Conflict: it has not ended."""
        attempt = self._known.get(attempt_id)
        if attempt is None:
            return
        if attempt.state is not State.ENDED:
            raise Conflict(f"attempt {attempt_id} has not ended")
        self._parts.journal.acknowledged(attempt_id)
        attempt.log.drop()
        if attempt.keep_dir.exists():
            await asyncio.to_thread(shutil.rmtree, attempt.keep_dir)
        del self._known[attempt_id]

    def reset(self, message: Reset) -> ResetReport:
        """Clean the pod after its current attempt; a clean one gets a new waiting process. Raises: Conflict: it still runs."""
        attempt = self._current
        if attempt is not None and attempt.state in (State.PREPARED, State.RUNNING):
            raise Conflict(f"attempt {attempt.id} is {attempt.state}", holder=attempt.id)
        cell = None if attempt is None else attempt.cell
        # Blocks the loop: nothing may be served out of a pod that is being proved empty.
        report = self._parts.resetter.run(
            None if cell is None else cell.slot, 0 if cell is None else cell.guard, message.wait_s, self._helpers()
        )
        report.layers = self._parts.layers.present()
        if report.clean:
            self._current = None
            asyncio.get_running_loop().call_soon(self.make_spare)
        return report

    def _helpers(self) -> list[int]:
        """Processes of ours that a reset leaves alone."""
        helpers = [self._parts.zygote.pid]
        if self._spare is not None and self._spare.done() and self._spare.exception() is None:
            spare = self._spare.result()
            helpers += [spare.guard, spare.pid]
        return helpers

    # -- the house --------------------------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Attempts that records are held of."""
        return list(self._known)

    def live(self) -> tuple[str | None, int, float]:
        """The attempt whose process lives, with its memory and CPU seconds."""
        attempt = self._current
        if attempt is None or attempt.running is None or attempt.state is not State.RUNNING:
            return None, 0, 0.0
        return attempt.id, *attempt.running.usage()

    async def aclose(self) -> None:
        """End what runs and let go of the spare."""
        attempt = self._current
        if attempt is not None and attempt.running is not None and not attempt.running.record.done():
            attempt.running.stop(HostLost("the agent was shut down"), 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(attempt.running.record), 5.0)
        if self._spare is not None:
            with contextlib.suppress(FirepoolError):
                (await self._spare).discard()
        for known in self._known.values():
            known.log.close()

    def _get(self, attempt_id: str) -> Attempt:
        attempt = self._known.get(attempt_id)
        if attempt is None:
            raise NotFound(f"this agent knows no attempt {attempt_id!r}")
        return attempt


async def _already(cell: Cell) -> Cell:
    return cell


def check_deadline(deadline_s: float) -> None:
    """Refuse a call that comes too late. Raises: Conflict."""
    late = time.clock_gettime(time.CLOCK_BOOTTIME) - deadline_s
    if late > 0:
        raise Conflict(f"the call's deadline passed {late:.3f} s ago", late_s=round(late, 3))
