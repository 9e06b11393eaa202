"""Group commit: what shares a transaction, and what is true after a full disk, a failed sync, a kill, a second broker."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firepool_broker.conformance.memory import MemoryJobs
from firepool_broker.conformance.stores import end, insert, outcomes, running, start, together
from firepool_broker.shell.rows import JobFilter, Lost, MoveJob, StoreDown, Won, Write
from firepool_broker.shell.store import migrations
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs
from firepool_broker.shell.store.writer import MOST_WRITES, Writer
from firepool_wire.errors import StoreUnavailable
from firepool_wire.jobspec import Entrypoint, JobSpec
from firepool_wire.words import JobState

PATIENCE_S = 30.0


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "store.db")
    await database.open()
    yield database
    await database.aclose()


class Ledger:
    """Counts commits."""

    def __init__(self) -> None:
        self.commits = 0

    def __call__(self) -> None:
        self.commits += 1


class FailingDisk(sqlite3.Connection):
    """A connection whose disk fails the next syncs of a commit."""

    failures = 0

    def execute(self, sql: str, /, *rest: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.failures:
            self.failures -= 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return super().execute(sql, *rest)


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[tuple[Writer, FailingDisk, Ledger]]:
    """A writer without a `Database` around it."""
    path = tmp_path / "bare.db"
    migrations.upgrade(path)
    disk = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=FailingDisk)
    ledger = Ledger()
    writer = Writer(disk, 0, 0, ledger)
    writer.start()
    yield writer, disk, ledger
    await writer.stop()
    disk.close()


# -- groups ---------------------------------------------------------------------------------------------------------------


async def test_what_is_asked_for_in_one_turn_shares_a_commit(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, ledger = bare
    answers = await asyncio.gather(*(writer.write(insert(f"j{n}")) for n in range(MOST_WRITES)))
    assert outcomes(answers) == [1] * MOST_WRITES
    assert ledger.commits == 1


async def test_a_flood_is_cut_into_groups(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, ledger = bare
    await asyncio.gather(*(writer.write(insert(f"j{n}")) for n in range(4 * MOST_WRITES)))
    assert ledger.commits == 4


async def test_other_work_keeps_its_place_between_writes(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, _ = bare
    count = "SELECT count(*) FROM jobs"
    first = writer.write(insert("a"))
    between = writer.do(lambda c: c.execute(count).fetchone()[0])
    last = writer.write(insert("b"))
    assert (await first, await between, await last) == (Won(1, 1), 1, Won(1, 2))


async def test_work_that_raises_is_undone_and_hurts_nobody_else(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, _ = bare

    def breaks(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO callers (name, created_at, limits) VALUES ('x', 0, '{}')")
        raise KeyError("mine")

    broken, other = writer.do(breaks), writer.write(insert())
    with pytest.raises(KeyError):
        await broken
    assert outcomes([await other]) == [1]
    assert await writer.do(lambda c: c.execute("SELECT count(*) FROM callers").fetchone()) == (0,)


async def test_a_write_stands_when_the_one_who_asked_gave_up(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, _ = bare
    writer.write(insert("a")).cancel()
    assert outcomes([await writer.write(start("a"))]) == [2]


async def test_what_was_queued_is_committed_before_the_store_closes(tmp_path: Path) -> None:
    store = SqliteJobs(Database(tmp_path / "store.db"))
    await store.open()
    writes = [asyncio.ensure_future(store.write(insert(f"j{n}"))) for n in range(600)]
    await store.aclose()
    assert outcomes([await w for w in writes]) == [1] * 600
    with pytest.raises(StoreDown):
        await store.write(insert("late"))


async def test_an_impossible_write_hurts_nobody_else_of_its_group(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, _, _ = bare
    nameless = start("d", version=0, pods=(None,))
    group = (insert("a"), running("b"), end("b", retry_count=1 << 70), running("d", start=nameless), insert("c"))
    answers = await asyncio.gather(*(writer.write(w) for w in group), return_exceptions=True)
    assert [isinstance(a, StoreDown) for a in answers] == [False, False, True, True, False]
    assert await writer.do(lambda c: c.execute("SELECT id FROM jobs ORDER BY n").fetchall()) == [("a",), ("b",), ("c",)]
    assert outcomes([await writer.write(end("b"))]) == [2]


JOBS = ["a", "b", "c"]
attempts = st.integers(0, 2)
writes = st.one_of(
    st.builds(
        lambda j, s, k: insert(j, state=s, spec=JobSpec(entrypoint=Entrypoint(argv=("x",)), idempotency_key=k)),
        st.sampled_from(JOBS),
        st.sampled_from([JobState.PENDING, JobState.QUEUED]),
        st.sampled_from([None, None, "k1", "k2"]),
    ),
    st.builds(running, st.sampled_from(JOBS)),
    st.builds(
        lambda j, v, p: start(j, version=v, attempt=f"{j}:{v}", pods=(p,)),
        st.sampled_from(JOBS),
        st.integers(1, 4),
        st.sampled_from(["p1", "p2"]),
    ),
    st.builds(
        lambda j, v, s, r: end(j, version=v, state=s, retry_count=r),
        st.sampled_from(JOBS),
        st.integers(1, 5),
        st.sampled_from([JobState.QUEUED, JobState.QUEUED, JobState.FAILED, JobState.SUCCEEDED]),
        attempts,
    ),
    st.builds(
        lambda j, v, s, c: MoveJob(job=j, version=v, state=s, cancel_requested=c),
        st.sampled_from(JOBS),
        st.none() | st.integers(1, 4),
        st.sampled_from([None, JobState.QUEUED]),
        st.sampled_from([None, True]),
    ),
)


def told(answers: list[Won | Lost]) -> list[Any]:
    """Answers without their words."""
    return [(a.version, a.seq) if isinstance(a, Won) else (a.state, a.existing) for a in answers]


@given(st.lists(st.lists(writes, min_size=1, max_size=12), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_groups_of_writes_do_what_the_model_does(groups: list[list[Write]]) -> None:
    async def compare(folder: str) -> None:
        store, model = SqliteJobs(Database(Path(folder) / "store.db")), MemoryJobs()
        await store.open()
        try:
            for group in groups:
                assert told(await together(store, *group)) == told(await together(model, *group)), group
            for read in ("get", "newest_seq"):
                for name in [*JOBS, "alice"]:
                    assert await getattr(store, read)(name) == await getattr(model, read)(name)
            assert (await store.page(JobFilter()))[0] == (await model.page(JobFilter()))[0]
            assert await store.counts(None, None) == await model.counts(None, None)
            assert await store.ended_since("alice", 0, 99) == await model.ended_since("alice", 0, 99)
            pods = ["p1", "p2", "pod1"]
            assert set(await store.bindings(pods)) == set(await model.bindings(pods))
        finally:
            await store.aclose()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(folder))


async def test_the_attempts_before_the_newest_are_kept_with_their_facts(tmp_path: Path) -> None:
    store = SqliteJobs(Database(tmp_path / "store.db"))
    await store.open()
    try:
        await store.write(running())
        for n in range(12):
            facts = {"error": {"code": "HostLost"}, "n": n}
            await store.write(
                end(
                    attempt=f"j1:{n}",
                    version=2 * n + 1,
                    state=JobState.QUEUED,
                    retry_count=n + 1,
                    facts=facts,
                    at=200.0 + n,
                )
            )
            await store.write(start(attempt=f"j1:{n + 1}", version=2 * n + 2, pods=(f"p{n}",), at=300.0 + n))
        past = await store.attempts("j1")
        assert [p.attempt for p in past] == [f"j1:{n}" for n in range(12)]
        assert [p.facts["n"] for p in past] == list(range(12))
        assert (past[3].pods, past[3].started_at, past[3].ended_at, past[3].path) == (("p2",), 302.0, 203.0, "warm")
        assert await store.attempts("j") == []
    finally:
        await store.aclose()


# -- a disk that fails ------------------------------------------------------------------------------------------------------


async def test_a_full_disk_fails_the_whole_group_and_leaves_nothing_of_it(database: Database) -> None:
    store = SqliteJobs(database)
    await store.write(insert("before"))
    pages = await database.writer.do(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await database.writer.do(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 4}").fetchall() and None)
    large = JobSpec(entrypoint=Entrypoint(argv=("x" * 5_000,)))
    group = [store.write(w) for w in (start("before"), *(insert(f"j{n}", spec=large) for n in range(50)))]
    for answer in await asyncio.gather(*group, return_exceptions=True):
        assert isinstance(answer, StoreDown)
        assert not answer.unknown
    assert [(r.job, r.state, r.version) for r in (await store.page(JobFilter()))[0]] == [("before", JobState.QUEUED, 1)]
    assert await store.bindings(["pod1"]) == []
    await database.writer.do(lambda c: c.execute("PRAGMA max_page_count = 1000000").fetchall() and None)
    assert outcomes([await store.write(start("before"))]) == [2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
async def test_jobs_go_on_once_a_full_file_system_has_room_again(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_200_000))
    store = SqliteJobs(Database(small_disk / "store.db"))
    await store.open()
    try:
        large = JobSpec(entrypoint=Entrypoint(argv=("x" * 60_000,)))
        kept, refused = [], []
        for n in range(20):
            try:
                assert isinstance(await store.write(insert(f"j{n}", spec=large)), Won)
                kept.append(f"j{n}")
            except StoreDown as down:
                assert not down.unknown
                refused.append(f"j{n}")
        assert kept
        assert refused
        assert sorted(r.job for r in await store.unfinished()) == sorted(kept)
        filler.unlink()
        assert outcomes([await store.write(insert(refused[0], spec=large))]) == [1]
    finally:
        await store.aclose()
    again = SqliteJobs(Database(small_disk / "store.db"))
    await again.open()
    try:
        assert {r.job for r in await again.unfinished()} == {*kept, refused[0]}
    finally:
        await again.aclose()


async def test_a_commit_whose_sync_fails_is_known_to_be_gone_once_the_next_is_through(
    bare: tuple[Writer, FailingDisk, Ledger],
) -> None:
    writer, disk, _ = bare
    disk.failures = 1
    for answer in await asyncio.gather(writer.write(insert("a")), writer.write(insert("b")), return_exceptions=True):
        assert isinstance(answer, StoreDown)
        assert not answer.unknown
    assert await writer.write(start("a")) == Lost("there is no such job")
    assert outcomes([await writer.write(insert("a"))]) == [1]


async def test_a_commit_whose_outcome_nobody_can_know_says_so(bare: tuple[Writer, FailingDisk, Ledger]) -> None:
    writer, disk, _ = bare
    disk.failures = 2
    with pytest.raises(StoreDown) as down:
        await writer.write(insert("a"))
    assert down.value.unknown
    assert outcomes([await writer.write(insert("b"))]) == [1], "the store goes on when the disk does"


async def test_a_broken_file_is_a_typed_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"this is no database" * 500)
    with pytest.raises(StoreDown):
        await Database(path).open()
    with pytest.raises(StoreDown):
        await Database(tmp_path / "store.db" / "below" / "store.db").open()


# -- one leader -------------------------------------------------------------------------------------------------------------


async def test_a_second_broker_on_the_same_file_is_refused_by_name(database: Database, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=str(os.getpid())):
        await Database(tmp_path / "store.db").open()
    assert outcomes([await SqliteJobs(database).write(insert())]) == [1]


async def test_the_file_is_free_again_after_an_orderly_end(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        database = Database(tmp_path / "store.db")
        await database.open()
        assert database.epoch == epoch
        await database.aclose()


async def test_a_broker_that_is_not_the_leader_any_more_writes_nothing(database: Database, tmp_path: Path) -> None:
    store = SqliteJobs(database)
    await store.write(insert("a"))
    usurper = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    usurper.execute("UPDATE leader SET epoch = epoch + 1")
    try:
        for write in (start("a"), insert("b")):
            with pytest.raises(StoreDown, match="another broker leads"):
                await store.write(write)
        with pytest.raises(StoreDown, match="another broker leads"):
            await database.writer.do(lambda c: c.execute("DELETE FROM jobs").rowcount)
        assert usurper.execute("SELECT id, version FROM jobs").fetchall() == [("a", 1)]
    finally:
        usurper.close()


async def test_places_in_the_order_of_changes_go_on_after_a_restart(tmp_path: Path) -> None:
    last = 0
    for n in range(3):
        store = SqliteJobs(Database(tmp_path / "store.db"))
        await store.open()
        for answer in await together(store, insert(f"a{n}"), insert(f"b{n}")):
            assert isinstance(answer, Won)
            assert answer.seq > last
            last = answer.seq
        await store.aclose()


async def test_the_file_is_readable_by_its_owner_only(database: Database, tmp_path: Path) -> None:
    await SqliteJobs(database).write(insert())
    modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes


# -- kills ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_killed_broker_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    path = tmp_path / "store.db"
    acknowledged: set[tuple[str, str]] = set()
    for life in range(6):
        acknowledged |= _killed_after(path, f"life{life}", chance.randrange(1, 400))
        store = SqliteJobs(Database(path))
        await store.open()
        try:
            rows = {r.job: r for r in await _all(store)}
            for kind, job in acknowledged:
                row = rows[job]
                if kind == "ended":
                    assert (row.state, row.result) == (JobState.SUCCEEDED, b"r" * 500), f"seed {seed}"
            # Nothing half: a row is there with its binding and all its columns, or not at all.
            for row in rows.values():
                assert (row.state, row.version) in {(JobState.RUNNING, 1), (JobState.SUCCEEDED, 2)}, f"seed {seed}"
            check = sqlite3.connect(path)
            assert check.execute("SELECT count(*), count(DISTINCT job) FROM bindings").fetchone() == (len(rows),) * 2
            assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",), f"seed {seed}"
            check.close()
        finally:
            await store.aclose()


def _killed_after(path: Path, prefix: str, answers: int) -> set[tuple[str, str]]:
    """Run a broker's store in a process, kill it after so many answers; what it had acknowledged by then."""
    child = Path(__file__).with_name("crash_child.py")
    process = subprocess.Popen([sys.executable, str(child), str(path), prefix], stdout=subprocess.PIPE)
    assert process.stdout is not None
    said: list[bytes] = []
    try:
        with process.stdout as lines:
            for line in lines:
                said.append(line)
                if len(said) > answers:
                    break
            process.kill()
            said += lines.read().splitlines(keepends=True)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert said[0] == b"open\n"
    whole = [line.decode().split() for line in said[1:] if line.endswith(b"\n")]
    return {(kind, job) for kind, job in whole}


async def _all(store: SqliteJobs) -> list[Any]:
    rows: list[Any] = []
    cursor = None
    while True:
        page, cursor = await store.page(JobFilter(limit=1000, cursor=cursor))
        rows += page
        if cursor is None:
            return rows
