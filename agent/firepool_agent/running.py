"""One launched attempt, from the order to the exit record: output, results, time limits, memory, its end.

It owns the cell's descriptors and writes the event log. Which attempts there are, and what is asked of them when, is
`attempts`' business; what an end means is `verdict`'s.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from firepool_agent import isolate, outputs, procfs, stacks
from firepool_agent.cells import Cell
from firepool_agent.eventlog import EventLog, exit_frame
from firepool_agent.logs import STDERR, STDOUT, LogCap, Pipe
from firepool_agent.usage import Meter
from firepool_agent.verdict import Delivered, Seen, judge
from firepool_wire import frames
from firepool_wire.agentapi import ExitRecord, Launch
from firepool_wire.errors import OOM, FirepoolError, Internal, ResultTooLarge, RunTimeout, StartTimeout
from firepool_wire.frames import Frame, Kind

#: Room for item heads on top of the results themselves.
_RESULT_SLACK_BYTES = 1 << 20
#: How long an attempt that has delivered everything may take to end before it is ended.
_LINGER_S = 2.0
#: How long the end of a killed attempt may take to be told before its guard is killed as well.
_GUARD_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is launched: the message, with everything that was prepared for it."""

    attempt: str
    launch: Launch
    dropped_env: list[str]
    #: Where kept output files go, and the job's work dir as this process sees it.
    keep_dir: Path
    #: CLOCK_MONOTONIC when the launch was asked for: `start_timeout_s` counts from there.
    asked_at_s: float
    #: The attempt has a PID namespace of its own: killing it is killing everything, and it cannot kill its guard.
    nested: bool
    #: It cannot signal its guard (own namespace or own user).
    guarded: bool


class Running:
    """The attempt while its process lives."""

    def __init__(self, cell: Cell, work: Work, log: EventLog, meter: Meter) -> None:
        self.cell = cell
        self._work = work
        self._log = log
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        entry = work.launch.function
        self._delivered = Delivered(
            None if entry is None else entry.get("kind", "call"), 1 if entry is None else int(entry.get("items", 1))
        )
        self._parser = frames.Parser()
        self._result_bytes = 0
        self._cap = LogCap(work.launch.max_log_bytes, log.append)
        self._pipes = (Pipe(cell.out, STDOUT, self._cap), Pipe(cell.err, STDERR, self._cap))
        self._launched_at_s: float | None = None
        self._first_at_s: float | None = None
        self._stopped: FirepoolError | None = None
        self._delivered_first = False
        self._stop_signal = signal.SIGTERM
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[isolate.End | None] = self._loop.create_future()
        #: Done with the exit record once it is in the log.
        self.record: asyncio.Future[ExitRecord] = self._loop.create_future()
        os.set_blocking(cell.status, False)
        self._loop.add_reader(cell.status, self._status_readable)
        # By number: for an object that it does not know yet, the selector formats a whole `repr` first.
        self._loop.add_reader(cell.job.fileno(), self._job_readable)

    # -- start ------------------------------------------------------------------------------------------------------

    async def release(self, order: bytes, blobs: list[int]) -> float:
        """Hand the process its order. Returns when (CLOCK_MONOTONIC). One that is not there any more is told by its end."""
        self._launched_at_s = time.monotonic()
        self._spawn(self._follow())
        self._meter.start(self._over_memory)
        if (limit := self._work.launch.start_timeout_s) is not None:
            self._later(limit - (self._launched_at_s - self._work.asked_at_s), lambda: self._start_timeout(limit))
        try:
            sent = socket.send_fds(self.cell.job, [order], blobs) if blobs else self.cell.job.send(order)
            if sent < len(order):
                await self._loop.sock_sendall(self.cell.job, memoryview(order)[sent:])
        except OSError:
            self.cell.kill()
        return self._launched_at_s

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(max(0.0, delay_s), action))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what it says -----------------------------------------------------------------------------------------------

    def _job_readable(self) -> bool:
        """Take one piece of the job socket. Returns whether there may be more."""
        try:
            data = self.cell.job.recv(256 * 1024)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self.cell.job.fileno())
            return False
        try:
            for frame in self._parser.feed(data):
                self._frame(frame)
        except ValueError:
            # The process wrote something else into the socket: its results cannot be told apart any more.
            self._loop.remove_reader(self.cell.job.fileno())
            return False
        return True

    def _frame(self, frame: Frame) -> None:
        if frame.kind is Kind.STARTED:
            self._started(frame)
        elif frame.kind is Kind.RESULT:
            self._result(frame.payload)

    def _started(self, frame: Frame) -> None:
        if self._first_at_s is not None:
            return
        now = time.monotonic()
        told = frame.json().get("at_s")
        assert self._launched_at_s is not None
        plausible = isinstance(told, float) and self._launched_at_s <= told <= now
        self._first_at_s = told if plausible else now
        self._log.append(frames.pack(Kind.STARTED, json.dumps({"at_s": self._first_at_s}).encode()))
        for timer in self._timers:
            timer.cancel()
        if (limit := self._work.launch.run_timeout_s) is not None:
            self._later(limit, lambda: self._spawn(self._run_timeout(limit)))

    def _result(self, payload: bytes) -> None:
        self._result_bytes += len(payload)
        limit = self._work.launch.max_result_bytes
        if self._result_bytes > limit + _RESULT_SLACK_BYTES:
            error = ResultTooLarge(f"the results together are over {limit} bytes", limit_bytes=limit)
            self.stop(error, 0.0)
            return
        self._delivered.feed(payload)
        self._log.append(frames.pack(Kind.RESULT, payload))
        if self._delivered.complete:
            self._later(_LINGER_S, self._kill)

    # -- limits -----------------------------------------------------------------------------------------------------

    def _start_timeout(self, limit_s: float) -> None:
        self.stop(StartTimeout(f"no first instruction within {limit_s:g} s of the launch", limit_s=limit_s), 0.0)

    async def _run_timeout(self, limit_s: float) -> None:
        error = RunTimeout(f"the attempt ran longer than {limit_s:g} s", limit_s=limit_s)
        if self._decide(error):
            # Asking may wake the program (a signal ends a `pause`); what it does from here on changes nothing any more.
            if text := await self.stacks():
                error.details["stacks"] = text
            self._end(self._work.launch.grace_s)

    def _over_memory(self, used: int, limit: int) -> None:
        message = f"the attempt used {used >> 20} MiB of the {limit >> 20} MiB that its pod allows"
        self.stop(OOM(message, used_bytes=used, limit_bytes=limit), 0.0)

    def usage(self) -> tuple[int, float]:
        """Memory in bytes and CPU seconds of the attempt so far."""
        return self._meter.now()

    async def stacks(self) -> str:
        """Stacks of all threads (functions), or the process tree (commands)."""
        if self.record.done() or self._ended.done():
            return ""
        return await stacks.collect(self.cell, python=self._work.launch.function is not None)

    def stop(self, error: FirepoolError, grace_s: float) -> None:
        """End the attempt: SIGTERM, after `grace_s` SIGKILL. The first reason is the one that counts."""
        if self._decide(error):
            self._end(grace_s)

    def _decide(self, error: FirepoolError) -> bool:
        """Make this the reason of the end, unless there is one already."""
        if self._stopped is not None or self._ended.done():
            return False
        self._stopped = error
        self._delivered_first = self._delivered.complete
        return True

    def _end(self, grace_s: float) -> None:
        if grace_s <= 0:
            self._kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.cell.pid, signal.SIGTERM)
        self._later(grace_s, self._kill)

    def _kill(self) -> None:
        """SIGKILL the process: its guard tells the end and takes the rest along (where it cannot, we do: the reset proves it)."""
        if self._ended.done():
            return
        self._stop_signal = signal.SIGKILL
        below = [] if self._work.nested else procfs.descendants(self.cell.guard, procfs.processes())
        for pid in (self.cell.pid, *(process.pid for process in below)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._later(_GUARD_PATIENCE_S, lambda: None if self._ended.done() else self.cell.kill())

    # -- end --------------------------------------------------------------------------------------------------------

    def _status_readable(self) -> None:
        """The guard's one message, or its silence."""
        data = os.read(self.cell.status, 65536)
        self._loop.remove_reader(self.cell.status)
        self._ended.set_result(isolate.read_end(data))

    async def _all_gone(self) -> None:
        """Wait until the guard is dead, and with it, where it has a namespace, everything below it."""
        try:
            guard = os.pidfd_open(self.cell.guard)
        except ProcessLookupError:
            return
        gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(guard, lambda: None if gone.done() else gone.set_result(None))
        try:
            await asyncio.wait_for(gone, _GUARD_PATIENCE_S)
        except TimeoutError:
            self.cell.kill()  # what still does not go is for the reset to find
        finally:
            self._loop.remove_reader(guard)
            os.close(guard)

    async def _follow(self) -> None:
        end = await self._ended
        try:
            record = await self._close(end)
        except Exception as bug:  # noqa: BLE001 - an attempt that has ended must be told so, whatever happens here
            told = Internal(f"the agent could not close attempt {self._work.attempt}: {type(bug).__name__}: {bug}")
            record = ExitRecord(attempt=self._work.attempt, error=told.to_json(), launched_at_s=self._launched_at_s)
        self.cell.close()
        self._log.end(exit_frame(record))
        self.record.set_result(record)

    async def _close(self, end: isolate.End | None) -> ExitRecord:
        """Take in what is still under way, then say how it ended."""
        ended_at_s = time.monotonic()
        for timer in self._timers:
            timer.cancel()
        used = self._meter.stop()
        if self._stopped is not None or end is None or end.leftovers:
            await self._all_gone()
        while self._job_readable():
            pass
        self._loop.remove_reader(self.cell.job.fileno())
        for pipe in self._pipes:
            pipe.drain()
        self._cap.finish()
        status = None if end is None else end.status
        verdict = judge(
            Seen(
                status,
                self._delivered,
                self._stopped,
                self._stop_signal,
                delivered_first=self._delivered_first,
                oom_killed=used.oom_killed,
                started=self._first_at_s is not None,
                reaches_guard=not self._work.guarded and not self.cell.orphaned(),
            )
        )
        kept = await outputs.keep(self.cell.slot, self._work.launch, self._work.keep_dir)
        return ExitRecord(
            attempt=self._work.attempt,
            exit_code=verdict.exit_code,
            signal=verdict.signal,
            error=None if verdict.error is None else verdict.error.to_json(),
            launched_at_s=self._launched_at_s,
            first_instruction_at_s=self._first_at_s,
            ended_at_s=ended_at_s,
            peak_rss_bytes=used.peak_bytes(end),
            cpu_s=used.cpu_s(end),
            peak_device_bytes=used.device_bytes,
            dropped_env=self._work.dropped_env,
            outputs=kept.files,
            discarded_bytes=kept.discarded_bytes,
            log_bytes=self._cap.kept,
            log_dropped_bytes=self._cap.dropped,
            result_bytes=self._result_bytes,
            leftovers=0 if end is None else end.leftovers,
        )
