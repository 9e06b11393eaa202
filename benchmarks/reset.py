"""How long a pod's verified reset takes after jobs that left something, and whether anything ever survives one (paper C.3).

Real pods of the local provider, driven through the broker's own agents client; the time is that of the `reset` call, over HTTP,
until its answer (and where bytes have to come back first: until the pod is claimable). Scenarios take turns, so that every round
sees each of them once. Survivors are counted from outside the pods, by the user ids that their jobs were given.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.harness import Context
from benchmarks.pods import Pod, Pods, pods
from benchmarks.stats import percentile

NAME = "reset"

#: Half of it is the pod's scratch space, which has to hold 1 GiB.
MEMORY_MIB = 3072
WARM_UP = 2
HOSTILE_JOBS = 60
#: How long a hostile job may rage before it is stopped.
RAGE_S = 0.02

FILES = """
import os
for d in range(100):
    os.mkdir(f"d{d}")
    for n in range(100):
        os.close(os.open(f"d{d}/{n}", os.O_CREAT | os.O_WRONLY))
"""
#: Every one of the 50 has left its parent's session and its parent, and ignores SIGTERM; all live when the job ends.
LEFTOVERS = """
import os, signal, time
told, tell = os.pipe()
for _ in range(50):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(tell, b".")
        while True:
            time.sleep(1000)
seen = 0
while seen < 50:
    seen += len(os.read(told, 50))
"""
SHM_1GIB = """
piece = bytes(1 << 20)
with open("/dev/shm/big", "wb", buffering=0) as big:
    for _ in range(1024):
        big.write(piece)
"""
HOSTILE = """
import os, signal
for _ in range(4):
    os.fork()
while True:
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        pass
"""
#: Enters the network namespace of each pid that it reads and listens there.
LISTENER = """
import ctypes, os, socket, sys
libc, kept = ctypes.CDLL(None, use_errno=True), []
for line in sys.stdin:
    with open(f"/proc/{int(line)}/ns/net") as ns:
        if libc.setns(ns.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    kept.append(socket.create_server(("", 5151)))
    print("listening", flush=True)
"""


def uids_of(pod: Pod) -> tuple[int, int] | None:
    """First and last user id, as this machine sees them, that jobs of a pod can have; None: they have none of their own."""
    inside, outside, count = map(int, Path(f"/proc/{pod.agent_pid()}/uid_map").read_text().split()[:3])
    # The pod's own root (inside: 0) runs the agent and what waits for the next job, and never a job.
    return (outside + 1, outside + count - 1) if inside == 0 and outside > 0 and count > 1 else None


def survivors(uids: tuple[int, int]) -> int:
    """Processes of these users on this machine that are not dead."""
    first, last = uids
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines = (entry / "status").read_text().splitlines()
            except OSError:
                continue
            facts = dict(line.split(":", 1) for line in lines if line.startswith(("State", "Uid")))
            found += first <= int(facts["Uid"].split()[0]) <= last and facts["State"].split()[0] not in "ZX"
    return found


@dataclass(slots=True)
class Reset:
    """The benchmark's state: samples in seconds by scenario, and everything that survived."""

    yard: Pods
    survivors: int = 0
    #: Resets after which survivors could be counted.
    counted: int = 0
    #: Processes of hostile jobs that were counted while they raged: a count that never sees any would prove nothing.
    raging: int = 0

    async def after(self, pod: Pod, code: str, *, leftovers: int = 0, settled: bool = False) -> float:
        """Run a job to its end, reset, and return the seconds until the pod was claimable."""
        attempt = await self.yard.begin(pod, [sys.executable, "-S", "-c", code])
        record = await self.yard.finish(pod, attempt)
        if record.exit_code != 0 or record.leftovers < leftovers:
            raise RuntimeError(f"the job did not do what it should: {record}")
        began = time.perf_counter()
        await self.clean(pod, attempt, settled=settled)
        took_s = time.perf_counter() - began
        await self.between(pod, attempt)
        return took_s

    async def clean(self, pod: Pod, attempt: str, *, settled: bool) -> None:
        """Reset; raises where it is not clean."""
        report = await self.yard.reset(pod, attempt)
        if not report.clean:
            raise RuntimeError(f"the reset was not clean: {report.problems}")
        if settled and report.settling_bytes:
            await self.yard.settled(pod)

    async def between(self, pod: Pod, attempt: str) -> None:
        """Off the clock: count survivors, let the trash go, drop records."""
        uids = uids_of(pod)
        if uids is not None:
            self.survivors += survivors(uids)
            self.counted += 1
        await self.yard.settled(pod)
        await self.yard.forget(pod, attempt)

    async def hostile(self, pod: Pod) -> None:
        """One job that kills whatever it may for ever; stopped, then reset."""
        attempt = await self.yard.begin(pod, [sys.executable, "-S", "-c", HOSTILE])
        await self.yard.started(pod, attempt)
        await asyncio.sleep(RAGE_S)
        uids = uids_of(pod)
        if uids is not None:
            self.raging += survivors(uids)
        await self.yard.stop(pod, attempt)
        await self.yard.finish(pod, attempt)
        await self.clean(pod, attempt, settled=False)
        await self.between(pod, attempt)

    async def unclean(self, listener: "subprocess.Popen[str]") -> float:
        """Seconds from a reset that finds an open port to the pod being verified gone."""
        pod = await self.yard.make()
        attempt = await self.yard.begin(pod, [sys.executable, "-S", "-c", "pass"])
        await self.yard.finish(pod, attempt)
        assert listener.stdin is not None
        assert listener.stdout is not None
        listener.stdin.write(f"{pod.agent_pid()}\n")
        listener.stdin.flush()
        if listener.stdout.readline() != "listening\n":
            raise RuntimeError("nothing could be made to listen in the pod")
        began = time.perf_counter()
        report = await self.yard.reset(pod, attempt)
        if report.clean:
            raise RuntimeError("the reset did not see the open port")
        await self.yard.retire(pod, "the reset was not clean")
        return time.perf_counter() - began


@contextmanager
def listening() -> "Iterator[subprocess.Popen[str]]":
    """The process that opens ports in pods."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


async def in_turns(
    ctx: Context, turns: dict[str, tuple[int, Callable[[], Awaitable[float]]]]
) -> dict[str, list[float]]:
    """Every scenario once a round, until each has as many samples as it should."""
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(WARM_UP + max(count for count, _ in turns.values())):
        if ctx.out_of_time(0.75):
            break
        for name, (count, once) in turns.items():
            if round_ < WARM_UP + count:
                took_s = await once()
                if round_ >= WARM_UP:
                    samples[name].append(took_s)
    return samples


async def measure(ctx: Context) -> None:
    """The scenarios in turns, then the hostile jobs."""
    report = ctx.report
    few = 10 if ctx.quick else 30
    async with pods(MEMORY_MIB) as yard:
        pod = await yard.make()
        bench = Reset(yard)
        with listening() as listener:
            turns: dict[str, tuple[int, Callable[[], Awaitable[float]]]] = {
                "clean": (30, lambda: bench.after(pod, "pass")),
                "files_10k": (few, lambda: bench.after(pod, FILES)),
                "leftover_50": (30, lambda: bench.after(pod, LEFTOVERS, leftovers=50)),
                "shm_1gib_claimable": (few, lambda: bench.after(pod, SHM_1GIB, settled=True)),
            }
            if os.geteuid() == 0:
                turns["unclean_to_retired"] = (few, lambda: bench.unclean(listener))
            else:
                report.note("unclean_to_retired: opening a port inside a pod from outside needs root")
            ctx.say(f"{', '.join(turns)} in turns …")
            for name, samples in (await in_turns(ctx, turns)).items():
                report.figure(f"{name}_p50_ms", percentile(samples, 0.5) * 1e3, len(samples))
        ctx.say(f"{HOSTILE_JOBS} hostile jobs …")
        survived = bench.survivors
        for _ in range(HOSTILE_JOBS):
            await bench.hostile(pod)
        if bench.counted and not bench.raging:
            raise RuntimeError(
                "no process of a running job was seen from outside: the count of survivors means nothing"
            )
        if bench.counted:
            report.figure("hostile_survivors", bench.survivors - survived, HOSTILE_JOBS)
            report.figure("survivors", bench.survivors, bench.counted)
        else:
            report.note(
                "survivors: jobs have no user ids of their own here, so nobody can tell them apart from outside"
            )


def run(ctx: Context) -> None:
    """Measure and report."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(ctx))
    for key, most in (
        ("clean_p50_ms", 5),
        ("files_10k_p50_ms", 20),
        ("leftover_50_p50_ms", 25),
        ("shm_1gib_claimable_p50_ms", 200),
        ("unclean_to_retired_p50_ms", 17),
    ):
        ctx.report.bar(key, "<=", most)
    ctx.report.bar("hostile_survivors", "==", 0)
    ctx.report.bar("survivors", "==", 0)
    ctx.report.note(
        "Times are those of the agent's reset as the broker calls it; shm_1gib: until its bytes are free again; unclean: from the "
        "reset that finds an open port to the pod being verified gone."
    )
