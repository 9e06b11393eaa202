"""A real agent process for the tests, and a small client of its calls: `http.client` over its Unix socket, nothing faked."""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cloudpickle

from firepool_wire import codec
from firepool_wire.agentapi import ExitRecord
from firepool_wire.errors import FirepoolError, from_json
from firepool_wire.frames import Frame, Items, ItemStatus, Kind, Parser
from firepool_wire.nursery import PodConfig

#: How long a test waits for something that should happen soon.
PATIENCE_S = 20.0


def eventually(check: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of `check`, asked again and again until the patience is over."""
    until = time.monotonic() + patience_s
    while not (answer := check()):
        assert time.monotonic() < until, f"still not after {patience_s} s: {what}"
        select_nothing(0.005)
    return answer


def select_nothing(seconds: float) -> None:
    """Let other processes run."""
    import select

    select.select([], [], [], seconds)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Ended:
    """Everything that an event log said."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.exit = ExitRecord.from_json(next(f.json() for f in frames if f.kind is Kind.EXIT))
        self.error: FirepoolError | None = None if self.exit.error is None else from_json(self.exit.error)
        parts = Items()
        found = [item for f in frames if f.kind is Kind.RESULT and (item := parts.feed(f.payload))]
        #: (index, status, payload) of every finished item.
        self.items: list[tuple[int, ItemStatus, bytes]] = found

    def log(self, stream: int) -> bytes:
        """Output of one stream (1 or 2)."""
        return b"".join(f.payload[1:] for f in self.frames if f.kind is Kind.LOG and f.payload[0] == stream)

    @property
    def out(self) -> str:
        return self.log(1).decode(errors="replace")

    @property
    def err(self) -> str:
        return self.log(2).decode(errors="replace")

    def value(self, index: int = 0, loads: Callable[[bytes], Any] | None = cloudpickle.loads) -> Any:
        """The value of an item; its error is raised."""
        _number, status, payload = next(item for item in self.items if item[0] == index)
        if status is ItemStatus.ERROR:
            raise from_json(json.loads(payload.partition(b"\0")[0]))
        return codec.decode(payload, loads, codec.imported_class)


class Client:
    """Calls to the agent behind a socket."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._connection: _Unix | None = None
        self._count = 0

    def hang_up(self) -> None:
        """Close the kept connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- calls ------------------------------------------------------------------------------------------------------

    def raw(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One call on the kept connection: status and body."""
        if self._connection is None:
            self._connection = _Unix(self.socket_path)
        self._connection.request(method, path, body)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def connection_id(self) -> int:
        """Which socket the kept connection is."""
        assert self._connection is not None
        assert self._connection.sock is not None
        return self._connection.sock.fileno()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call with JSON in and out. Raises: FirepoolError: what the agent answered."""
        status, data = self.raw(method, path, b"" if body is None else json.dumps(body).encode())
        told: dict[str, Any] = json.loads(data)
        if status >= 300:
            raise from_json(told)
        return told

    @staticmethod
    def path(attempt: str, rest: str = "") -> str:
        return f"/v1/attempts/{quote(attempt, safe='')}{rest}"

    def new_id(self) -> str:
        self._count += 1
        return f"job-{self._count}:0"

    def prepare(self, attempt: str, deadline_s: float = 30.0, **more: Any) -> dict[str, Any]:
        body = {
            "caller": "team-a",
            "person": "ann",
            "queue": "default",
            "tag": None,
            "deadline_s": boot_now() + deadline_s,
        }
        return self.call("PUT", self.path(attempt, "/prepare"), {**body, **more})

    def launch(self, attempt: str, deadline_s: float = 30.0, **more: Any) -> dict[str, Any]:
        return self.call("PUT", self.path(attempt, "/launch"), {"deadline_s": boot_now() + deadline_s, **more})

    def events(self, attempt: str, offset: int = 0) -> Iterator[Frame]:
        """The event log from an offset to its end, on a connection of its own."""
        connection = _Unix(self.socket_path)
        connection.timeout = 3 * PATIENCE_S
        try:
            connection.request("GET", self.path(attempt, f"/events?from={offset}"))
            answer = connection.getresponse()
            if answer.status != 200:
                raise from_json(json.loads(answer.read()))
            parser = Parser(offset)
            while data := answer.read1(65536):
                yield from parser.feed(data)
        finally:
            connection.close()

    def put_blob(self, data: bytes) -> str:
        import hashlib

        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        status, body = self.raw("PUT", f"/v1/blobs/{quote(digest)}", data)
        assert status == 201, body
        return digest

    def reset(self, attempt: str | None = None) -> dict[str, Any]:
        return self.call("POST", "/v1/reset", {"attempt": attempt})

    # -- whole jobs -------------------------------------------------------------------------------------------------

    def run(self, argv: list[str], **launch: Any) -> Ended:
        """Prepare, launch a command, read its events, reset."""
        return self._whole(argv=argv, **launch)

    def run_function(self, function: Any, *args: Any, **launch: Any) -> Ended:
        """The same for a function by value."""
        return self._whole(function=self.entry(function, [(args, {})]), **launch)

    def run_map(self, function: Any, xs: list[Any], **launch: Any) -> Ended:
        """A map over `xs`."""
        return self._whole(function=self.entry(function, [((x,), {}) for x in xs], kind="map"), **launch)

    def entry(self, function: Any, calls: list[Any], kind: str = "call") -> dict[str, Any]:
        """A function entry whose payload is in the pod's cache."""
        if function.__module__.startswith("tests."):
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # the job cannot import the tests
        return {
            "payload": self.put_blob(cloudpickle.dumps(function)),
            "args": base64.b64encode(codec.pack_args(calls, cloudpickle.dumps)).decode(),
            "kind": kind,
            "items": len(calls),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "pickle": 5,
        }

    def run_generator(self, function: Any, *args: Any, **launch: Any) -> Ended:
        """A generator function by value."""
        return self._whole(function=self.entry(function, [(args, {})], kind="generator"), **launch)

    def begin(self, **launch: Any) -> str:
        """Prepare and launch; the attempt's id."""
        attempt = self.new_id()
        self.prepare(attempt)
        self.launch(attempt, **launch)
        return attempt

    def finish(self, attempt: str) -> Ended:
        """Read the events to their end, reset, acknowledge."""
        ended = Ended(list(self.events(attempt)))
        report = self.reset(attempt)
        assert report["clean"], report["problems"]
        self.call("POST", self.path(attempt, "/ack"))
        return ended

    def wait_started(self, attempt: str) -> None:
        """Until the first instruction was told."""
        for frame in self.events(attempt):
            if frame.kind is Kind.STARTED:
                return

    def _whole(self, **launch: Any) -> Ended:
        return self.finish(self.begin(**launch))


class Agent(Client):
    """An agent process at level `process` in a directory of its own."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(str(folder / "agent.sock"))
        self.folder = folder
        self._env = {**os.environ, **(env or {})}
        self.config = PodConfig(
            **{
                "pod": "pod-under-test",
                "sku": "cpu",
                "listen_fd": -1,
                "socket": self.socket_path,
                "ready_fd": -1,
                "boot_id": "boot-1",
                "isolation_wanted": "process",
                "isolation": "process",
                "agent_dir": str(folder / "agent"),
                "state_dir": str(folder / "agent/state"),
                "caches_dir": str(folder / "agent/caches"),
                "unpack_dir": str(folder / "agent/unpack"),
                "scratch_dir": str(folder / "scratch"),
                "work_dir": "/work",
                "home_dir": "/home/job",
                "tmp_dir": "/tmp",
                "python": sys.executable,
                **settings,
            }
        )
        self._start()

    # -- process ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        (self.folder / "agent").mkdir(mode=0o700, exist_ok=True)
        config = self.folder / "config.json"
        ready_r, ready_w = os.pipe()
        self.config.ready_fd = ready_w
        config.write_text(json.dumps(self.config.to_json()))
        command = [sys.executable, "-m", "firepool_agent", "serve", str(config)]
        self.process = subprocess.Popen(command, pass_fds=(ready_w,), start_new_session=True, env=self._env)
        os.close(ready_w)
        with os.fdopen(ready_r, "rb") as ready:
            assert ready.read(1) == b"R", "the agent did not get ready"

    def close(self) -> None:
        """End the agent and whatever it may have left."""
        self.hang_up()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def kill_and_restart(self) -> None:
        """SIGKILL the agent and start another one in its place."""
        self.hang_up()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        Path(self.config.socket).unlink()
        self.config.boot_id += "+"
        self._start()


def boot_now() -> float:
    """CLOCK_BOOTTIME, the clock of deadlines."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
