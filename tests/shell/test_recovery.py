"""A broker that died and its successor over the same store and pods: nothing lost, nothing run twice, logs whole."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from firepool_broker.core.ids import JobId
from firepool_wire.errors import Conflict
from firepool_wire.frames import Kind
from firepool_wire.words import JobState
from tests.shell.workshop import ALICE, House, argv_spec, close, opened, until


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[House]:
    house = await opened(tmp_path)
    yield house
    if not house.runner.desk.closing:
        await close(house)


async def successor(first: House) -> House:
    await first.crash()
    return await first.restarted()


async def test_a_running_job_is_followed_on_as_the_same_attempt(first: House) -> None:
    job = await first.submit("wait")
    agent = await first.running(job)
    agent.attempts[f"{job}:0"].add(Kind.LOG, b"\x01before\n")
    await until(lambda: first.runner.logs.size(f"{job}:0", 0), "the log")
    second = await successor(first)
    try:
        agent.attempts[f"{job}:0"].add(Kind.LOG, b"\x01after\n")
        await until(lambda: second.runner.desk.runs, "the follow")
        agent.finish(f"{job}:0")
        row = await second.done(job)
        assert (row.state, row.retry_count) == (JobState.SUCCEEDED, 0)
        assert second.runner.logs.read(f"{job}:0", 0, 0, 100) == b"before\nafter\n"
        assert agent.calls.count("launch") == 1
    finally:
        await close(second)


async def test_a_job_that_finished_during_the_outage_is_finalised_without_a_retry(first: House) -> None:
    job = await first.submit("wait")
    agent = await first.running(job)
    await first.crash()
    agent.attempts[f"{job}:0"].add(Kind.LOG, b"\x01meanwhile\n")
    agent.finish(f"{job}:0", 5)
    second = await first.restarted()
    try:
        row = await second.done(job)
        assert (row.state, row.retry_count, row.facts["exit_code"]) == (JobState.FAILED, 0, 5)
        assert second.runner.logs.read(f"{job}:0", 0, 0, 100) == b"meanwhile\n"
        await until(lambda: f"{job}:0" in agent.acked, "the acknowledgement")
    finally:
        await close(second)


async def test_a_start_that_was_never_launched_runs_once_as_the_next_attempt(first: House) -> None:
    row = await first.done(await first.submit())
    agent = first.provider.agents[row.pods[0]]
    agent.hang.add("launch")
    job = await first.submit("print", "once")
    await until(lambda: "launch" in agent.calls[-3:], "the launch on its way")
    await first.crash()
    agent.hang.clear()
    assert agent.attempts[f"{job}:0"].state == "prepared"
    second = await first.restarted()
    try:
        ended = await second.done(job)
        assert (ended.state, ended.retry_count) == (JobState.SUCCEEDED, 1)
        started = [m for a in second.provider.agents.values() for m in a.launched]
        assert sum(m["injected"]["FIREPOOL_JOB_ID"] == job for m in started) == 1
    finally:
        await close(second)


async def test_a_waiting_job_starts_under_the_next_broker_in_its_place(first: House) -> None:
    blockers = [await first.submit("wait") for _ in range(2)]
    for job in blockers:
        await first.running(job)
    waiting = [await first.submit("print", str(n)) for n in range(3)]
    second = await successor(first)
    try:
        for job in blockers:
            (await second.running(job)).finish(f"{job}:0")
        rows = [await second.done(job) for job in waiting]
        assert {row.state for row in rows} == {JobState.SUCCEEDED}
    finally:
        await close(second)


async def test_a_job_whose_pod_went_during_the_outage_runs_again(first: House) -> None:
    job = await first.submit("wait")
    agent = await first.running(job)
    await first.crash()
    await first.provider.kill(agent.pod)
    second = await first.restarted()
    try:
        (await second.running(job)).finish(f"{job}:1")
        row = await second.done(job)
        assert (row.state, row.retry_count) == (JobState.SUCCEEDED, 1)
    finally:
        await close(second)


async def test_a_held_pod_is_still_its_owners_and_nobody_elses(first: House) -> None:
    mine = await first.done(await first.submit())
    agent = first.provider.agents[mine.pods[0]]
    await until(lambda: "ack" in agent.calls, "the acknowledgement")
    second = await successor(first)
    try:
        from tests.shell.workshop import BOB

        theirs = await second.done(await second.submit(who=BOB))
        assert set(theirs.pods).isdisjoint(mine.pods)
    finally:
        await close(second)


async def test_a_key_is_known_to_the_next_broker(first: House) -> None:
    spec = argv_spec("wait", idempotency_key="k")
    accepted = await first.runner.submit(ALICE, spec, "digest")
    agent = await first.running(accepted.job)
    second = await successor(first)
    try:
        again = await second.runner.submit(ALICE, spec, "digest")
        assert (again.job, again.replayed) == (accepted.job, True)
        with pytest.raises(Conflict):
            await second.runner.submit(ALICE, spec, "other")
        agent.finish(f"{accepted.job}:0")
        await second.done(accepted.job)
    finally:
        await close(second)


async def test_a_pending_job_still_waits_for_its_dependency(first: House) -> None:
    from tests.shell.test_runner import function_on

    dependency = await first.submit("wait")
    agent = await first.running(dependency)
    dependent = await first.runner.submit(ALICE, function_on(dependency), "d")
    second = await successor(first)
    try:
        assert second.runner.desk.jobs[JobId(dependent.job)].state is JobState.PENDING
        agent.finish(f"{dependency}:0", 1)
        assert (await second.done(dependent.job)).state is not JobState.SUCCEEDED
    finally:
        await close(second)


async def test_a_cancelled_running_job_is_ended_by_the_next_broker(first: House) -> None:
    job = await first.submit("wait")
    agent = await first.running(job)
    agent.hang.add("stop")
    cancelling = asyncio.ensure_future(first.runner.cancel(ALICE, job))
    await until(lambda: "stop" in agent.calls, "the stop")
    await cancelling
    await first.crash()
    agent.hang.clear()
    second = await first.restarted()
    try:
        assert (await second.done(job)).state is JobState.CANCELLED
    finally:
        await close(second)
