"""What the SDK raises beyond the error table: a remote exception as itself, time-outs of waiting, a missing extra.

How an exception came back: the job's runner sends `UserError` as JSON, and behind it the pickled exception where the
job is trusted. Nothing is unpickled here for an untrusted job; its exception types are recognised only among the builtins.
"""

import builtins
import json
from collections.abc import Callable
from typing import Any

from firepool_wire.errors import FirepoolError, UserError, from_json
from firepool_wire.words import Fault


class GetTimeoutError(FirepoolError, TimeoutError):
    """The wait ended before the job did; the job goes on."""

    fault, retryable, status = Fault.LIMIT, True, 504


class MissingExtra(FirepoolError, ImportError):
    """A part of Firepool that is not installed here was needed; the message says what to install."""

    fault, retryable, status = Fault.USER, False, 501


class SessionClosed(FirepoolError, RuntimeError):
    """The session ended (`shutdown`, fork, end of the program) before the job did."""

    fault, retryable, status = Fault.USER, False, 410


class BlockingInEventLoopWarning(RuntimeWarning):
    """A blocking call runs in the thread of an event loop; everything else in that loop stands still meanwhile."""


class RemoteTraceback(Exception):
    """The traceback of the job's process, as text; the cause of what the caller catches."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TaskError(UserError):
    """The user's function raised.

    What is raised is an instance of this class *and* of the exception's own class, so both `except TaskError` and
    `except ValueError` catch it.

    Attributes:
        cause: the user's exception, where it could be brought back.
        remote_traceback: the traceback of the job's process.
    """

    #: Names of the class of the user's exception, as the job said.
    type_name: str = "Exception"
    cause: BaseException | None = None

    @property
    def code(self) -> str:
        """The name in the error table."""
        return "UserError"

    @property
    def remote_traceback(self) -> str:
        """The traceback of the job's process."""
        return str(self.details.get("traceback", ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return (task_error, (self.to_json(), self.cause))

    def __getattr__(self, name: str) -> Any:
        # Attributes that the user gave his exception are readable on what he catches.
        if name.startswith("__") or self.__dict__.get("cause") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.cause, name)


#: What cloudpickle calls the file of code that travels by value.
_DYNAMIC = '"<dynamic-code>"'
#: Exceptions that steer control flow: raised by a stranger's wish in the caller they would do harm.
_NEVER: tuple[type[BaseException], ...] = (StopIteration, StopAsyncIteration, GeneratorExit)
#: (user's class) → class that is both.
_dual: dict[type[BaseException], type[TaskError]] = {}


def error_of(
    payload: bytes, loads: Callable[[bytes], object] | None, job_id: str | None, file: str | None = None
) -> FirepoolError:
    """The exception of an item that failed, from its frame: JSON, and behind a NUL the pickled exception."""
    text, nul, pickled = payload.partition(b"\0")
    body: dict[str, Any] = json.loads(text)
    if job_id is not None:
        body.setdefault("job_id", job_id)
    if body.get("code") != "UserError":
        return from_json(body)
    cause = _unpickle(pickled, loads) if nul and loads is not None else None
    return task_error(with_source(body, file), cause)


def job_error(body: dict[str, Any], job_id: str | None, file: str | None = None) -> FirepoolError:
    """The exception of a job that failed as a whole, from its row's `error`."""
    body = {**body, "job_id": body.get("job_id", job_id)}
    return task_error(with_source(body, file), None) if body.get("code") == "UserError" else from_json(body)


def _unpickle(pickled: bytes, loads: Callable[[bytes], object]) -> BaseException | None:
    try:
        found = loads(pickled)
    except Exception:  # noqa: BLE001 - whatever his class does when unpickled, the text of his error is not lost
        return None
    return found if isinstance(found, Exception) and not isinstance(found, _NEVER) else None


def with_source(body: dict[str, Any], file: str | None) -> dict[str, Any]:
    """A `UserError` whose traceback names the user's file and shows its lines.

    Code that travelled by value has no file in the job (`<dynamic-code>`); here it has.
    """
    details = body.get("details") or {}
    text = details.get("traceback")
    if file is None or not isinstance(text, str) or _DYNAMIC not in text:
        return body
    import linecache

    lines = []
    for line in text.splitlines():
        head, found, tail = line.partition(_DYNAMIC)
        lines.append(head + f'"{file}"' + tail if found else line)
        number = tail.removeprefix(", line ").partition(",")[0]
        if found and number.isdigit() and (source := linecache.getline(file, int(number)).strip()):
            lines.append(f"    {source}")
    return {**body, "details": {**details, "traceback": "\n".join(lines) + "\n"}}


def task_error(body: dict[str, Any], cause: BaseException | None) -> TaskError:
    """`TaskError` from the JSON of a `UserError`, of the user's own class as well where that is possible."""
    details = dict(body.get("details") or {})
    name = str(details.get("exception") or details.get("type") or "")
    kind = type(cause) if cause is not None else _builtin(name)
    cls = _both(kind) if kind is not None else TaskError
    error = cls.__new__(cls)
    message = str(body.get("message", ""))
    if cause is not None and kind is not None:
        _fill(error, kind, cause)
    # Not `__init__`: its `super()` leads to the user's own, which may want anything.
    error.message, error.job_id, error.retry_after_s = message, body.get("job_id"), body.get("retry_after_s")
    error.details = details
    error.args = (cause,) if cause is not None else (message,)
    error.type_name = name or (kind.__name__ if kind else "Exception")
    error.cause = cause
    if error.remote_traceback:
        error.__cause__ = RemoteTraceback(error.remote_traceback)
    return error


def _builtin(name: str) -> type[BaseException] | None:
    kind = getattr(builtins, name.rpartition(".")[2], None) if name.rpartition(".")[0] in ("", "builtins") else None
    fine = (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, _NEVER)
        and kind is not Exception
    )
    return kind if fine else None


def _both(kind: type[BaseException]) -> type[TaskError]:
    if kind not in _dual:
        try:
            names: dict[str, Any] = {"__module__": "firepool_ray", "__str__": _text, "__init__": _no_init}
            _dual[kind] = type(f"TaskError({kind.__name__})", (TaskError, kind), names)
        except TypeError:
            # Its class cannot be inherited from beside ours (layout, `final`): `cause` still holds it.
            _dual[kind] = TaskError
    return _dual[kind]


def _text(self: TaskError) -> str:
    return self.message


def _no_init(self: TaskError, *args: Any, **kwargs: Any) -> None:
    """The user's `__init__` may want anything; the parts are put in place by `task_error`."""


def _fill(error: TaskError, kind: type[BaseException], cause: BaseException) -> None:
    """Give the error what the user's exception carries: the fields of its C base (`errno`, `code`, …) and its attributes."""
    base = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    try:
        base.__init__(error, *cause.args)  # type: ignore[misc]
    except TypeError:
        pass  # the arguments were his own class's; the attributes below hold what there is
    if error.__class__ is not TaskError:
        error.__dict__.update(vars(cause))
