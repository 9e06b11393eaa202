"""Whether the blobs that a job names are there: asked when it is submitted, for a job that waits an hour should not fail then.

Asking the store also renews a blob's age, so that retention does not take it from under a job that waits.
"""

import time

from firepool_broker.shell.ports import BlobStore
from firepool_wire.errors import BadRequest
from firepool_wire.jobspec import JobSpec

#: A blob that was seen is not looked for again for this long (retention keeps blobs for far longer). Raise: fewer looks.
SEEN_S = 60.0
#: Blobs remembered at most.
_REMEMBERED = 20_000


class References:
    """Looks for the blobs of jobs, with a short memory: thousands of jobs share one function."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        #: (caller, digest) → `time.monotonic()` until which it is believed to be there.
        self._seen: dict[tuple[str, str], float] = {}

    async def check(self, caller: str, spec: JobSpec) -> None:
        """Raises: BadRequest: the caller has not stored them; `details["missing"]` are the digests."""
        missing: list[tuple[str, str]] = []
        for field, digest in _named(spec):
            if self._seen.get((caller, digest), 0.0) > time.monotonic():
                continue
            if not await self._blobs.has(caller, digest):
                missing.append((field, digest))
                continue
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen[caller, digest] = time.monotonic() + SEEN_S
        if missing:
            words = ", ".join(f"{field} ({digest})" for field, digest in missing)
            raise BadRequest(
                f"not stored yet: {words}; PUT /v1/blobs/<digest> first",
                field=missing[0][0],
                missing=[digest for _, digest in missing],
            )


def _named(spec: JobSpec) -> list[tuple[str, str]]:
    function = spec.entrypoint.function
    named = [("package", spec.package)]
    if function is not None:
        named += [("entrypoint.function.payload", function.payload)]
        named += [("entrypoint.function.args_blob", function.args_blob)]
    return [(field, digest) for field, digest in named if digest is not None]
