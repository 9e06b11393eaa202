"""Launching and following attempts: nothing lost over broken streams, full disks and dying pods; the end told last."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from firepool_broker.conformance.agents import prepare
from firepool_broker.core.effects import LaunchAttempt
from firepool_broker.core.events import (
    AttemptEnded,
    FirstInstruction,
    Launched,
    LaunchFailed,
    PodReachable,
    PodUnreachable,
)
from firepool_broker.core.ids import AttemptId, PodName
from firepool_broker.shell.runner import follow as follow_room
from firepool_broker.shell.runner.deliver import Deliver
from firepool_broker.shell.runner.follow import Follow
from firepool_broker.shell.runner.pods import Pods
from firepool_wire.errors import DependencyInstallError, NotFound, StoreUnavailable
from firepool_wire.frames import Items, Kind, Parser
from firepool_wire.jobspec import Entrypoint, FunctionEntry, JobSpec
from tests.shell.fake_agent import FakeAgent
from tests.shell.workshop import Workshop, argv_spec, order, until, workshop

ATTEMPT = AttemptId("j1:0")


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as shop:
        yield shop


async def launched(shop: Workshop, spec: JobSpec, *pods: str) -> tuple[Follow, Pods]:
    """Launch a job on fresh pods, prepared, with the rooms that follow it."""
    names = pods or ("p1",)
    room = Pods(shop.desk)
    room.watch(shop.provider)
    follow = Follow(shop.desk, room, Deliver(shop.desk))
    shop.job(spec=spec, pods=names)
    for name in names:
        await shop.provider.create(order(name))
        await until(lambda n=name: PodName(n) in shop.desk.pods and shop.desk.pods[PodName(n)].hello, "hello")
        await shop.desk.parts.agents.prepare(shop.provider.agents[name].address, ATTEMPT, prepare())
    follow.launch(LaunchAttempt(ATTEMPT, tuple(PodName(n) for n in names)))
    return follow, room


def agent(shop: Workshop, name: str = "p1") -> FakeAgent:
    return shop.provider.agents[name]


def log(shop: Workshop, rank: int = 0) -> bytes:
    return shop.desk.parts.logs.read(ATTEMPT, rank, 0, 1 << 20)


async def test_an_attempts_end_is_told_when_all_it_left_is_stored(shop: Workshop) -> None:
    await launched(shop, argv_spec("write", "out.txt", "content", outputs=("*.txt",)))
    ended = await shop.event(AttemptEnded)
    assert ended.exit.exit_code == 0
    assert shop.desk.parts.logs.finished(ATTEMPT, 0)
    (output,) = shop.desk.runs[ATTEMPT][PodName("p1")].outputs
    assert output["path"] == "out.txt"
    assert await shop.desk.parts.blobs.get("alice", output["digest"]) == b"content"


async def test_launched_comes_before_the_first_instruction_and_that_before_the_end(shop: Workshop) -> None:
    await launched(shop, argv_spec("print", "x"))
    await shop.event(AttemptEnded)
    kinds = [type(e) for e in shop.told if isinstance(e, Launched | FirstInstruction | AttemptEnded)]
    assert kinds == [Launched, FirstInstruction, AttemptEnded]
    first = await shop.event(FirstInstruction)
    assert abs(first.at - shop.desk.clock.now()) < 30


async def test_a_broken_event_stream_loses_and_doubles_nothing(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_room, "RETRY_S", 0.001)
    lines = [f"line {n}" for n in range(200)]

    def cut(fake: FakeAgent) -> None:
        fake.cut_events_after = 333

    await shop.provider.create(order("p1"))
    cut(agent(shop))
    await launched(shop, argv_spec("print", *lines))
    await shop.event(AttemptEnded)
    assert log(shop).decode().splitlines() == lines
    assert any(isinstance(e, PodUnreachable) for e in shop.told)
    await shop.event(PodReachable)


async def test_a_small_result_stays_inline_and_a_large_one_goes_to_the_blob_store(tmp_path: Path) -> None:
    for size in (10, 3_000_000):
        async with workshop(tmp_path / str(size)) as shop:
            data = b"r" * size
            await launched(shop, argv_spec("result", base64.b64encode(data).decode()))
            await shop.event(AttemptEnded)
            run = shop.desk.runs[ATTEMPT][PodName("p1")]
            assert (run.result is None) == (size > 10)
            stored = run.result or await shop.desk.parts.blobs.get("alice", run.result_blob or "")
            items, found = Items(), []
            for frame in Parser().feed(stored):
                assert frame.kind is Kind.RESULT
                found.append(items.feed(frame.payload))
            assert found[-1] is not None
            assert found[-1][2] == data
            assert run.result_bytes == len(stored)


async def test_a_full_disk_delays_the_end_until_everything_is_stored_once(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_room, "RETRY_S", 0.001)
    logs = shop.desk.parts.logs
    real, failures = logs.append, iter(range(3))

    def append(*args: Any) -> None:
        if next(failures, None) is not None:
            raise StoreUnavailable("disk full")
        real(*args)

    monkeypatch.setattr(logs, "append", append)
    await launched(shop, argv_spec("print", "one", "two"))
    await shop.event(AttemptEnded)
    assert log(shop) == b"one\ntwo\n"


async def test_every_rank_of_a_gang_is_followed(shop: Workshop) -> None:
    await launched(shop, argv_spec("print", "x", pods=2), "p1", "p2")
    await until(lambda: sum(isinstance(e, AttemptEnded) for e in shop.told) == 2, "both ends")
    assert [agent(shop, p).attempts[ATTEMPT].launch["injected"]["FIREPOOL_RANK"] for p in ("p1", "p2")] == ["0", "1"]
    assert log(shop, 1) == b"x\n"


async def test_an_error_of_the_launch_fails_it_and_ends_the_following(shop: Workshop) -> None:
    await shop.provider.create(order("p1"))
    agent(shop).refuse["launch"] = DependencyInstallError("no such package", log="pip says no")
    await launched(shop, argv_spec())
    failed = await shop.event(LaunchFailed)
    assert failed.failure.code == "DependencyInstallError"
    assert ("log", "pip says no") in failed.failure.details
    await until(lambda: not shop.desk.pods[PodName("p1")].readers, "the reader's end")


async def test_a_pod_that_dies_tells_its_last_frames_first(shop: Workshop) -> None:
    await launched(shop, argv_spec("wait"))
    await shop.event(FirstInstruction)
    agent(shop).attempts[ATTEMPT].add(Kind.LOG, b"\x01last words\n")
    await until(lambda: log(shop) == b"last words\n", "the log")
    await shop.provider.kill("p1", "node died", oom=True)
    gone = await until(lambda: next((e for e in shop.told if type(e).__name__ == "PodGone"), None), "PodGone")
    assert gone.oom
    assert not any(isinstance(e, AttemptEnded) for e in shop.told)
    assert PodName("p1") not in shop.desk.pods


async def test_what_a_function_needs_is_in_the_pod_before_its_launch_and_sent_once(shop: Workshop) -> None:
    payload = await shop.desk.parts.blobs.put_bytes("alice", b"function" * 1000)
    package = await shop.desk.parts.blobs.put_bytes("alice", b"zip" * 100_000)
    spec = JobSpec(entrypoint=Entrypoint(function=FunctionEntry(payload=payload, args="e30=")), package=package)
    await launched(shop, spec)
    await shop.event(AttemptEnded)
    assert set(agent(shop).blobs) == {payload, package}
    message = agent(shop).attempts[ATTEMPT].launch
    assert message is not None
    assert message["function"]["payload"] == payload
    assert message["package"] == package
    puts = agent(shop).calls.count("put-blob")
    again = Deliver(shop.desk)
    run = shop.desk.runs[ATTEMPT][PodName("p1")]
    live = next(iter(shop.desk.jobs.values()))
    await again.launch_message(live, run, shop.desk.pods[PodName("p1")], 1)
    assert agent(shop).calls.count("put-blob") == puts == 2


async def test_a_blob_that_the_pod_has_dropped_is_sent_again(shop: Workshop) -> None:
    payload = await shop.desk.parts.blobs.put_bytes("alice", b"function")
    await shop.provider.create(order("p1"))
    agent(shop).refuse_once["launch"] = NotFound("no such blob in the cache")
    spec = JobSpec(entrypoint=Entrypoint(function=FunctionEntry(payload=payload, args="e30=")))
    await launched(shop, spec)
    assert (await shop.event(AttemptEnded)).exit.exit_code == 0
    assert agent(shop).calls.count("put-blob") == 2
    assert not any(isinstance(e, LaunchFailed) for e in shop.told)


async def test_a_blob_that_the_store_lost_is_our_fault_and_names_it(shop: Workshop) -> None:
    absent = "sha256:" + "0" * 64
    await launched(shop, JobSpec(entrypoint=Entrypoint(function=FunctionEntry(payload=absent))))
    failed = await shop.event(LaunchFailed)
    assert (failed.failure.code, failed.failure.fault) == ("StoreUnavailable", "infra")
    assert absent in failed.failure.message or absent in dict(failed.failure.details).values()


async def test_the_verified_identity_is_injected_and_the_users_own_variables_stay_apart(shop: Workshop) -> None:
    await launched(shop, argv_spec("print", env={"FIREPOOL_CALLER": "mallory", "A": "1"}))
    await shop.event(AttemptEnded)
    message = agent(shop).attempts[ATTEMPT].launch
    assert message is not None
    assert message["injected"]["FIREPOOL_CALLER"] == "alice"
    assert message["env"]["A"] == "1"


async def test_a_job_may_ask_for_more_caution_than_its_pool_but_not_for_less(shop: Workshop) -> None:
    await launched(shop, argv_spec("print", untrusted=True))
    await shop.event(AttemptEnded)
    message = agent(shop).attempts[ATTEMPT].launch
    assert message is not None
    assert message["untrusted"] is True
