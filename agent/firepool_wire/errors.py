"""The one error table (spec §2): every error that crosses a house's door, with its fault, whether a retry can help,
its HTTP status, and the class that Python callers catch.

SDK, broker and agent raise and rebuild the same classes from `code`; HTTP carries them as `application/problem+json`.
What is *not* here: errors that never leave a house (the core's expected outcomes are values, a broken invariant is
`Internal` at the door).
"""

from typing import Any, ClassVar

from firepool_wire.words import Fault


class FirepoolError(Exception):
    """Base of every error of ours.

    Attributes:
        code: the class's name, stable across versions.
        fault: `user`, `infra` or `limit`.
        retryable: whether the same request can succeed later without a change by the user.
        status: HTTP status of the error where it answers a request.
        message: one or two sentences: what happened, to which job, what to do.
        retry_after_s: seconds after which a retry makes sense, or None.
        job_id: the job it happened to, or None.
        details: JSON-able facts (limit, holder, nearest name, remote traceback, stacks, …).
    """

    fault: ClassVar[Fault] = Fault.INFRA
    retryable: ClassVar[bool] = False
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        job_id: str | None = None,
        retry_after_s: float | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.job_id = job_id
        self.retry_after_s = retry_after_s
        self.details: dict[str, Any] = {k: v for k, v in details.items() if v is not None}

    @property
    def code(self) -> str:
        """The stable name of this error's class in the table."""
        return type(self).__name__

    def to_json(self) -> dict[str, Any]:
        """The error as one JSON object: the body of a problem+json answer and the `error` of a terminal job."""
        body: dict[str, Any] = {
            "code": self.code,
            "fault": self.fault.value,
            "retryable": self.retryable,
            "message": self.message,
        }
        if self.job_id is not None:
            body["job_id"] = self.job_id
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        if self.details:
            body["details"] = self.details
        return body

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_json, (self.to_json(),))


# -- how an attempt ended: the user's doing -----------------------------------------------------------------------


class UserError(FirepoolError):
    """The user's function raised; `details` carry the exception's type and the remote traceback."""

    fault, retryable, status = Fault.USER, False, 422


class NonZeroExit(FirepoolError):
    """The command ended with a non-zero exit code (`details["exit_code"]`)."""

    fault, retryable, status = Fault.USER, False, 422


class Signaled(FirepoolError):
    """A signal that we did not send ended the process (`details["signal"]`)."""

    fault, retryable, status = Fault.USER, False, 422


class OOM(FirepoolError):
    """The attempt used more memory than its pod allows."""

    fault, retryable, status = Fault.USER, False, 422


class GpuOOM(FirepoolError):
    """The attempt ran out of device memory."""

    fault, retryable, status = Fault.USER, False, 422


class RankFailed(FirepoolError):
    """A rank of a gang failed first (`details["rank"]`); all others were stopped."""

    fault, retryable, status = Fault.USER, False, 422


class PackageError(FirepoolError):
    """The code package cannot be used: digest, size, links, escapes, or not a zip archive."""

    fault, retryable, status = Fault.USER, False, 422


class DependencyInstallError(FirepoolError):
    """The requirements could not be installed; `details["log"]` has the installer's last lines."""

    fault, retryable, status = Fault.USER, False, 422


class SerializationMismatch(FirepoolError):
    """Client and job interpreter do not agree on Python minor or pickle format; `details` name both sides."""

    fault, retryable, status = Fault.USER, False, 422


class ResultTooLarge(FirepoolError):
    """The result is larger than the pool allows (`details["limit_bytes"]`)."""

    fault, retryable, status = Fault.USER, False, 422


class ResultUnpicklable(FirepoolError):
    """The result cannot cross back: not picklable, or an untrusted pool refuses pickles."""

    fault, retryable, status = Fault.USER, False, 422


class ImageNotAllowed(FirepoolError):
    """The image is not on the allowlist."""

    fault, retryable, status = Fault.USER, False, 403


class PolicyViolation(FirepoolError):
    """The job broke a policy rule (`details["rule"]`) and was stopped."""

    fault, retryable, status = Fault.USER, False, 403


class Cancelled(FirepoolError):
    """The job was cancelled; its process tree is verified gone."""

    fault, retryable, status = Fault.USER, False, 409


class ClientGone(FirepoolError):
    """No client renewed the job's lease for `client_lease_s`."""

    fault, retryable, status = Fault.USER, False, 410


# -- limits -------------------------------------------------------------------------------------------------------


class QueueTimeout(FirepoolError):
    """The job waited longer than `queue_timeout_s`; `details["blocked_by"]` says on what."""

    fault, retryable, status = Fault.LIMIT, True, 504


class StartTimeout(FirepoolError):
    """The attempt was launched but its first instruction did not come within `start_timeout_s`."""

    fault, retryable, status = Fault.LIMIT, True, 504


class RunTimeout(FirepoolError):
    """The attempt ran longer than `run_timeout_s`; `details["stacks"]` has the stacks of all threads."""

    fault, retryable, status = Fault.LIMIT, False, 504


class SpendCapExceeded(FirepoolError):
    """A spend cap stopped the job."""

    fault, retryable, status = Fault.LIMIT, False, 402


class CapacityUnavailable(FirepoolError):
    """The job can never be served as the pool is configured, or the pool's queue is full; the limit is named."""

    fault, retryable, status = Fault.LIMIT, True, 503


class QuotaExceeded(FirepoolError):
    """The job asks for more than its caller's limit can ever allow."""

    fault, retryable, status = Fault.LIMIT, False, 403


class TooManyRequests(FirepoolError):
    """The broker is overloaded; wait `retry_after_s`."""

    fault, retryable, status = Fault.LIMIT, True, 429


# -- infrastructure -----------------------------------------------------------------------------------------------


class ImagePullError(FirepoolError):
    """The pod's image could not be pulled."""

    fault, retryable, status = Fault.INFRA, True, 502


class RayStartTimeout(FirepoolError):
    """The per-job Ray cluster did not come up in time."""

    fault, retryable, status = Fault.INFRA, True, 504


class HostLost(FirepoolError):
    """The pod or its node was lost while the attempt ran."""

    fault, retryable, status = Fault.INFRA, True, 502


class Preempted(FirepoolError):
    """Capacity on loan was reclaimed by its owner."""

    fault, retryable, status = Fault.INFRA, True, 503


class Evicted(FirepoolError):
    """The node is drained; the attempt was stopped after its notice."""

    fault, retryable, status = Fault.INFRA, True, 503


class IsolationUnavailable(FirepoolError):
    """This machine cannot give the isolation level that the job or pool demands; it is never quietly lowered."""

    fault, retryable, status = Fault.INFRA, False, 501


class BrokerUnavailable(FirepoolError):
    """No broker answered at the address."""

    fault, retryable, status = Fault.INFRA, True, 503


class StoreUnavailable(FirepoolError):
    """The job store or blob store cannot write (disk full, connection lost); nothing was accepted."""

    fault, retryable, status = Fault.INFRA, True, 503


class Internal(FirepoolError):
    """A bug of ours. Please report it with the story that the message carries."""

    fault, retryable, status = Fault.INFRA, True, 500


# -- requests -----------------------------------------------------------------------------------------------------


class UnknownSku(FirepoolError):
    """No pool has that name, or no SKU is large enough; `details["known"]` lists the pools."""

    fault, retryable, status = Fault.USER, False, 404


class UnknownField(FirepoolError):
    """A field is not known; `details` carry its path and the nearest valid name. Nothing was created."""

    fault, retryable, status = Fault.USER, False, 422


class BadRequest(FirepoolError):
    """A value is not valid; `details["field"]` says which."""

    fault, retryable, status = Fault.USER, False, 422


class Unauthenticated(FirepoolError):
    """No token, or one that is unknown, expired or revoked."""

    fault, retryable, status = Fault.USER, False, 401


class Forbidden(FirepoolError):
    """The token is good, but not for this."""

    fault, retryable, status = Fault.USER, False, 403


class NotFound(FirepoolError):
    """No such job, blob, pool or pod for this caller."""

    fault, retryable, status = Fault.USER, False, 404


class Conflict(FirepoolError):
    """The idempotency key was used with another body, or the job is already past what was asked of it."""

    fault, retryable, status = Fault.USER, False, 409


class PayloadTooLarge(FirepoolError):
    """The request's body is larger than allowed (`details["limit_bytes"]`)."""

    fault, retryable, status = Fault.USER, False, 413


def _collect(base: type[FirepoolError]) -> dict[str, type[FirepoolError]]:
    return {c.__name__: c for c in base.__subclasses__()}


#: code → class. The table of the docs is drawn from this.
TABLE: dict[str, type[FirepoolError]] = _collect(FirepoolError)


def from_json(body: dict[str, Any]) -> FirepoolError:
    """Rebuild an error from `to_json`'s object; an unknown code (newer peer) becomes `Internal` and keeps the text."""
    cls = TABLE.get(str(body.get("code")), Internal)
    details = dict(body.get("details") or {})
    if cls is Internal and body.get("code") not in (None, "Internal"):
        details.setdefault("original_code", body["code"])
    return cls(
        str(body.get("message", "")),
        job_id=body.get("job_id"),
        retry_after_s=body.get("retry_after_s"),
        **details,
    )


def is_infra(error: BaseException) -> bool:
    """Whether the error says nothing about the user's program: an RL reward must be masked then, never scored 0.

    A limit that a retry can pass (the queue was full) counts; one that the program itself ran into (`RunTimeout`)
    does not.
    """
    if not isinstance(error, FirepoolError):
        return False
    return error.fault is Fault.INFRA or (error.fault is Fault.LIMIT and error.retryable)
