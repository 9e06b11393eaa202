"""How an attempt ended, in words: pure functions from what was seen (wait status, delivered items, our own stop) to exit code,
signal and error of the exit record.

What an attempt says of itself is not trusted with whose fault it is: it can only ever name errors that are its own.
"""

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

from firepool_wire import errors
from firepool_wire.errors import OOM, FirepoolError, HostLost, NonZeroExit, Signaled, UserError
from firepool_wire.frames import ItemStatus

#: Errors that a process may report of itself.
_OWN = {"UserError", "NonZeroExit", "Signaled", "OOM", "GpuOOM", "ResultTooLarge", "ResultUnpicklable"}
#: Longest error message body that is read back out of an item.
_MAX_ERROR_BYTES = 1 << 20
#: Index, status, last-part flag (`frames.pack_item`).
_ITEM_HEAD_BYTES = 6


class Delivered:
    """What a function job has sent so far: enough to tell whether it is complete, and what error it names."""

    def __init__(self, kind: str | None, expected: int) -> None:
        #: `call`, `map`, `generator`, or None for commands.
        self.kind = kind
        self._expected = expected
        self._finished = 0
        self._error_text = bytearray()
        #: The error of a call or generator that named one.
        self.error: FirepoolError | None = None
        #: Everything that the job owes has come.
        self.complete = kind is None

    def feed(self, payload: bytes) -> None:
        """Note one RESULT payload. Raises: ValueError: not such a payload."""
        if len(payload) < _ITEM_HEAD_BYTES:
            raise ValueError("a result without its head")
        status, last = payload[4], payload[5]
        if status == ItemStatus.ERROR and self.kind != "map":
            if len(self._error_text) < _MAX_ERROR_BYTES:
                self._error_text += payload[_ITEM_HEAD_BYTES:]
            if last:
                self.error = own_error(bytes(self._error_text))
        if not last:
            return
        self._finished += 1
        match self.kind:
            case "map":
                self.complete = self._finished >= self._expected
            case "generator":
                self.complete = status != ItemStatus.VALUE
            case _:
                self.complete = True


def own_error(payload: bytes) -> FirepoolError:
    """The error in an ERROR item, as far as the process may speak for itself."""
    text, _, _ = payload[:_MAX_ERROR_BYTES].partition(b"\0")
    try:
        body: dict[str, Any] = json.loads(text)
        if body.get("code") in _OWN:
            return errors.from_json(body)
    except (ValueError, AttributeError, TypeError):
        return UserError("the function failed and its error cannot be read")
    return UserError(str(body.get("message", ""))[:1000])


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts about an end."""

    #: Raw wait status of the attempt's process; None: its guard was killed and nobody knows.
    status: int | None
    delivered: Delivered
    #: Why we stopped it, and with which signal at last; None: it ended by itself.
    stopped: FirepoolError | None = None
    stop_signal: int = signal.SIGTERM
    #: Everything had been delivered when it was stopped.
    delivered_first: bool = False
    #: The kernel killed something of it for memory.
    oom_killed: bool = False
    #: Its first instruction was told.
    started: bool = True
    #: If its guard was killed, it may have done that itself (no uid and no namespace of its own).
    reaches_guard: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the exit record says."""

    #: None: nothing of the user's ever ran, or nobody can say how it ended.
    exit_code: int | None
    signal: int | None
    error: FirepoolError | None


def judge(seen: Seen) -> Verdict:
    """The verdict on an attempt whose process has ended."""
    code, number = _coded(seen.status)
    done = seen.delivered.complete and seen.delivered.kind is not None
    done = done and (seen.stopped is None or seen.delivered_first)
    if done and seen.delivered.error is None:
        # What happens to a process behind its last result (teardown of torch, an exit hook) takes nothing back.
        return Verdict(0, None, None)
    if seen.status is None and seen.stopped is None and not (seen.started and seen.reaches_guard):
        return Verdict(None, None, HostLost("the attempt's guard was killed from outside, and the attempt with it"))
    if seen.stopped is not None:
        number = number or seen.stop_signal
        return Verdict(128 + number, number, seen.stopped)
    if seen.delivered.error is not None:
        return Verdict(code or _told_code(seen.delivered.error), number, seen.delivered.error)
    if seen.oom_killed and code:
        return Verdict(code, number, OOM("the attempt used more memory than its pod allows; the kernel killed it"))
    if number is not None:
        return Verdict(code, number, Signaled(_signal_text(seen.status, number), signal=number))
    if code:
        return Verdict(code, None, NonZeroExit(f"the process exited with {code}", exit_code=code))
    if not seen.delivered.complete:
        return Verdict(0, None, NonZeroExit("the process exited before it delivered its result", exit_code=0))
    return Verdict(0, None, None)


def _told_code(error: FirepoolError) -> int:
    return 0 if isinstance(error, NonZeroExit) and error.details.get("exit_code") == 0 else 1


def _coded(status: int | None) -> tuple[int, int | None]:
    """Exit code and signal of a wait status; a signal reads 128 + number, as in a shell."""
    if status is None:
        return 128 + signal.SIGKILL, signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (128 - code, -code)


def _signal_text(status: int | None, number: int) -> str:
    if status is None:
        return "the attempt's guard was killed, and the attempt with it"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"the process was ended by {name}"
