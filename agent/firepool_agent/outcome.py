"""How one call of a user's function ended, as bytes of a result item: value, or error with its remote traceback.

Job side: standard library only. Nothing in here may raise on account of a user's object; every object of his is a stranger
whose `__str__`, `__reduce__` or `__class__` may itself fail.
"""

import contextlib
import json
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from firepool_wire import codec
from firepool_wire.errors import (
    OOM,
    FirepoolError,
    GpuOOM,
    NonZeroExit,
    ResultTooLarge,
    ResultUnpicklable,
    UserError,
)
from firepool_wire.frames import ItemStatus

#: Longest traceback and message kept.
MAX_TEXT = 64 * 1024


def pickler(protocol: int) -> Callable[[object], bytes]:
    """cloudpickle's `dumps` where the interpreter has it, else pickle's, at most in the client's format."""
    cloudpickle = sys.modules.get("cloudpickle")
    dumps: Callable[..., bytes] = pickle.dumps if cloudpickle is None else cloudpickle.dumps
    chosen = min(protocol, pickle.HIGHEST_PROTOCOL)
    return lambda value: dumps(value, protocol=chosen)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished item, and the exit code of a process that ran nothing else."""

    status: ItemStatus
    payload: bytes
    exit_code: int = 0


class Packer:
    """Turns values and exceptions into outcomes under the rules of the job's pool."""

    def __init__(self, *, untrusted: bool, protocol: int, limit_bytes: int) -> None:
        self._dumps = None if untrusted else pickler(protocol)
        self._limit = limit_bytes

    def value(self, value: object) -> Outcome:
        """A result; one that cannot cross becomes an error."""
        try:
            frame = codec.encode(value, self._dumps)
        except codec.NotSafe as why:
            return self._refused(
                ResultUnpicklable(
                    f"the result cannot leave an untrusted pool: {why}. Return plain types, or use a trusted pool.",
                    type=type_name(value),
                )
            )
        except MemoryError:
            return self._refused(OOM("out of memory while the result was packed"))
        except BaseException as why:  # noqa: BLE001 - `__reduce__` and friends are user code
            return self._refused(
                ResultUnpicklable(f"the result cannot be pickled: {safe_str(why)}", type=type_name(value))
            )
        if len(frame) > self._limit:
            return self._refused(
                ResultTooLarge(
                    f"the result has {len(frame)} bytes; the limit is {self._limit}. Write it to an output file.",
                    limit_bytes=self._limit,
                    result_bytes=len(frame),
                )
            )
        return Outcome(ItemStatus.VALUE, frame)

    def _refused(self, error: FirepoolError) -> Outcome:
        say(f"firepool: {error.message}\n")
        return Outcome(ItemStatus.ERROR, _json(error), 1)

    def raised(self, error: BaseException) -> Outcome:
        """What the function raised."""
        if isinstance(error, SystemExit):
            return self._exit(error)
        text = remote_traceback(error)
        say(text)
        known = self._known(error, text)
        if self._dumps is None or not isinstance(known, UserError):
            return Outcome(ItemStatus.ERROR, _json(known), 1)
        return Outcome(ItemStatus.ERROR, _json(known) + self._pickled(error), 1)

    def _known(self, error: BaseException, text: str) -> FirepoolError:
        message = f"{type_name(error)}: {safe_str(error)}"
        if isinstance(error, MemoryError):
            return OOM("the function ran out of memory (MemoryError)", traceback=text)
        if type_name(error) in ("torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError"):
            return GpuOOM(message, traceback=text)
        return UserError(message, type=type_name(error), traceback=text)

    def _exit(self, error: SystemExit) -> Outcome:
        """`sys.exit` means what it means to a process; a call that ends so has returned no value."""
        code = error.code
        if code is None:
            code = 0
        elif not isinstance(code, int):
            say(safe_str(code) + "\n")
            code = 1
        code &= 0xFF
        told = NonZeroExit(f"the function called sys.exit({code}) and returned no value", exit_code=code)
        return Outcome(ItemStatus.ERROR, _json(told), code)

    def _pickled(self, error: BaseException) -> bytes:
        """The exception itself, behind a NUL byte, if it survives the way there and back."""
        assert self._dumps is not None
        try:
            error.__traceback__ = None
            data = self._dumps(error)
            if not isinstance(pickle.loads(data), BaseException) or len(data) > self._limit:
                return b""
        except BaseException:  # noqa: BLE001 - many exceptions do not; their type, text and traceback have been kept
            return b""
        return b"\0" + data


def say(text: str) -> None:
    """Add a line to the job's own standard error, as an interpreter does that ends with a traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the program may have closed or replaced it
        sys.stderr.write(text)
        sys.stderr.flush()


def flush() -> None:
    """Push out what the program printed, if its streams are still there."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError) as why:
        del why  # closed, replaced or broken by the program itself: what it did not flush is its own loss


def type_name(value: object) -> str:
    """`module.qualname` of a value's type, without the module for built-ins."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def safe_str(value: object) -> str:
    """`str(value)`, whatever happens in it."""
    try:
        return str(value)[:MAX_TEXT]
    except BaseException as why:  # noqa: BLE001 - a user's `__str__`
        return f"<unprintable {type(value).__qualname__}: {type(why).__qualname__}>"


def remote_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, from the user's first frame on."""
    try:
        lines = traceback.format_exception(type(error), error, _users_frames(error.__traceback__))
        return "".join(lines)[-MAX_TEXT:]
    except BaseException:  # noqa: BLE001 - formatting calls into user code
        return f"{type_name(error)}: {safe_str(error)}\n"


def _users_frames(tb: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of the runner itself."""
    first = tb
    while tb is not None and tb.tb_frame.f_globals.get("__package__") == "firepool_agent":
        tb = tb.tb_next
    return tb or first


def _json(error: FirepoolError) -> bytes:
    body: dict[str, Any] = error.to_json()
    return json.dumps(body).encode()
