"""The event stream: resumable, complete about ends, and never in the broker's way."""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from firepool_broker.api.limits import ApiSettings
from tests.api.world import World, world


class Lines:
    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            line = await self._reply.content.readline()
        assert line, "the stream ended"
        told: dict[str, Any] = json.loads(line)
        return told

    async def until(self, **wanted: Any) -> dict[str, Any]:
        while True:
            line = await self.next()
            if all(line.get(k) == v for k, v in wanted.items()):
                return line


@asynccontextmanager
async def stream(api: World, query: str = "", who: str = "ann") -> AsyncIterator[Lines]:
    async with api.session.get(f"{api.base}/v1/events{query}", headers=api.headers(who)) as reply:
        assert reply.status == 200
        yield Lines(reply)


async def test_a_job_is_told_from_its_start_to_its_end_with_body_key_and_result(api: World) -> None:
    async with stream(api) as lines:
        assert (await lines.next())["heartbeat"]
        job = await api.submit("result", b64encode(b"frames").decode(), idempotency_key="k")
        told = []
        while not told or not told[-1]["terminal"]:
            told.append(await lines.next())
    assert [t["state"] for t in told] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    assert {t["job"] for t in told} == {job}
    end = told[-1]
    assert (end["body"]["id"], end["idempotency_key"], b64decode(end["result"])) == (job, "k", b"frames")
    assert [t["seq"] for t in told] == sorted(t["seq"] for t in told)


async def test_a_stream_resumes_behind_the_last_line_seen_and_repeats_nothing(api: World) -> None:
    jobs = [await api.submit("print") for _ in range(3)]
    async with stream(api, "?from=0") as lines:
        seen = [await lines.until(terminal=True) for _ in range(2)]
    later = await api.submit("print")
    async with stream(api, f"?from={seen[-1]['seq']}") as lines:
        rest = [await lines.until(terminal=True) for _ in range(2)]
        fresh = await api.submit("print")
        rest.append(await lines.until(terminal=True))
    assert [t["job"] for t in seen + rest] == [*jobs, later, fresh]


async def test_a_stream_without_a_place_begins_now(api: World) -> None:
    old = await api.submit("print")
    async with stream(api) as lines:
        first = await lines.next()
        assert first["heartbeat"]
        assert first["seq"] > 0
        new = await api.submit("print")
        end = await lines.until(terminal=True)
    assert end["job"] == new != old


async def test_a_silent_stream_says_that_it_lives(tmp_path: Path) -> None:
    async with world(tmp_path, ApiSettings(heartbeat_s=0.02)) as api, stream(api) as lines:
        assert [(await lines.next())["heartbeat"] for _ in range(4)] == [True] * 4


async def test_nobody_hears_of_other_callers_jobs(api: World) -> None:
    async with stream(api, "?from=0", "bob") as lines:
        await api.submit("print")
        mine = await api.submit("print", who="bob")
        assert (await lines.until(state="QUEUED"))["job"] == mine
        assert (await lines.until(terminal=True))["job"] == mine


async def test_a_reader_that_falls_behind_is_told_and_still_hears_of_every_end(tmp_path: Path) -> None:
    async with world(tmp_path, window_room=3) as api, stream(api, "?from=0") as lines:
        (window,) = await _window(api)
        # Fill the window faster than the loop lets the stream take from it.
        jobs = []
        taken, window.take = window.take, _never
        for _ in range(20):
            jobs.append(await api.submit("print"))
        window.take = taken
        ended = []
        await lines.until(resync=True)
        while len(ended) < 20:
            ended.append((await lines.until(terminal=True))["job"])
        assert ended == jobs


async def test_a_reader_that_does_not_read_keeps_nobody_waiting(api: World) -> None:
    async with stream(api, "?from=0"):
        async with asyncio.timeout(20):
            for _ in range(30):
                await api.submit("print", labels={"fat": "x" * 1000})


async def test_streams_of_readers_that_left_are_given_up(api: World) -> None:
    async with stream(api) as lines:
        await lines.next()
        assert len(api.runner.windows) == 1
    async with asyncio.timeout(5):
        while api.runner.windows:
            await asyncio.sleep(0.005)


async def _window(api: World) -> tuple[Any]:
    async with asyncio.timeout(5):
        while not api.runner.windows:
            await asyncio.sleep(0.002)
    (found,) = api.runner.windows
    return (found,)


async def _never(timeout_s: float) -> list[Any]:
    await asyncio.sleep(0.01)
    return []
