"""The log store in a directory and the one in memory; what a killed broker leaves."""

import errno
import os
from pathlib import Path

import pytest

from firepool_broker.conformance.logs import LogStoreConformance
from firepool_broker.conformance.memory_parts import MemoryLogs
from firepool_broker.shell.blobs.joblogs import GATHER_BYTES, LogFiles
from firepool_broker.shell.ports import LogStore
from firepool_wire.errors import StoreUnavailable


class TestLogFiles(LogStoreConformance):
    @pytest.fixture
    def logs(self, tmp_path: Path) -> LogStore:
        return LogFiles(tmp_path)


class TestMemoryLogs(LogStoreConformance):
    @pytest.fixture
    def logs(self) -> LogStore:
        return MemoryLogs()


def frames(count: int, size: int = 1_000) -> list[tuple[bytes, int]]:
    """Frames of an agent's event log: bytes and the offset behind them."""
    return [(b"%06d" % n * (size // 6), (n + 1) * (size + 6)) for n in range(count)]


def replay(logs: LogStore, events: list[tuple[bytes, int]]) -> None:
    """Read the agent's event log again from its begin."""
    for data, offset in events:
        logs.append("j:0", 0, 1, data, offset)


@pytest.mark.parametrize("killed_after", [0, 1, 10, 33, 66, 99, 100])
def test_a_log_is_whole_after_a_kill_at_any_frame(tmp_path: Path, killed_after: int) -> None:
    events = frames(100)
    replay(LogFiles(tmp_path), events[:killed_after])  # and is gone, with all that was in memory
    logs = LogFiles(tmp_path)
    known = logs.event_offset("j:0", 0)
    assert logs.size("j:0", 0) == sum(len(d) for d, offset in events if offset <= known)
    replay(logs, [e for e in events if e[1] > known])
    logs.finish("j:0", 0)
    assert LogFiles(tmp_path).read("j:0", 0, 0, 1 << 20) == b"".join(d for d, _ in events)


@pytest.mark.parametrize("torn", [0, 1, 5_000, 40_000])
def test_bytes_whose_position_was_not_written_are_cut_off(tmp_path: Path, torn: int) -> None:
    events = frames(60)
    replay(LogFiles(tmp_path), events)
    (part,) = tmp_path.rglob("*.part")
    with part.open("ab") as file:
        file.write(b"#" * torn)
    logs = LogFiles(tmp_path)
    replay(logs, events)
    logs.finish("j:0", 0)
    assert logs.read("j:0", 0, 0, 1 << 20) == b"".join(d for d, _ in events)


def test_bytes_before_the_first_position_are_cut_off(tmp_path: Path) -> None:
    replay(LogFiles(tmp_path), frames(60))
    (position,) = tmp_path.rglob("*.pos")
    position.unlink()
    logs = LogFiles(tmp_path)
    assert logs.event_offset("j:0", 0) == 0
    logs.append("j:0", 0, 1, b"short", 11)
    logs.finish("j:0", 0)
    assert logs.read("j:0", 0, 0, 1 << 20) == b"short"


def test_a_log_that_a_power_cut_shortened_is_asked_for_again(tmp_path: Path) -> None:
    events = frames(60)
    replay(LogFiles(tmp_path), events)
    (part,) = tmp_path.rglob("*.part")
    os.truncate(part, 100)
    logs = LogFiles(tmp_path)
    assert (logs.event_offset("j:0", 0), logs.size("j:0", 0)) == (0, 0)
    replay(logs, events)
    logs.finish("j:0", 0)
    assert logs.read("j:0", 0, 0, 1 << 20) == b"".join(d for d, _ in events)


def test_a_finished_log_is_one_file(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path)
    for job, size in (("long", 3 * GATHER_BYTES), ("short", 10), ("empty", 0)):
        if size:
            logs.append(f"{job}:0", 0, 1, b"x" * size, size)
        logs.finish(f"{job}:0", 0)
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["empty:0.0.log", "long:0.0.log", "short:0.0.log"]
    again = LogFiles(tmp_path)
    assert all(again.finished(f"{job}:0", 0) for job in ("long", "short", "empty"))


def test_an_attempts_name_is_never_a_path(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path / "root")
    logs.append("../../x:0", 0, 1, b"data", 9)
    logs.finish("../../x:0", 0)
    assert logs.read("../../x:0", 0, 0, 9) == b"data"
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_a_full_disk_refuses_the_frame_and_the_log_goes_on_when_there_is_room(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path)
    events = frames(100)
    replay(logs, events[:40])
    # A directory in the file's place makes every write of it fail, as a full disk would.
    (part,) = tmp_path.rglob("*.part")
    part.rename(part.with_suffix(".aside"))
    part.mkdir()
    done = 40
    with pytest.raises(StoreUnavailable) as refused:
        for data, offset in events[40:]:
            logs.append("j:0", 0, 1, data, offset)
            done += 1
    assert refused.value.details["errno"] == errno.EISDIR
    assert logs.event_offset("j:0", 0) == events[done - 1][1]
    with pytest.raises(StoreUnavailable):
        logs.finish("j:0", 0)
    part.rmdir()
    part.with_suffix(".aside").rename(part)
    replay(logs, events)
    logs.finish("j:0", 0)
    assert logs.read("j:0", 0, 0, 1 << 20) == b"".join(d for d, _ in events)


def test_a_sweep_removes_only_old_logs_of_jobs_that_are_over(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path)
    for job in ("old", "kept", "young"):
        logs.append(f"{job}:0", 0, 1, b"x" * GATHER_BYTES, 1 << 20)
        if job != "kept":
            logs.finish(f"{job}:0", 0)
    for path in tmp_path.glob("*/*"):
        if not path.name.startswith("young"):
            os.utime(path, (1, 1))
    assert logs.sweep({"kept"}, 3600) == 1
    assert [logs.size(f"{job}:0", 0) for job in ("old", "kept", "young")] == [0, GATHER_BYTES, GATHER_BYTES]


def test_an_orderly_end_keeps_what_was_in_memory(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path)
    logs.append("j:0", 0, 1, b"last words", 42)
    logs.flush()
    assert LogFiles(tmp_path).read("j:0", 0, 0, 99) == b"last words"
