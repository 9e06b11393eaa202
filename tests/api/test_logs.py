"""A job's log by offset: nothing lost, nothing doubled, and an end that is the end."""

import asyncio

import aiohttp
import pytest

from tests.api.world import World


async def test_a_finished_log_is_whole_and_says_so(api: World) -> None:
    reply = await api.call("GET", f"/v1/jobs/{await api.submit('print', 'one', 'two')}/logs")
    assert reply.body == b"one\ntwo\n"
    assert reply.headers["firepool-log-complete"] == "true"
    assert reply.headers["firepool-log-offset"] == "0"


async def test_a_log_is_read_from_any_byte_also_from_the_end(api: World) -> None:
    job = await api.submit("print", "one", "two")
    assert (await api.call("GET", f"/v1/jobs/{job}/logs?offset=4")).body == b"two\n"
    tail = await api.call("GET", f"/v1/jobs/{job}/logs?offset=-3")
    assert (tail.body, tail.headers["firepool-log-offset"]) == (b"wo\n", "5")
    assert (await api.call("GET", f"/v1/jobs/{job}/logs?offset=100")).body == b""


async def test_the_log_of_a_running_job_is_not_complete(api: World) -> None:
    job = await api.submit("wait")
    api.runner.log(job, b"so far")
    reply = await api.call("GET", f"/v1/jobs/{job}/logs")
    assert (reply.body, reply.headers["firepool-log-complete"]) == (b"so far", "false")


async def test_a_follower_gets_everything_in_order_and_ends_with_the_job(api: World) -> None:
    job = await api.submit("wait")
    following = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/logs?follow=true"))
    sent = b""
    for n in range(200):
        piece = f"line {n}\n".encode() * (n % 7)
        api.runner.log(job, piece)
        sent += piece
        if n % 20 == 0:
            await asyncio.sleep(0.001)
    assert not following.done()
    await api.runner.finish(job)
    async with asyncio.timeout(5):
        assert (await following).body == sent


async def test_a_follower_goes_on_over_retries_and_offsets_stay_good(api: World) -> None:
    job = await api.submit("wait")
    api.runner.log(job, b"first attempt\n")
    following = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/logs?follow=true"))
    await asyncio.sleep(0.01)
    await api.runner.requeue(job, 0)
    await api.runner.restart(job, 1)
    api.runner.log(job, b"second attempt\n", 1)
    assert (await api.call("GET", f"/v1/jobs/{job}/logs?offset=6")).body == b"attempt\nsecond attempt\n"
    assert not following.done()
    await api.runner.finish(job, attempt=1)
    async with asyncio.timeout(10):
        assert (await following).body == b"first attempt\nsecond attempt\n"


async def test_a_follower_that_lost_its_connection_continues_where_it_was(api: World) -> None:
    job = await api.submit("wait")
    api.runner.log(job, b"0123456789")
    got = b""
    async with api.session.get(f"{api.base}/v1/jobs/{job}/logs?follow=true", headers=api.headers("ann")) as reply:
        got += await reply.content.readexactly(6)
        reply.close()
    api.runner.log(job, b"abc")
    await api.runner.finish(job)
    got += (await api.call("GET", f"/v1/jobs/{job}/logs?follow=true&offset={len(got)}")).body
    assert got == b"0123456789abc"


async def test_a_follower_of_a_job_that_never_ran_ends_when_the_job_is_cancelled(api: World) -> None:
    job = await api.submit("queue")
    following = asyncio.create_task(api.call("GET", f"/v1/jobs/{job}/logs?follow=true"))
    await asyncio.sleep(0.01)
    await api.call("POST", f"/v1/jobs/{job}:cancel")
    async with asyncio.timeout(5):
        assert (await following).body == b""


async def test_a_broker_that_stops_breaks_a_followed_log_off_instead_of_ending_it(api: World) -> None:
    job = await api.submit("wait")
    api.runner.log(job, b"so far")
    async with api.session.get(f"{api.base}/v1/jobs/{job}/logs?follow=true", headers=api.headers("ann")) as reply:
        assert await reply.content.readexactly(6) == b"so far"
        api.app.state.lobby.closing.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            async with asyncio.timeout(5):
                await reply.read()


@pytest.mark.parametrize("query", ["rank=1", "rank=-1", "offset=x", "folow=true"])
async def test_what_a_log_does_not_have_is_refused(api: World, query: str) -> None:
    job = await api.submit("print")
    assert (await api.call("GET", f"/v1/jobs/{job}/logs?{query}")).status == 422
