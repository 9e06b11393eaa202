"""What a log store must do, in sentences.

A test file subclasses `LogStoreConformance` and provides the fixture `logs`: an empty store.
"""

import asyncio

import pytest

from firepool_broker.shell.ports import LogStore

PATIENCE_S = 10.0


class LogStoreConformance:
    """Sentences about `ports.LogStore`."""

    async def test_a_log_reads_back_by_offset_while_it_grows(self, logs: LogStore) -> None:
        logs.append("j:0", 0, 1, b"hello ", 20)
        assert logs.read("j:0", 0, 0, 100) == b"hello "
        logs.append("j:0", 0, 2, b"world", 40)
        assert logs.read("j:0", 0, 0, 100) == b"hello world"
        assert logs.read("j:0", 0, 3, 5) == b"lo wo"
        assert logs.read("j:0", 0, 11, 5) == b""
        assert logs.read("j:0", 0, 500, 5) == b""
        assert (logs.size("j:0", 0), logs.finished("j:0", 0)) == (11, False)

    async def test_a_long_log_reads_back_at_every_offset(self, logs: LogStore) -> None:
        whole = b"".join(b"line %d\n" % n for n in range(20_000))
        for at in range(0, len(whole), 7_001):
            logs.append("j:0", 0, 1, whole[at : at + 7_001], at + 7_001)
            assert logs.size("j:0", 0) == min(at + 7_001, len(whole))
        for offset in (0, 1, 32_000, 70_000, len(whole) - 3):
            assert logs.read("j:0", 0, offset, 50_000) == whole[offset : offset + 50_000]
        logs.finish("j:0", 0)
        assert logs.read("j:0", 0, 0, len(whole)) == whole

    async def test_attempts_and_ranks_have_logs_of_their_own(self, logs: LogStore) -> None:
        logs.append("j:0", 0, 1, b"a", 1)
        logs.append("j:0", 1, 1, b"b", 1)
        logs.append("j:1", 0, 1, b"c", 1)
        assert [logs.read(a, r, 0, 9) for a, r in (("j:0", 0), ("j:0", 1), ("j:1", 0), ("j:1", 1))] == [
            b"a",
            b"b",
            b"c",
            b"",
        ]

    async def test_a_frame_that_is_there_already_is_not_added_again(self, logs: LogStore) -> None:
        logs.append("j:0", 0, 1, b"one", 10)
        logs.append("j:0", 0, 1, b"one", 10)
        assert logs.event_offset("j:0", 0) == 10
        logs.append("j:0", 0, 1, b"two", 20)
        logs.append("j:0", 0, 1, b"one", 10)
        assert logs.read("j:0", 0, 0, 99) == b"onetwo"
        assert logs.event_offset("j:0", 0) == 20

    async def test_a_log_that_nobody_wrote_is_empty_and_not_finished(self, logs: LogStore) -> None:
        assert (logs.size("j:0", 0), logs.event_offset("j:0", 0), logs.finished("j:0", 0)) == (0, 0, False)
        assert logs.read("j:0", 0, 0, 9) == b""

    @pytest.mark.parametrize("data", [b"", b"x", b"y" * 100_000])
    async def test_a_finished_log_stays_as_it_is(self, logs: LogStore, data: bytes) -> None:
        if data:
            logs.append("j:0", 0, 1, data, 30)
        logs.finish("j:0", 0)
        logs.finish("j:0", 0)
        assert logs.finished("j:0", 0)
        logs.append("j:0", 0, 1, b"late", 1 << 40)
        assert logs.read("j:0", 0, 0, 1 << 20) == data
        assert logs.size("j:0", 0) == len(data)
        assert logs.event_offset("j:0", 0) >= 1 << 40, "every frame is in it"

    async def test_followers_hear_of_more_and_of_the_end(self, logs: LogStore) -> None:
        async with asyncio.timeout(PATIENCE_S):
            follower = asyncio.create_task(logs.more("j:0", 0, 0))
            other = asyncio.create_task(logs.more("j:0", 0, 3))
            await asyncio.sleep(0)
            assert not follower.done()
            logs.append("j:0", 0, 1, b"abc", 9)
            await follower
            assert not other.done()
            logs.finish("j:0", 0)
            await other
            await logs.more("j:0", 0, 99)

    async def test_who_asks_late_does_not_wait(self, logs: LogStore) -> None:
        logs.append("j:0", 0, 1, b"abc", 9)
        async with asyncio.timeout(PATIENCE_S):
            await logs.more("j:0", 0, 2)

    async def test_a_follower_that_gives_up_leaves_the_others_waiting(self, logs: LogStore) -> None:
        first, second = (asyncio.create_task(logs.more("j:0", 0, 0)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with asyncio.timeout(PATIENCE_S):
            logs.append("j:0", 0, 1, b"abc", 9)
            await second
