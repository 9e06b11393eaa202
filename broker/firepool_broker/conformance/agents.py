"""What an agent and its client must do together, in sentences; run against the real agent and every fake.

A test file subclasses `AgentConformance` and provides two async fixtures: `agents`, an `AgentClient`, and `pod`, the
address of a fresh agent that can run argv jobs (`/bin/sh` exists for it, or it acts as if).
"""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from firepool_broker.shell.ports import AgentClient
from firepool_wire.agentapi import ExitRecord, Launch, Prepare, Reset, Stop
from firepool_wire.errors import Cancelled, FirepoolError, PackageError
from firepool_wire.frames import Frame, Kind
from firepool_wire.version import PROTOCOL

PATIENCE_S = 20.0


def prepare(caller: str = "alice", start: str = "exec", *, within_s: float = 10.0) -> Prepare:
    """A prepare by a caller, refused after `within_s`."""
    deadline = time.clock_gettime(time.CLOCK_BOOTTIME) + within_s
    return Prepare(caller=caller, person=caller, queue="default", tag=None, deadline_s=deadline, start=start)


def launch(argv: list[str], *, within_s: float = 10.0) -> Launch:
    """A launch of a command."""
    return Launch(deadline_s=time.clock_gettime(time.CLOCK_BOOTTIME) + within_s, argv=argv, start_timeout_s=10.0)


async def frames(agents: AgentClient, pod: str, attempt: str, offset: int = 0) -> list[Frame]:
    """The event log from `offset` to its end."""
    async with asyncio.timeout(PATIENCE_S):
        return [frame async for frame in agents.events(pod, attempt, offset)]


def exit_of(found: list[Frame]) -> ExitRecord:
    """The exit record in an event log."""
    return next(ExitRecord.from_json(f.json()) for f in found if f.kind is Kind.EXIT)


class AgentConformance:
    """Sentences about `ports.AgentClient` with an agent behind it."""

    #: Commands of the agent under test: one that prints "hello", one that waits for its end.
    hello_argv = ["/bin/sh", "-c", "echo hello"]
    wait_argv = ["/bin/sh", "-c", "sleep 600"]

    async def test_an_agent_says_who_it_is(self, agents: AgentClient, pod: str) -> None:
        hello = await agents.hello(pod)
        assert hello.protocol == PROTOCOL
        assert hello.boot_id
        assert (await agents.hello(pod)).boot_id == hello.boot_id

    async def test_a_prepared_attempt_runs_only_when_it_is_launched(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j1:0", prepare())
        assert (await agents.status(pod, "j1:0")).state == "prepared"
        await agents.launch(pod, "j1:0", launch(self.hello_argv))
        found = await frames(agents, pod, "j1:0")
        assert b"hello" in b"".join(f.payload[1:] for f in found if f.kind is Kind.LOG)
        assert exit_of(found).exit_code == 0
        assert found[-1].kind is Kind.END
        assert found[0].kind in (Kind.STARTED, Kind.NOTE)
        await self._clean(agents, pod, "j1:0")

    async def test_a_repeated_call_gets_the_first_answer(self, agents: AgentClient, pod: str) -> None:
        first = await agents.prepare(pod, "j2:0", prepare())
        assert (await agents.prepare(pod, "j2:0", prepare())).pid == first.pid
        await agents.launch(pod, "j2:0", launch(self.hello_argv))
        await agents.launch(pod, "j2:0", launch(self.hello_argv))
        logs = [f for f in await frames(agents, pod, "j2:0") if f.kind is Kind.STARTED]
        assert len(logs) == 1
        await self._clean(agents, pod, "j2:0")

    async def test_the_event_log_continues_at_any_frame_boundary(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j3:0", prepare())
        await agents.launch(pod, "j3:0", launch(self.hello_argv))
        everything = await frames(agents, pod, "j3:0")
        for n, frame in enumerate(everything[:-1]):
            rest = await frames(agents, pod, "j3:0", frame.end)
            assert rest == everything[n + 1 :]
        await self._clean(agents, pod, "j3:0")

    async def test_a_stopped_attempt_ends_with_the_error_it_was_stopped_for(
        self, agents: AgentClient, pod: str
    ) -> None:
        await agents.prepare(pod, "j4:0", prepare())
        await agents.launch(pod, "j4:0", launch(self.wait_argv))
        await agents.stop(pod, "j4:0", Stop(grace_s=0.1, error=Cancelled("enough").to_json()))
        record = exit_of(await frames(agents, pod, "j4:0"))
        assert record.error is not None
        assert record.error["code"] == "Cancelled"
        await self._clean(agents, pod, "j4:0")

    async def test_an_abandoned_attempt_is_unknown_and_cannot_be_launched(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j5:0", prepare())
        await agents.abandon(pod, "j5:0")
        assert (await agents.status(pod, "j5:0")).state == "unknown"
        with pytest.raises(FirepoolError):
            await agents.launch(pod, "j5:0", launch(self.hello_argv))

    async def test_an_attempt_that_was_never_prepared_is_unknown(self, agents: AgentClient, pod: str) -> None:
        assert (await agents.status(pod, "nobody:0")).state == "unknown"
        with pytest.raises(FirepoolError):
            await agents.launch(pod, "nobody:0", launch(self.hello_argv))

    async def test_an_exit_record_is_kept_until_it_is_acknowledged(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j6:0", prepare())
        await agents.launch(pod, "j6:0", launch(self.hello_argv))
        await frames(agents, pod, "j6:0")
        assert (await agents.reset(pod, Reset(attempt="j6:0"))).clean
        status = await agents.status(pod, "j6:0")
        assert status.state == "ended"
        assert status.exit is not None
        assert "j6:0" in (await agents.hello(pod)).attempts
        await agents.ack(pod, "j6:0")
        assert "j6:0" not in (await agents.hello(pod)).attempts

    async def test_the_last_user_of_a_pod_is_on_its_agents_own_record(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j7:0", prepare("bob"))
        last = (await agents.hello(pod)).last_user
        assert last is not None
        assert last["caller"] == "bob"
        await agents.abandon(pod, "j7:0")

    async def test_a_blob_is_in_the_pods_cache_once_its_bytes_fit_the_digest(
        self, agents: AgentClient, pod: str, tmp_path: Path
    ) -> None:
        data = b"x" * 300_000
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        file = tmp_path / "blob"
        file.write_bytes(data)
        assert not await agents.has_blob(pod, digest)
        await agents.put_blob(pod, digest, file)
        assert await agents.has_blob(pod, digest)
        file.write_bytes(b"other")
        wrong = "sha256:" + "0" * 64
        with pytest.raises(PackageError):
            await agents.put_blob(pod, wrong, file)
        assert not await agents.has_blob(pod, wrong)

    async def test_a_pod_is_clean_after_a_reset(self, agents: AgentClient, pod: str) -> None:
        await agents.prepare(pod, "j8:0", prepare())
        await agents.launch(pod, "j8:0", launch(self.hello_argv))
        await frames(agents, pod, "j8:0")
        report = await agents.reset(pod, Reset(attempt="j8:0"))
        assert report.clean, report.problems
        await agents.settled(pod)
        assert (await agents.stats(pod)).attempt is None
        await agents.ack(pod, "j8:0")

    @staticmethod
    async def _clean(agents: AgentClient, pod: str, attempt: str) -> None:
        assert (await agents.reset(pod, Reset(attempt=attempt))).clean
        await agents.ack(pod, attempt)
