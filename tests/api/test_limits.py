"""Sizes and overload: what is too much is refused while it arrives, and the connection stays good."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from firepool_broker.api.limits import ApiSettings
from tests.api.world import World, spec, world

SMALL = ApiSettings(job_bytes=10_000, batch_bytes=20_000, blob_bytes=50_000, small_bytes=5_000, inflight_jobs=2)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, SMALL) as running:
        yield running


PATHS = [
    ("POST", "/v1/jobs", 10_000),
    ("POST", "/v1/jobs:batch", 20_000),
    ("POST", "/v1/blobs", 50_000),
    ("PUT", "/v1/blobs/sha256:" + "0" * 64, 50_000),
    ("POST", "/v1/blobs:missing", 5_000),
    ("POST", "/v1/clients/c:renew", 5_000),
    ("PUT", "/v1/pools", 5_000),
    ("POST", "/v1/tokens", 5_000),
]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_its_limit_is_refused(small: World, chunked: bool) -> None:
    async def pieces(limit: int) -> AsyncIterator[bytes]:
        for _ in range(limit // 1000 + 2):
            yield b"x" * 1000

    for method, path, limit in PATHS:
        body = pieces(limit) if chunked else b"x" * (limit + 1)
        reply = await small.call(method, path, "operator", data=body)
        assert (reply.status, reply.code) == (413, "PayloadTooLarge"), path
        assert reply.json()["details"]["limit_bytes"] == limit


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_uploads_far_too_much_gets_its_answer_and_keeps_its_connection(
    small: World, chunked: bool
) -> None:
    def talk() -> tuple[int, int]:
        where = urlsplit(small.base)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
        headers = {"Authorization": f"Bearer {small.tokens['ann']}"}

        def pieces() -> Iterator[bytes]:
            for _ in range(200):
                yield b"x" * 100_000

        try:
            if chunked:
                connection.request("POST", "/v1/blobs", pieces(), headers, encode_chunked=True)
            else:
                connection.request("POST", "/v1/blobs", b"x" * 20_000_000, headers)
            refused = connection.getresponse()
            refused.read()
            connection.request("POST", "/v1/jobs", json.dumps(spec()), headers)
            taken = connection.getresponse()
            taken.read()
            return refused.status, taken.status
        finally:
            connection.close()

    assert await asyncio.to_thread(talk) == (413, 201)


async def test_a_client_that_asks_before_it_sends_is_refused_before_it_sends(small: World) -> None:
    where = urlsplit(small.base)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(
            f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {small.tokens['ann']}\r\n"
            "Content-Length: 600000000\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        async with asyncio.timeout(5):
            assert b" 413 " in await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_an_overloaded_broker_says_when_to_come_back_and_takes_jobs_again_afterwards(small: World) -> None:
    small.runner.gate.clear()
    waiting = [asyncio.create_task(small.call("POST", "/v1/jobs", json=spec())) for _ in range(2)]
    async with asyncio.timeout(5):
        while small.app.state.lobby.admission.jobs < 2:
            await asyncio.sleep(0.002)
    refused = await small.call("POST", "/v1/jobs", json=spec())
    assert (refused.status, refused.code) == (429, "TooManyRequests")
    assert refused.json()["retry_after_s"] == 1.0
    batch = await small.call("POST", "/v1/jobs:batch", json={"jobs": [spec()]})
    assert batch.code == "TooManyRequests"
    small.runner.gate.set()
    assert [r.status for r in await asyncio.gather(*waiting)] == [201, 201]
    assert (await small.call("POST", "/v1/jobs", json=spec())).status == 201


async def test_a_refused_submission_gives_its_room_back(small: World) -> None:
    for _ in range(5):
        assert (await small.call("POST", "/v1/jobs", json={"nonsense": 1})).status == 422
    assert small.app.state.lobby.admission.jobs == 0
