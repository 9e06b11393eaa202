"""The thread through the whole house: a real broker process, real pods, plain HTTP; killed and started again."""

import base64
import hashlib
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import cloudpickle
import pytest

from firepool_wire import codec
from firepool_wire.frames import Items, ItemStatus, Kind, Parser
from tests.e2e.process import BrokerProcess, broker

pytestmark = [pytest.mark.linux, pytest.mark.slow]


def pools_file(folder: Path, text: str) -> str:
    file = folder / "pools.toml"
    file.write_text(text)
    return str(file)


CPU = """
[pools.cpu]
max_count = 3
min_count = 1
max_idle_count = 3
step = 3
isolation = "portable"
[pools.cpu.shape]
memory_mib = 512
"""


def values(data: bytes) -> list[object]:
    """What the result frames of a job say."""
    items = Items()
    found = []
    for frame in Parser().feed(data):
        assert frame.kind is Kind.RESULT
        item = items.feed(frame.payload)
        if item is not None and item[1] is ItemStatus.VALUE:
            found.append(codec.decode(item[2], None, None))
    return found


def function_spec(one: BrokerProcess, function: object, *args: object) -> dict[str, object]:
    """A function job whose payload is in the blob store."""
    payload = cloudpickle.dumps(function)
    digest = "sha256:" + hashlib.sha256(payload).hexdigest()
    one.json("PUT", f"/v1/blobs/{digest}", payload)
    packed = codec.pack_args([(args, {})], cloudpickle.dumps, lambda _: None)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    entry = {"payload": digest, "args": base64.b64encode(packed).decode(), "python": version}
    return {"entrypoint": {"function": entry}}


def test_commands_and_functions_run_in_pods_and_come_back(tmp_path: Path) -> None:
    with broker(tmp_path, "--pools", pools_file(tmp_path, CPU)) as one:
        job = one.submit({"entrypoint": {"argv": ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]}})
        body = one.done(job)
        assert (body["state"], body["exit_code"], body["error"]["code"]) == ("FAILED", 3, "NonZeroExit")
        assert sorted(one.call("GET", f"/v1/jobs/{job}/logs")[1].split()) == [b"err", b"out"]

        base = 40

        def add(n: int) -> dict[str, int]:
            return {"sum": base + n}

        job = one.submit(function_spec(one, add, 2))
        body = one.done(job)
        assert body["state"] == "SUCCEEDED", body
        assert values(one.call("GET", f"/v1/jobs/{job}/result")[1]) == [{"sum": 42}]

        spec = {"entrypoint": {"argv": ["/bin/sh", "-c", "echo content > kept.txt"]}, "outputs": ["*.txt"]}
        job = one.submit(spec)
        assert one.done(job)["path"] == "warm"
        assert one.call("GET", f"/v1/jobs/{job}/outputs/kept.txt")[1] == b"content\n"


def test_one_home_has_one_broker_and_a_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    with broker(tmp_path, "--pools", pools_file(tmp_path, CPU)) as one:
        job = one.submit({"entrypoint": {"argv": ["/bin/true"]}})
        one.done(job)
        other = subprocess.run(
            [sys.executable, "-m", "firepool_broker", "--home", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert other.returncode == 75
        assert str(one.process.pid) in other.stderr  # type: ignore[union-attr]
        address = one.address
        assert one.stop() == 0
        assert not (tmp_path / "broker.json").exists()
        assert not nurseries(tmp_path)
        one.start()
        assert one.address == address, "a client finds the restarted broker where it was"
        assert one.json("GET", f"/v1/jobs/{job}")["state"] == "SUCCEEDED"


def test_an_embedded_broker_ends_with_its_parent_and_takes_its_pods_along(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert parent.stdin is not None
    try:
        one = BrokerProcess(tmp_path, "--embedded-parent", str(parent.pid), "--pools", pools_file(tmp_path, CPU))
        one.start()
        one.done(one.submit({"entrypoint": {"argv": ["/bin/true"]}}))
        one.hang_up()
    finally:
        parent.stdin.close()
        parent.wait()
    assert one.process is not None
    assert one.process.wait(60) == 0
    assert not nurseries(tmp_path)


def test_bad_pools_end_the_start_with_words(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "firepool_broker", "--home", str(tmp_path)),
            *("--pools", pools_file(tmp_path, "[pools.a]\nmax_cout = 1\n")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 64
    assert "max_count" in run.stderr


class Witness:
    """Hears from every execution by datagram, past the broker: (attempt, a number drawn by that execution)."""

    #: Pods with a network of their own reach the host at their gateway, others at the loopback address.
    SCRIPT = """
    me="$FIREPOOL_ATTEMPT $RANDOM$RANDOM$RANDOM"
    gate=$(while read -r _ to by _; do [ "$to" = 00000000 ] && echo $((16#${by:6:2})).$((16#${by:4:2})).$((16#${by:2:2})).$((16#${by:0:2})); done < /proc/net/route)
    for host in 127.0.0.1 $gate; do echo "$me" > /dev/udp/$host/PORT; done 2>/dev/null
    echo "$FIREPOOL_ATTEMPT begins"; sleep 0.$((RANDOM % 3)); echo "$FIREPOOL_ATTEMPT ends"
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind(("0.0.0.0", 0))
        self._socket.setblocking(False)
        self.script = self.SCRIPT.replace("PORT", str(self._socket.getsockname()[1]))
        self._seen: set[tuple[str, str]] = set()

    def executions(self) -> Counter[str]:
        """How many executions began, by job."""
        while True:
            try:
                attempt, number = self._socket.recv(200).decode().split()
            except BlockingIOError:
                return Counter(attempt.rpartition(":")[0] for attempt, _ in self._seen)
            self._seen.add((attempt, number))

    def close(self) -> None:
        self._socket.close()


def test_a_broker_killed_under_load_loses_no_job_and_runs_none_twice(tmp_path: Path) -> None:
    witness = Witness()
    spec = {"entrypoint": {"argv": ["/bin/bash", "-c", witness.script]}}
    jobs: dict[str, str] = {}
    with closing(witness), broker(tmp_path, "--pools", pools_file(tmp_path, CPU)) as one:
        for round_number in range(3):
            began, n = time.monotonic(), 0
            while time.monotonic() - began < 0.5 or n < 8:
                key = f"{round_number}-{n}"
                n += 1
                jobs[key] = one.submit({**spec, "idempotency_key": key})
                witness.executions()
            one.kill()
            one.start()
            # Sent again with their keys, as a client does that lost its answers: the same jobs.
            for key in list(jobs)[-5:]:
                assert one.submit({**spec, "idempotency_key": key}) == jobs[key]
        bodies = {job: one.done(job) for job in jobs.values()}
        assert Counter(b["state"] for b in bodies.values()) == {"SUCCEEDED": len(jobs)}
        for job, body in bodies.items():
            attempt = f"{job}:{body['retry_count']}"
            status, log = one.call("GET", f"/v1/jobs/{job}/logs")
            assert (status, log.decode().splitlines()) == (200, [f"{attempt} begins", f"{attempt} ends"]), body
        executions = witness.executions()
        assert executions == dict.fromkeys(jobs.values(), 1), executions.most_common(3)
    assert not nurseries(tmp_path)


def nurseries(home: Path) -> list[int]:
    """Processes of a home's nursery."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"nursery" in words and str(home).encode() in words:
                found.append(int(entry.name))
    return found
