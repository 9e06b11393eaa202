"""Digests and callers as path segments. Nothing that a caller chose becomes part of a path as it is."""

import hashlib
import re

from firepool_wire.errors import NotFound, PackageError

PREFIX = "sha256:"

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


def digest_of(data: bytes) -> str:
    """The digest of bytes."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def scope(caller: str) -> str:
    """The caller's own name space: equal bytes of two callers are two blobs, so that none can probe for another's."""
    return hashlib.sha256(caller.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def key(caller: str, digest: str) -> str | None:
    """`<scope>/<64 hex>`; None for what is no digest.

    No further folders: file systems of today do not mind a million names in one, and making a folder durable costs more
    than the blob in it.
    """
    match = _DIGEST.fullmatch(digest)
    return None if match is None else f"{scope(caller)}/{match[1]}"


def must_be_digest(digest: str) -> None:
    """Raises: PackageError: the text is no digest."""
    if _DIGEST.fullmatch(digest) is None:
        raise PackageError(f"A digest is sha256:<64 hex digits>, not {digest[:80]!r}.")


def no_such(digest: str) -> NotFound:
    """The error for a blob that the caller does not have; the same whether another has it or nobody."""
    return NotFound(f"There is no blob {digest[:80]} for this caller.", digest=digest[:80])
