"""How much the API takes at once: sizes of bodies, jobs in flight, lengths of waits. Reading a body under its limit.

Limits are enforced while reading, so a body without a length (chunked) cannot fill the memory either. What a refused
upload still sends is read and dropped by the server, so its client gets the answer and may go on with the connection.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request

from firepool_wire.errors import BadRequest, PayloadTooLarge, TooManyRequests

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Knobs of the API. Byte limits: raise to take larger requests, lower to bound the memory of a hostile client."""

    job_bytes: int = MIB
    batch_bytes: int = 16 * MIB
    blob_bytes: int = 512 * MIB
    #: Bodies of every other call (pools, tokens, digests, renewals).
    small_bytes: int = 4 * MIB
    #: Jobs of one batch. Raise: fewer requests, longer pauses of the event loop (about 0.1 ms a job).
    batch_jobs: int = 4096
    #: Jobs whose durable answer is outstanding; more are told to come back. Raise: longer tails under overload.
    inflight_jobs: int = 20_000
    #: What an overloaded broker tells them, in seconds.
    retry_after_s: float = 1.0
    #: Event streams say something at least this often. Raise: dead connections are found later.
    heartbeat_s: float = 10.0
    #: Longest wait of one long poll.
    wait_s: float = 60.0
    #: A verified token is believed this long without asking again (never past its expiry). Raise: a token that was
    #: revoked by another process lives longer; revocations through this API count at once.
    token_cache_s: float = 30.0
    #: Rows that one answer about usage or a run reads at most; an answer says when there were more.
    scan_rows: int = 50_000


def too_large(limit: int, what: str) -> PayloadTooLarge:
    """The refusal of a body over `limit` bytes."""
    return PayloadTooLarge(f"{what} is larger than {limit} bytes, the most this broker takes", limit_bytes=limit)


async def read_body(request: Request, limit: int, what: str = "The request's body") -> bytes:
    """The whole body, at most `limit` bytes.

    Raises:
        PayloadTooLarge: it is longer; nothing more of it was kept.
    """
    declared = request.headers.get("content-length")
    if declared is not None and _length(declared) > limit:
        raise too_large(limit, what)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large(limit, what)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def stream_body(request: Request, limit: int, what: str) -> AsyncIterator[bytes]:
    """The body in pieces, as they arrive; the store that reads it counts against `limit` too.

    Raises:
        PayloadTooLarge: as soon as that is known.
    """
    declared = request.headers.get("content-length")
    if declared is not None and _length(declared) > limit:
        raise too_large(limit, what)
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large(limit, what)
        if part:
            yield part


def _length(declared: str) -> int:
    try:
        return int(declared)
    except ValueError:
        raise BadRequest("Content-Length is not a number", field="Content-Length") from None


class Admission:
    """Counts the jobs whose durable answer is outstanding, and turns away what would go over the bound."""

    def __init__(self, most: int, retry_after_s: float) -> None:
        self._most = most
        self._retry_after_s = retry_after_s
        #: Jobs in flight now.
        self.jobs = 0

    @contextmanager
    def room_for(self, jobs: int) -> Iterator[None]:
        """Hold room for `jobs` submissions.

        Raises:
            TooManyRequests: the broker is overloaded; nothing was taken.
        """
        if self.jobs + jobs > self._most and self.jobs > 0:
            raise TooManyRequests(
                f"{self.jobs} submissions are still being made durable, the most is {self._most}; come back later",
                retry_after_s=self._retry_after_s,
                limit=self._most,
            )
        self.jobs += jobs
        try:
            yield
        finally:
            self.jobs -= jobs
