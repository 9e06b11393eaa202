"""What a job store must do, in sentences.

A test file subclasses `JobStoreConformance` and provides the async fixture `store`: an open, empty store.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from firepool_broker.shell.ports import JobStore
from firepool_broker.shell.rows import EndAttempt, InsertJob, JobFilter, Lost, MoveJob, StartAttempt, Won, Write
from firepool_wire.errors import BadRequest
from firepool_wire.jobspec import Entrypoint, FunctionEntry, JobSpec, Requirements
from firepool_wire.words import JobState

PENDING, QUEUED, RUNNING = JobState.PENDING, JobState.QUEUED, JobState.RUNNING
SUCCEEDED, FAILED, CANCELLED = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED

ARGV = Entrypoint(argv=("true",))


def start(job: str = "j1", **changes: Any) -> StartAttempt:
    """A start of attempt 0 on one pod."""
    base: dict[str, Any] = {
        "job": job,
        "attempt": f"{job}:0",
        "version": 1,
        "token": "t1",
        "pods": ("pod1",),
        "path": "warm",
        "why_not_warmer": "",
        "retire_after": (False,),
        "caller": "alice",
        "queue": "default",
        "tag": None,
        "at": 101.0,
    }
    return StartAttempt(**(base | changes))


def insert(job: str = "j1", **changes: Any) -> InsertJob:
    """A queued job of alice; with `start` it is written RUNNING."""
    base: dict[str, Any] = {
        "job": job,
        "caller": "alice",
        "person": "ann",
        "spec": JobSpec(entrypoint=ARGV),
        "state": RUNNING if "start" in changes else QUEUED,
        "submitted_at": 100.0,
        "body_digest": "d1",
    }
    return InsertJob(**(base | changes))


def running(job: str = "j1", **changes: Any) -> InsertJob:
    """A job that is written once, already running."""
    return insert(job, **({"start": start(job, version=0)} | changes))


def end(job: str = "j1", **changes: Any) -> EndAttempt:
    """A successful end of attempt 0 of a job that was written running."""
    base: dict[str, Any] = {
        "job": job,
        "attempt": f"{job}:0",
        "version": 1,
        "state": SUCCEEDED,
        "retry_count": 0,
        "infra_retries": 0,
        "facts": {"exit_code": 0},
        "at": 102.0,
    }
    return EndAttempt(**(base | changes))


async def together(store: JobStore, *writes: Write) -> list[Won | Lost]:
    """Queue the writes without a pause, so that they may share a commit."""
    return list(await asyncio.gather(*(store.write(w) for w in writes)))


def outcomes(answers: Sequence[Won | Lost]) -> list[int | str]:
    """Versions of the winners, "lost" for the others."""
    return [a.version if isinstance(a, Won) else "lost" for a in answers]


async def ids(store: JobStore, **where: Any) -> list[str]:
    """Job ids of the first page."""
    return [row.job for row in (await store.page(JobFilter(**where)))[0]]


class JobStoreConformance:
    """Sentences about `ports.JobStore`."""

    # -- one job --------------------------------------------------------------------------------------------------------

    async def test_a_stored_job_reads_back_as_it_was_written(self, store: JobStore) -> None:
        spec = JobSpec(
            entrypoint=Entrypoint(function=FunctionEntry(payload="sha256:" + "a" * 64, depends=("j0",), args="QUJD")),
            sku="h200",
            queue="grpo",
            lease_tag="épisode\u2028😀",
            requirements=Requirements(text="numpy\n"),
            labels={"step": "7", "quo\"te'": ""},
            retry_on=("HostLost",),
            run="run-1",
            run_timeout_s=2.5,
        )
        assert await store.write(insert(spec=spec)) == Won(1, 1)
        row = await store.get("j1")
        assert row is not None
        assert (row.spec, row.state, row.version, row.caller, row.person) == (spec, QUEUED, 1, "alice", "ann")
        assert (row.submitted_at, row.updated_at, row.attempt, row.pods, row.facts) == (100.0, 100.0, None, (), {})

    async def test_a_job_that_nobody_stored_is_none(self, store: JobStore) -> None:
        assert await store.get("j1") is None
        assert await store.get_many(["j1", "j2"]) == []

    async def test_a_job_that_starts_at_once_is_one_write(self, store: JobStore) -> None:
        assert outcomes([await store.write(running())]) == [1]
        row = await store.get("j1")
        assert row is not None
        assert (row.state, row.version, row.attempt, row.token) == (RUNNING, 1, "j1:0", "t1")
        assert (row.pods, row.retire_after, row.path, row.updated_at) == (("pod1",), (False,), "warm", 101.0)

    async def test_a_start_wins_only_at_the_version_it_was_decided_on(self, store: JobStore) -> None:
        await store.write(insert())
        lost = await store.write(start(version=2))
        assert isinstance(lost, Lost)
        assert lost.state is QUEUED
        assert outcomes([await store.write(start())]) == [2]
        assert outcomes([await store.write(start(version=2, token="t2"))]) == ["lost"]
        row = await store.get("j1")
        assert row is not None
        assert row.token == "t1"

    async def test_a_start_of_a_job_that_does_not_exist_is_lost(self, store: JobStore) -> None:
        assert await store.write(start()) == Lost("there is no such job")
        assert await store.bindings(["pod1"]) == []

    async def test_an_end_keeps_facts_and_result(self, store: JobStore) -> None:
        await store.write(running())
        facts = {
            "exit_code": 137,
            "error": {"code": "OOM", "message": "ü"},
            "times": {"launched": 1.25},
            "signal": None,
        }
        await store.write(end(state=FAILED, facts=facts, result=b"\x00\xff", result_blob="sha256:" + "b" * 64))
        row = await store.get("j1")
        assert row is not None
        assert (row.state, row.version, row.facts, row.result) == (FAILED, 2, facts, b"\x00\xff")
        assert (row.result_blob, row.updated_at, row.attempt) == ("sha256:" + "b" * 64, 102.0, "j1:0")

    async def test_a_terminal_job_never_changes_again(self, store: JobStore) -> None:
        await together(store, running(), end())
        before = await store.get("j1")
        late = await together(
            store,
            end(version=2, state=FAILED),
            start(version=2),
            MoveJob(job="j1", version=None, cancel_requested=True),
            MoveJob(job="j1", version=2, state=QUEUED),
        )
        assert outcomes(late) == ["lost"] * 4
        assert all(isinstance(a, Lost) and a.state is SUCCEEDED for a in late)
        assert await store.get("j1") == before

    async def test_a_requeued_job_keeps_its_place_and_drops_its_attempt(self, store: JobStore) -> None:
        await store.write(running())
        assert outcomes([await store.write(end(state=QUEUED, retry_count=1, infra_retries=1))]) == [2]
        row = await store.get("j1")
        assert row is not None
        assert (row.state, row.retry_count, row.infra_retries, row.submitted_at) == (QUEUED, 1, 1, 100.0)
        assert (row.attempt, row.token, row.pods, row.retire_after) == (None, None, (), ())
        assert outcomes([await store.write(start(attempt="j1:1", version=2, pods=("pod2",)))]) == [3]

    async def test_only_a_running_job_is_requeued(self, store: JobStore) -> None:
        await store.write(insert())
        assert outcomes([await store.write(end(state=QUEUED, retry_count=1))]) == ["lost"]

    async def test_a_waiting_job_can_end_without_an_attempt(self, store: JobStore) -> None:
        await together(store, insert("j1"), insert("j2", state=PENDING))
        ends = await together(store, end("j1", state=CANCELLED), end("j2", state=FAILED))
        assert outcomes(ends) == [2, 2]

    async def test_a_pending_job_moves_to_the_queue_once(self, store: JobStore) -> None:
        await store.write(insert(state=PENDING))
        assert outcomes([await store.write(start())]) == ["lost"], "its inputs are not there yet"
        move = MoveJob(job="j1", version=1, state=QUEUED)
        assert outcomes(await together(store, move, move)) == [2, "lost"]
        assert outcomes([await store.write(MoveJob(job="j1", version=None, state=QUEUED))]) == ["lost"]

    async def test_a_cancel_request_is_recorded_at_whatever_version(self, store: JobStore) -> None:
        await store.write(running())
        assert outcomes([await store.write(MoveJob(job="j1", version=None, cancel_requested=True))]) == [2]
        row = await store.get("j1")
        assert row is not None
        assert (row.cancel_requested, row.state) == (True, RUNNING)

    async def test_a_text_that_is_no_unicode_is_refused_to_its_sender_alone(self, store: JobStore) -> None:
        bad = store.write(insert("bad", spec=JobSpec(entrypoint=ARGV, queue="\ud800")))
        good = store.write(insert("good"))
        assert outcomes([await good]) == [1]
        with pytest.raises(BadRequest):
            await bad
        assert await store.get("bad") is None

    # -- groups ---------------------------------------------------------------------------------------------------------

    async def test_a_lost_write_does_not_take_others_of_its_group_with_it(self, store: JobStore) -> None:
        await together(store, *(insert(f"j{n}") for n in range(40)))
        starts = [start(f"j{n}", version=9 if n % 7 == 0 else 1, pods=(f"pod{n}",)) for n in range(40)]
        assert outcomes(await together(store, *starts)) == ["lost" if n % 7 == 0 else 2 for n in range(40)]
        bound = {b.pod for b in await store.bindings([f"pod{n}" for n in range(40)])}
        assert bound == {f"pod{n}" for n in range(40) if n % 7}

    async def test_writes_on_one_job_keep_their_order_within_a_group(self, store: JobStore) -> None:
        writes: list[Write] = []
        for job in ("a", "b", "c"):
            writes += [
                insert(job, state=PENDING),
                MoveJob(job=job, version=1, state=QUEUED),
                start(job, version=2),
                end(job, version=3, state=QUEUED, retry_count=1),
                start(job, version=4, attempt=f"{job}:1", pods=("pod2",)),
                MoveJob(job=job, version=None, cancel_requested=True),
                end(job, version=6, attempt=f"{job}:1", state=CANCELLED),
            ]
        assert outcomes(await together(store, *writes)) == [1, 2, 3, 4, 5, 6, 7] * 3

    async def test_the_order_of_changes_is_the_order_of_the_calls(self, store: JobStore) -> None:
        answers = await together(store, insert("a"), running("b"), end("b"), insert("c"), start("a"))
        places = [a.seq for a in answers if isinstance(a, Won)]
        assert len(places) == 5
        assert places == sorted(set(places))

    async def test_groups_of_every_size_are_applied_whole(self, store: JobStore) -> None:
        for size in (1, 2, 3, 63, 64, 65, 200):
            jobs = [f"s{size}-{n}" for n in range(size)]
            assert outcomes(await together(store, *(running(j) for j in jobs))) == [1] * size
            assert outcomes(await together(store, *(end(j) for j in jobs))) == [2] * size

    # -- idempotency keys -----------------------------------------------------------------------------------------------

    async def test_a_key_belongs_to_one_job_of_its_caller(self, store: JobStore) -> None:
        keyed = JobSpec(entrypoint=ARGV, idempotency_key="k")
        assert outcomes([await store.write(insert("j1", spec=keyed))]) == [1]
        again = await store.write(insert("j2", spec=keyed, body_digest="d2"))
        assert isinstance(again, Lost)
        assert (again.existing, again.state) == ("j1", QUEUED)
        assert await store.by_key("alice", "k") == ("j1", "d1")
        assert await store.get("j2") is None
        assert outcomes([await store.write(insert("j3", caller="bob", spec=keyed))]) == [1]
        assert await store.by_key("carol", "k") is None

    async def test_of_two_jobs_with_one_key_in_one_group_the_first_wins(self, store: JobStore) -> None:
        keyed = JobSpec(entrypoint=ARGV, idempotency_key="k")
        answers = await together(store, insert("j0"), insert("j1", spec=keyed), insert("j2", spec=keyed), insert("j3"))
        assert outcomes(answers) == [1, 1, "lost", 1]
        assert isinstance(answers[2], Lost)
        assert answers[2].existing == "j1"

    async def test_a_job_id_is_taken_once(self, store: JobStore) -> None:
        answers = await together(store, insert("j1"), insert("j1", caller="bob"))
        assert outcomes(answers) == [1, "lost"]
        row = await store.get("j1")
        assert row is not None
        assert row.caller == "alice"

    # -- bindings -------------------------------------------------------------------------------------------------------

    async def test_the_newest_binding_of_a_pod_says_who_used_it_last(self, store: JobStore) -> None:
        await store.write(
            running("j1", start=start("j1", version=0, pods=("p1", "p2"), retire_after=(False, True), tag="t"))
        )
        await store.write(running("j2", start=start("j2", version=0, pods=("p2",), caller="bob", queue="q2")))
        found = {str(b.pod): b for b in await store.bindings(["p1", "p2", "p3"])}
        assert set(found) == {"p1", "p2"}
        assert (found["p1"].attempt, found["p1"].tag, found["p1"].retire_after) == ("j1:0", "t", False)
        assert (found["p2"].attempt, found["p2"].caller, found["p2"].queue, found["p2"].tag) == (
            "j2:0",
            "bob",
            "q2",
            None,
        )

    async def test_the_last_of_two_starts_in_one_group_is_the_newest_binding(self, store: JobStore) -> None:
        await store.write(insert("j1"))
        again = start("j2", version=0, pods=("p1",))
        await together(
            store, start("j1", pods=("p1",)), running("j2", start=again), running("j3", start=start("j3", pods=("p9",)))
        )
        (found,) = await store.bindings(["p1"])
        assert found.attempt == "j2:0"

    async def test_bindings_of_many_pods_are_found(self, store: JobStore) -> None:
        pods = tuple(f"p{n}" for n in range(1200))
        await store.write(running(start=start(version=0, pods=pods, retire_after=(False,) * len(pods))))
        assert {b.pod for b in await store.bindings([*pods, "other"])} == set(pods)

    # -- reading --------------------------------------------------------------------------------------------------------

    async def test_pages_are_newest_first_and_complete(self, store: JobStore) -> None:
        await together(store, *(insert(f"j{n}") for n in range(25)))
        seen: list[str] = []
        cursor = None
        for _ in range(3):
            rows, cursor = await store.page(JobFilter(caller="alice", limit=10, cursor=cursor))
            seen += [r.job for r in rows]
            await store.write(insert(f"new{len(seen)}"))
        assert seen == [f"j{n}" for n in reversed(range(25))]
        assert cursor is None

    async def test_pages_are_filtered(self, store: JobStore) -> None:
        await together(
            store,
            insert("a", spec=JobSpec(entrypoint=ARGV, sku="h200", labels={"k": "v", "x": "1"}, run="r")),
            insert("b", spec=JobSpec(entrypoint=ARGV, queue="q", labels={"k": "w"})),
            running("c"),
            insert("d", caller="bob", spec=JobSpec(entrypoint=ARGV, labels={"k": "v"})),
        )
        assert await ids(store) == ["d", "c", "b", "a"]
        assert await ids(store, caller="alice") == ["c", "b", "a"]
        assert await ids(store, caller="alice", labels={"k": "v"}) == ["a"]
        assert await ids(store, labels={"k": "v", "x": "1"}) == ["a"]
        assert await ids(store, labels={"k' OR 1=1 --": "v"}) == []
        assert await ids(store, sku="h200") == ["a"]
        assert await ids(store, queue="q") == ["b"]
        assert await ids(store, run="r") == ["a"]
        assert await ids(store, states=(RUNNING, FAILED)) == ["c"]
        assert await ids(store, states=()) == []

    @pytest.mark.parametrize("cursor", ["", "x", "-1", "1; DROP TABLE jobs", "٣"])
    async def test_a_cursor_that_is_none_of_ours_is_refused(self, store: JobStore, cursor: str) -> None:
        with pytest.raises(BadRequest):
            await store.page(JobFilter(cursor=cursor))

    async def test_unfinished_jobs_come_oldest_first(self, store: JobStore) -> None:
        await together(store, running("a"), insert("b"), insert("c", state=PENDING), running("d"), end("d"))
        assert [r.job for r in await store.unfinished()] == ["a", "b", "c"]

    async def test_ends_can_be_read_from_any_place_on(self, store: JobStore) -> None:
        await together(store, *(running(f"j{n}") for n in range(5)), running("other", caller="bob"))
        await together(store, *(end(f"j{n}") for n in (3, 0, 4)), end("other"))
        rows = await store.ended_since("alice", 0, 10)
        assert [r.job for r in rows] == ["j3", "j0", "j4"]
        assert [r.job for r in await store.ended_since("alice", rows[0].seq, 10)] == ["j0", "j4"]
        assert [r.job for r in await store.ended_since("alice", 0, 2)] == ["j3", "j0"]
        assert await store.ended_since("alice", await store.newest_seq("alice"), 10) == []

    async def test_the_newest_place_of_a_caller_moves_with_every_change(self, store: JobStore) -> None:
        assert await store.newest_seq("alice") == 0
        for write in (insert("a"), start("a"), end("a", version=2)):
            won = await store.write(write)
            assert isinstance(won, Won)
            assert await store.newest_seq("alice") == won.seq
        assert await store.newest_seq("bob") == 0

    async def test_many_jobs_are_read_in_the_order_asked_for(self, store: JobStore) -> None:
        names = [f"j{n}" for n in range(30)]
        await together(store, *(insert(n) for n in names))
        asked = [*reversed(names), "nobody"]
        assert [r.job for r in await store.get_many(asked)] == asked[:-1]

    async def test_jobs_are_counted_by_state(self, store: JobStore) -> None:
        run = JobSpec(entrypoint=ARGV, run="r")
        await together(
            store, insert("a", spec=run), running("b", spec=run), end("b"), insert("c"), insert("d", caller="bob")
        )
        assert await store.counts("alice", None) == {"QUEUED": 2, "SUCCEEDED": 1}
        assert await store.counts("alice", "r") == {"QUEUED": 1, "SUCCEEDED": 1}
        assert await store.counts(None, None) == {"QUEUED": 3, "SUCCEEDED": 1}
        assert await store.counts("nobody", None) == {}

    async def test_large_specs_and_results_come_back_whole(self, store: JobStore) -> None:
        spec = JobSpec(entrypoint=Entrypoint(function=FunctionEntry(args="A" * 90_000)))
        await together(store, *(running(f"j{n}", spec=spec) for n in range(20)))
        await together(store, *(end(f"j{n}", result=bytes(64 * 1024)) for n in range(20)))
        row = await store.get("j7")
        assert row is not None
        assert (row.spec, row.result) == (spec, bytes(64 * 1024))

    async def test_facts_that_are_no_json_are_refused_to_their_sender_alone(self, store: JobStore) -> None:
        await store.write(running())
        answer = store.write(end(facts={"when": object()}))
        other = store.write(insert("j2"))
        assert outcomes([await other]) == [1]
        with pytest.raises(TypeError):
            await answer
        row = await store.get("j1")
        assert row is not None
        assert row.state is RUNNING
        assert json.dumps(row.facts) == "{}"
