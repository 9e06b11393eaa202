"""Content-addressed bytes of a caller: packages, function payloads, large arguments and results.

Names are scoped per caller, so nobody learns from a digest what others have stored. Bytes are streamed both ways; the store
verifies the digest and keeps nothing of an upload that fails.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import Role, no_such
from firepool_broker.api.limits import read_body, stream_body
from firepool_broker.api.lobby import lobby, who
from firepool_broker.api.routes import bytes_of, declared, json_of, router
from firepool_broker.api.rules import DIGEST, Problem, bad_values
from firepool_broker.api.schemas import DigestList
from firepool_broker.api.specs import parse_as
from firepool_wire.errors import NotFound, PackageError, PayloadTooLarge

Digest = Annotated[str, Path(pattern=DIGEST, description="sha256:<hex> of the stored bytes")]

_is_digest = re.compile(DIGEST.removesuffix("$") + r"\Z").match

#: Digests looked up between two turns of the event loop.
_STEP = 64

_DIGESTS: TypeAdapter[DigestList] = TypeAdapter(DigestList)
_DIGEST = json_of("DigestBody")
_UPLOAD = (PackageError, PayloadTooLarge)

api = router()


@api.put("/v1/blobs/{digest}", **declared(Role.SUBMITTER, *_UPLOAD, ok={201: _DIGEST}, body=bytes_of()))
async def put(request: Request, digest: Digest) -> Response:
    """Store bytes under their digest; bytes with another digest are refused. Storing them again changes nothing."""
    return await _store(request, digest)


@api.post("/v1/blobs", **declared(Role.SUBMITTER, *_UPLOAD, ok={201: _DIGEST}, body=bytes_of()))
async def post(request: Request) -> Response:
    """Store bytes; the answer names their digest."""
    return await _store(request, None)


async def _store(request: Request, expect: str | None) -> Response:
    desk = lobby(request)
    limit = desk.settings.blob_bytes
    pieces = stream_body(request, limit, "The blob")
    digest = await desk.runner.blobs.put(who(request).caller, pieces, expect, limit)
    return answer({"digest": digest}, 201, {"Location": f"/v1/blobs/{digest}"})


@api.head("/v1/blobs/{digest}", **declared(Role.VIEWER, NotFound, ok={200: None}))
async def head(request: Request, digest: Digest) -> Response:
    """Whether the caller has stored the blob, and its length."""
    size = await _size(request, digest)
    return Response(status_code=200, headers={"Content-Length": str(size)}, media_type="application/octet-stream")


@api.get("/v1/blobs/{digest}", **declared(Role.VIEWER, NotFound, ok={200: bytes_of()}))
async def get(request: Request, digest: Digest) -> Response:
    """The blob's bytes."""
    size = await _size(request, digest)
    blobs, caller = lobby(request).runner.blobs, who(request).caller

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in blobs.stream(caller, digest):
            yield piece

    return StreamingResponse(pieces(), 200, {"Content-Length": str(size)}, "application/octet-stream")


async def _size(request: Request, digest: str) -> int:
    blobs, caller = lobby(request).runner.blobs, who(request).caller
    if not await blobs.has(caller, digest):
        raise no_such("blob", digest)
    return await blobs.size(caller, digest)


@api.post(
    "/v1/blobs:missing",
    **declared(Role.SUBMITTER, PayloadTooLarge, ok={200: json_of("MissingList")}, body=json_of("DigestList")),
)
async def missing(request: Request) -> Response:
    """Those of the digests that the caller has not stored, each once, in the order asked."""
    desk, caller = lobby(request), who(request).caller
    asked = parse_as(_DIGESTS, DigestList, await read_body(request, desk.settings.small_bytes))
    wrong = [n for n, digest in enumerate(asked.digests) if not _is_digest(digest)]
    if wrong:
        raise bad_values([Problem(f"digests[{n}]", "is no sha256:<hex>") for n in wrong])
    absent = []
    for n, digest in enumerate(dict.fromkeys(asked.digests)):
        if n and n % _STEP == 0:
            await asyncio.sleep(0)
        if not await desk.runner.blobs.has(caller, digest):
            absent.append(digest)
    return answer({"missing": absent})
