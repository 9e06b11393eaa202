"""Content-addressed bytes of a caller."""

import hashlib
from collections.abc import AsyncIterator

from tests.api.world import World


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


DATA = b"some bytes" * 30_000
DIGEST = digest_of(DATA)


async def test_bytes_come_back_as_they_were_stored_under_their_digest(api: World) -> None:
    stored = await api.call("PUT", f"/v1/blobs/{DIGEST}", data=DATA)
    assert (stored.status, stored.json()) == (201, {"digest": DIGEST})
    head = await api.call("HEAD", f"/v1/blobs/{DIGEST}")
    assert (head.status, head.headers["content-length"]) == (200, str(len(DATA)))
    assert (await api.call("GET", f"/v1/blobs/{DIGEST}")).body == DATA


async def test_bytes_without_a_name_get_their_digest(api: World) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(DATA), 7000):
            yield DATA[at : at + 7000]

    assert (await api.call("POST", "/v1/blobs", data=pieces())).json() == {"digest": DIGEST}
    assert (await api.call("POST", "/v1/blobs", data=b"")).json() == {"digest": digest_of(b"")}


async def test_bytes_that_are_not_their_digests_are_refused_and_leave_nothing(api: World) -> None:
    reply = await api.call("PUT", f"/v1/blobs/{DIGEST}", data=b"other")
    assert (reply.status, reply.code) == (422, "PackageError")
    assert (await api.call("HEAD", f"/v1/blobs/{DIGEST}")).status == 404


async def test_a_digest_tells_nothing_of_what_others_have_stored(api: World) -> None:
    await api.call("PUT", f"/v1/blobs/{DIGEST}", data=DATA)
    for who in ("bob", "operator"):
        assert (await api.call("HEAD", f"/v1/blobs/{DIGEST}", who)).status == 404
        assert (await api.call("GET", f"/v1/blobs/{DIGEST}", who)).code == "NotFound"
        missing = await api.call("POST", "/v1/blobs:missing", who, json={"digests": [DIGEST]})
        assert missing.json() == {"missing": [DIGEST]}


async def test_a_client_asks_which_of_many_are_missing(api: World) -> None:
    await api.call("POST", "/v1/blobs", data=DATA)
    others = [digest_of(bytes([n])) for n in range(200)]
    reply = await api.call("POST", "/v1/blobs:missing", json={"digests": [*others, DIGEST, *others]})
    assert reply.json() == {"missing": others}


async def test_what_is_no_digest_is_refused(api: World) -> None:
    for path in ("/v1/blobs/abc", "/v1/blobs/sha256:" + "A" * 64, "/v1/blobs/sha256:" + "0" * 63):
        assert (await api.call("PUT", path, data=b"x")).code == "BadRequest"
        assert (await api.call("GET", path)).code == "BadRequest"
    reply = await api.call("POST", "/v1/blobs:missing", json={"digests": ["../../etc/passwd"]})
    assert (reply.status, reply.code) == (422, "BadRequest")
