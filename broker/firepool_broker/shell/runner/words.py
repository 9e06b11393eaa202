"""Between the two ways of saying that something failed: `FirepoolError` outside the engine, `Failure` inside it."""

from typing import Any

from firepool_broker.core.asks import Exit, Failure
from firepool_wire.agentapi import ExitRecord
from firepool_wire.errors import TABLE, FirepoolError, Internal, from_json


def failure_of(error: FirepoolError) -> Failure:
    """The error as the engine sees it; details become words."""
    details = tuple((key, value if isinstance(value, str) else repr(value)) for key, value in error.details.items())
    if error.retry_after_s is not None:
        details += (("retry_after_s", repr(error.retry_after_s)),)
    return Failure(
        code=error.code, message=error.message, fault=error.fault, retryable=error.retryable, details=details
    )


def error_of(failure: Failure, job: str | None = None) -> FirepoolError:
    """The error that callers see for an engine's failure."""
    details: dict[str, Any] = dict(failure.details)
    after = details.pop("retry_after_s", None)
    cls = TABLE.get(failure.code, Internal)
    return cls(failure.message, job_id=job, retry_after_s=float(after) if after else None, **details)


def internal(error: BaseException, doing: str) -> FirepoolError:
    """A bug of ours, or a surprise of the machine, as an error of the table."""
    if isinstance(error, FirepoolError):
        return error
    return Internal(f"{doing} failed unexpectedly: {type(error).__name__}: {error}")


def exit_of(record: ExitRecord) -> Exit:
    """How an attempt ended, as the engine sees it."""
    failure = failure_of(from_json(record.error)) if record.error else None
    return Exit(exit_code=record.exit_code, signal=record.signal, failure=failure)
