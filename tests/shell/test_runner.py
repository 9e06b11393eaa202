"""The runner with the real engine: what a caller sees of a job's life, and what faults of store and pods make of it."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from firepool_broker.core.ids import JobId, Sku
from firepool_broker.core.pools import Pool
from firepool_broker.shell.ports import StoreDown, Won
from firepool_broker.shell.rows import EndAttempt, InsertJob, Lost, StartAttempt, Write
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_wire.errors import (
    BadRequest,
    CapacityUnavailable,
    Conflict,
    FirepoolError,
    NotFound,
    StoreUnavailable,
    UnknownSku,
)
from firepool_wire.jobspec import Entrypoint, FunctionEntry, JobSpec
from firepool_wire.words import JobState
from tests.shell.workshop import ALICE, BOB, POOL, House, argv_spec, house, until


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path) as found:
        yield found


async def test_a_job_runs_and_its_row_says_how(home: House) -> None:
    row = await home.done(await home.submit("print", "hello"))
    assert row.state is JobState.SUCCEEDED
    assert row.facts["exit_code"] == 0
    assert row.facts["usage"]["cpu_s"] == 0.01
    assert row.facts["times"]["submitted"] <= row.facts["times"]["first_instruction"]
    assert home.runner.logs.read(f"{row.job}:0", 0, 0, 100) == b"hello\n"
    stored = await home.runner.store.get(row.job)
    assert stored is not None
    assert (stored.state, stored.facts, stored.seq) == (row.state, row.facts, row.seq)


async def test_a_row_built_for_watchers_is_the_row_of_the_store(home: House) -> None:
    async with home.runner.watch("alice") as mine:
        job = await home.submit("exit", "3", labels={"k": "v"})
        row = await home.done(job)
        changes = [c for c in await mine.take(1.0) if c.row is not None]
    stored = await home.runner.store.get(job)
    assert [c.job for c in changes] == [job]
    assert stored is not None
    assert stored.state is JobState.FAILED
    for name in (
        "caller",
        "person",
        "spec",
        "state",
        "version",
        "retry_count",
        "path",
        "facts",
        "seq",
        "why_not_warmer",
    ):
        assert getattr(stored, name) == getattr(row, name), name


async def test_the_second_job_of_a_caller_gets_the_warm_pod(home: House) -> None:
    first = await home.done(await home.submit())
    second = await home.done(await home.submit())
    assert second.path == "warm"
    assert second.pods == first.pods


async def test_agents_may_drop_their_records_once_the_end_is_durable(home: House) -> None:
    row = await home.done(await home.submit())
    agent = home.provider.agents[row.pods[0]]
    await until(lambda: f"{row.job}:0" in agent.acked, "the acknowledgement")
    assert not agent.attempts


async def test_a_job_that_must_wait_is_durable_before_it_starts(home: House) -> None:
    running = [await home.submit("wait") for _ in range(2)]
    for job in running:
        await home.running(job)
    waiting = await home.runner.submit(ALICE, argv_spec("print"), "d")
    assert waiting.state is JobState.QUEUED
    stored = await home.runner.store.get(waiting.job)
    assert stored is not None
    assert stored.state is JobState.QUEUED
    for job in running:
        (await home.running(job)).finish(f"{job}:0")
    assert (await home.done(waiting.job)).state is JobState.SUCCEEDED


async def test_an_unknown_sku_is_refused_and_nothing_is_stored(home: House) -> None:
    with pytest.raises(UnknownSku):
        await home.submit(sku="h900")
    assert await home.runner.store.counts(None, None) == {}
    assert not home.runner.desk.jobs


async def test_what_can_never_fit_is_refused_with_the_limit(home: House) -> None:
    with pytest.raises(CapacityUnavailable):
        await home.submit(pods=3)


# -- idempotency --------------------------------------------------------------------------------------------------------


async def test_the_same_key_and_body_is_the_same_job_in_flight_and_after_its_end(home: House) -> None:
    spec = argv_spec("print", idempotency_key="k1")
    both = await asyncio.gather(*(home.runner.submit(ALICE, spec, "d") for _ in range(2)))
    assert both[0].job == both[1].job
    assert [a.replayed for a in both] == [False, True]
    await home.done(both[0].job)
    again = await home.runner.submit(ALICE, spec, "d")
    assert (again.job, again.replayed, again.state) == (both[0].job, True, JobState.SUCCEEDED)
    await until(lambda: not home.runner.desk.jobs, "no live job")
    assert await home.runner.store.counts(None, None) == {"SUCCEEDED": 1}


async def test_a_replayed_key_starts_nothing(home: House) -> None:
    spec = argv_spec("print", idempotency_key="k1")
    first = await home.runner.submit(ALICE, spec, "d")
    await home.done(first.job)
    launches = [a for agent in home.provider.agents.values() for a in agent.calls if a == "launch"]
    await home.runner.submit(ALICE, spec, "d")
    await until(lambda: not home.runner.desk.jobs, "no live job")
    assert [a for agent in home.provider.agents.values() for a in agent.calls if a == "launch"] == launches


async def test_the_same_key_with_another_body_is_a_conflict(home: House) -> None:
    await home.submit("wait", idempotency_key="k1", digest="one")
    with pytest.raises(Conflict):
        await home.submit("print", idempotency_key="k1", digest="two")
    job = await home.submit("print", idempotency_key="k2", digest="one")
    await home.done(job)
    with pytest.raises(Conflict):
        await home.submit("print", idempotency_key="k2", digest="two")


async def test_a_key_belongs_to_its_caller(home: House) -> None:
    mine = await home.submit("print", idempotency_key="k")
    theirs = await home.submit("print", idempotency_key="k", who=BOB)
    assert mine != theirs


async def test_a_batch_answers_every_job_on_its_own(home: House) -> None:
    specs = [argv_spec("print"), argv_spec("print", sku="nowhere"), argv_spec("print", pods=9), argv_spec("exit", "1")]
    answers = await home.runner.submit_many(ALICE, [(s, str(n)) for n, s in enumerate(specs)])
    assert isinstance(answers[1], UnknownSku)
    assert isinstance(answers[2], CapacityUnavailable)
    ended = [await home.done(a.job) for a in answers if not isinstance(a, FirepoolError)]
    assert [row.state for row in ended] == [JobState.SUCCEEDED, JobState.FAILED]


# -- dependencies -------------------------------------------------------------------------------------------------------


def function_on(*jobs: str) -> JobSpec:
    return JobSpec(entrypoint=Entrypoint(function=FunctionEntry(import_path="m:f", args="e30=", depends=jobs)))


async def test_a_dependent_starts_with_the_results_of_what_it_waits_for(home: House) -> None:
    first = await home.submit("wait")
    agent = await home.running(first)
    second = await home.runner.submit(ALICE, function_on(first), "d")
    assert second.state is JobState.PENDING
    agent.finish(f"{first}:0")
    third = await home.done(second.job)
    assert third.state is JobState.FAILED, "its dependency left no result"
    result = await home.submit("result", base64.b64encode(b"value").decode())
    await home.done(result)
    late = await home.runner.submit(ALICE, function_on(result), "e")
    assert (await home.done(late.job)).state is JobState.SUCCEEDED
    launches = [
        record["depends"]
        for agent in home.provider.agents.values()
        for record in agent.launched
        if record["injected"]["FIREPOOL_JOB_ID"] == late.job
    ]
    row = await home.runner.store.get(result)
    assert row is not None
    assert row.result is not None
    assert launches == [[base64.b64encode(row.result).decode()]]


async def test_a_failed_dependency_ends_its_dependents(home: House) -> None:
    first = await home.submit("wait")
    agent = await home.running(first)
    second = await home.runner.submit(ALICE, function_on(first), "d")
    agent.finish(f"{first}:0", 7)
    row = await home.done(second.job)
    assert row.state is not JobState.SUCCEEDED
    assert row.facts["error"]


async def test_another_callers_job_cannot_be_an_argument(home: House) -> None:
    theirs = await home.submit("print", who=BOB)
    await home.done(theirs)
    with pytest.raises(NotFound):
        await home.runner.submit(ALICE, function_on(theirs), "d")


# -- cancelling ---------------------------------------------------------------------------------------------------------


async def test_a_running_job_is_cancelled_once_its_processes_are_gone(home: House) -> None:
    job = await home.submit("wait")
    await home.running(job)
    await home.runner.cancel(ALICE, job)
    row = await home.done(job)
    assert row.state is JobState.CANCELLED
    assert row.facts["error"]["code"] == "Cancelled"


async def test_a_waiting_job_is_cancelled_at_once(home: House) -> None:
    for job in [await home.submit("wait") for _ in range(2)]:
        await home.running(job)
    job = await home.submit("print")
    await home.runner.cancel(ALICE, job)
    assert (await home.done(job)).state is JobState.CANCELLED


async def test_nobody_cancels_another_callers_job(home: House) -> None:
    job = await home.submit("wait")
    with pytest.raises(NotFound):
        await home.runner.cancel(BOB, job)
    with pytest.raises(NotFound):
        await home.runner.cancel(ALICE, "nothing")


async def test_a_job_whose_clients_are_gone_ends_and_a_renewed_one_lives(home: House) -> None:
    left = await home.submit("wait", client_lease_s=0.3)
    kept = await home.submit("wait", client_lease_s=0.3)
    await home.running(kept)
    ended = asyncio.ensure_future(home.done(left))
    while not ended.done():
        await home.runner.renew(ALICE, [kept, left if False else "unknown"])
        await asyncio.sleep(0.05)
    row = await ended
    assert row.state is JobState.CANCELLED
    assert row.facts["error"]["code"] == "ClientGone"
    assert home.runner.desk.jobs[JobId(kept)].state is JobState.RUNNING


# -- faults of the store ------------------------------------------------------------------------------------------------


class Moody(SqliteJobs):
    """The real store with an outage that a test switches on: by kind of write, before it or (`unknown`) behind it."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.fails: dict[type[Write], int] = {}
        self.forgets: dict[type[Write], int] = {}

    def write(self, write: Write) -> Awaitable[Won | Lost]:
        return asyncio.ensure_future(self._write(write))

    async def _write(self, write: Write) -> Won | Lost:
        kind = type(write)
        if self.fails.get(kind, 0) > 0:
            self.fails[kind] -= 1
            raise StoreDown("disk full")
        answer = await super().write(write)
        if self.forgets.get(kind, 0) > 0:
            self.forgets[kind] -= 1
            raise StoreDown("connection lost", unknown=True)
        return answer


@pytest.fixture
async def moody(tmp_path: Path) -> AsyncIterator[tuple[House, Moody]]:
    store = Moody(Database(tmp_path / "store.db"))
    async with house(tmp_path, store=store, **_on(store)) as found:
        yield found, store


def _on(store: Moody) -> dict[str, Any]:
    from firepool_broker.shell.store.config import Configuration
    from firepool_broker.shell.store.tokens import SqliteTokens

    return {"config": Configuration(store._database), "tokens": SqliteTokens(store._database)}


async def test_a_submission_that_cannot_be_written_is_refused_and_can_be_repeated(moody: tuple[House, Moody]) -> None:
    home, store = moody
    await home.done(await home.submit())
    store.fails[InsertJob] = 100
    with pytest.raises(StoreUnavailable):
        await home.submit(idempotency_key="k")
    store.fails.clear()
    await until(lambda: not home.runner.desk.jobs, "nothing left over")
    assert (await home.done(await home.submit(idempotency_key="k"))).state is JobState.SUCCEEDED


async def test_an_insert_whose_answer_was_lost_is_found_to_be_written(moody: tuple[House, Moody]) -> None:
    home, store = moody
    await home.done(await home.submit())
    store.forgets[InsertJob] = 1
    row = await home.done(await home.submit())
    assert row.state is JobState.SUCCEEDED
    assert row.retry_count == 0


async def test_a_waiting_insert_whose_answer_was_lost_is_found_too(moody: tuple[House, Moody]) -> None:
    home, store = moody
    store.forgets[InsertJob] = 1  # no pod yet: the job is stored QUEUED
    assert (await home.done(await home.submit())).state is JobState.SUCCEEDED


async def test_a_start_that_cannot_be_written_launches_nothing_and_the_job_starts_later(
    moody: tuple[House, Moody],
) -> None:
    home, store = moody
    store.fails[StartAttempt] = 2  # the first pod is new, so the job was stored before
    row = await home.done(await home.submit())
    assert (row.state, row.retry_count) == (JobState.SUCCEEDED, 0)
    launches = sum(agent.calls.count("launch") for agent in home.provider.agents.values())
    assert launches == 1


async def test_a_start_whose_answer_was_lost_is_read_back_before_it_is_launched(moody: tuple[House, Moody]) -> None:
    home, store = moody
    store.forgets[StartAttempt] = 1
    row = await home.done(await home.submit())
    assert (row.state, row.retry_count) == (JobState.SUCCEEDED, 0)


async def test_an_end_that_cannot_be_written_is_written_later(moody: tuple[House, Moody]) -> None:
    home, store = moody
    store.fails[EndAttempt] = 2
    store.forgets[EndAttempt] = 1
    row = await home.done(await home.submit())
    assert row.state is JobState.SUCCEEDED
    agent = home.provider.agents[row.pods[0]]
    await until(lambda: f"{row.job}:0" in agent.acked, "the acknowledgement")


# -- faults of pods -----------------------------------------------------------------------------------------------------


async def test_a_hanging_agent_does_not_delay_the_durable_answer(home: House) -> None:
    row = await home.done(await home.submit())
    home.provider.agents[row.pods[0]].hang.add("prepare")
    async with asyncio.timeout(2):
        accepted = await home.runner.submit(ALICE, argv_spec("print"), "d")
    assert accepted.state is JobState.QUEUED


async def test_a_job_whose_pod_is_lost_runs_again_elsewhere(home: House) -> None:
    job = await home.submit("wait")
    agent = await home.running(job)
    await home.provider.kill(agent.pod, "power cut")
    again = await home.running(job)
    assert again.pod != agent.pod
    again.finish(f"{job}:1")
    row = await home.done(job)
    assert (row.state, row.retry_count, row.infra_retries) == (JobState.SUCCEEDED, 1, 1)


async def test_a_silent_agent_is_neither_failed_nor_replaced_while_its_pod_may_live(home: House) -> None:
    job = await home.submit("wait")
    agent = await home.running(job)
    await home.provider.silence(agent.pod)
    await until(lambda: home.runner.desk.pods and any(p.struck_at for p in home.runner.desk.pods.values()), "a strike")
    assert home.runner.desk.jobs[JobId(job)].state is JobState.RUNNING
    again = await home.provider.revive(agent.pod)
    again.finish(f"{job}:0")
    row = await home.done(job)
    assert (row.state, row.retry_count) == (JobState.SUCCEEDED, 0)


async def test_an_agent_of_another_boot_voids_what_was_believed(home: House) -> None:
    job = await home.submit("wait")
    agent = await home.running(job)
    await home.provider.silence(agent.pod)
    await until(lambda: any(p.struck_at for p in home.runner.desk.pods.values()), "a strike")
    await home.provider.revive(agent.pod, "boot-2")
    again = await home.running(job)
    assert again.pod != agent.pod
    again.finish(f"{job}:1")
    assert (await home.done(job)).retry_count == 1


async def test_an_unclean_pod_is_replaced_and_its_job_keeps_its_result(home: House) -> None:
    job = await home.submit("wait")
    agent = await home.running(job)
    agent.unclean = [{"what": "process", "where": "pid 7", "detail": "still there"}]
    agent.finish(f"{job}:0")
    assert (await home.done(job)).state is JobState.SUCCEEDED
    await until(lambda: agent.pod not in home.provider.agents, "the pod's end")
    assert (await home.done(await home.submit())).pods != (agent.pod,)


async def test_a_pod_that_does_not_come_up_is_made_anew(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        home.provider.refusals.append(CapacityUnavailable("no room"))
        assert (await home.done(await home.submit())).state is JobState.SUCCEEDED


async def test_no_other_caller_gets_a_used_pod(home: House) -> None:
    mine = await home.done(await home.submit())
    theirs = await home.done(await home.submit(who=BOB))
    assert set(mine.pods).isdisjoint(theirs.pods)


# -- pools --------------------------------------------------------------------------------------------------------------


async def test_bad_pools_are_refused_with_every_problem_and_change_nothing(home: House) -> None:
    bad = [Pool(sku=Sku("a"), min_count=-1, provider="nobody"), Pool(sku=Sku("a"))]
    with pytest.raises(BadRequest) as caught:
        await home.runner.configure(bad)
    assert len(caught.value.details["problems"]) >= 2
    assert set(home.runner.desk.pools) == {"cpu"}


async def test_applied_pools_are_there_after_a_restart(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.runner.configure([POOL, Pool(sku=Sku("second"))])
    async with house(tmp_path) as again:
        assert set(again.runner.desk.pools) == {"cpu"}, "pools that the start names win"
    from firepool_broker.shell.runner import Runner
    from tests.shell.memory_provider import MemoryProvider
    from tests.shell.workshop import parts

    runner = Runner(parts(tmp_path, MemoryProvider(tmp_path / "pods")))
    await runner.start(None, (POOL,))
    assert set(runner.desk.pools) == {"cpu", "second"}
    await runner.aclose(leave_pods=False)


async def test_metrics_tell_what_happened(home: House) -> None:
    await home.done(await home.submit())
    await home.done(await home.submit("exit", "2"))
    text = home.runner.render_metrics().decode()
    assert 'firepool_jobs_ended_total{code="NonZeroExit",sku="cpu",state="FAILED"} 1.0' in text
    assert 'firepool_attempts_started_total{path="warm"' in text
    assert "firepool_engine_handle_s_bucket" in text
