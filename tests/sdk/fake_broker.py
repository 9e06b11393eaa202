"""A broker that speaks the API over real HTTP and runs functions as processes, with a handle on everything that can go wrong.

It keeps jobs in memory and knows neither pods nor durability; what it shares with the real one is the contract of the API.
"""

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from firepool_wire.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    FirepoolError,
    HostLost,
    Internal,
    NonZeroExit,
    NotFound,
    Signaled,
)
from firepool_wire.frames import ItemStatus, Kind, Parser
from firepool_wire.jobspec import INLINE_RESULT_BYTES

TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TESTS = str(Path(__file__).parent)


@dataclass
class FakeJob:
    id: str
    spec: dict[str, Any]
    state: str = "QUEUED"
    frames: bytes = b""
    error: dict[str, Any] | None = None
    log: bytes = b""
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False
    seq: int = 0
    runs: int = 0
    renewed: int = 0

    def body(self) -> dict[str, Any]:
        function = self.spec["entrypoint"].get("function")
        return {
            "id": self.id,
            "state": self.state,
            "name": function["name"] if function else self.spec["entrypoint"]["argv"][0],
            "sku": self.spec.get("sku", "cpu"),
            "error": self.error,
            "exit_code": self.process.returncode if self.process and self.state in TERMINAL else None,
            "signal": None,
            "run": self.spec.get("run"),
            "result_bytes": len(self.frames),
            "seq": self.seq,
        }


@dataclass
class FakeBroker:
    """The broker and its knobs. `requests` is a log of (method, path)."""

    version: dict[str, Any] = field(
        default_factory=lambda: {
            "version": "0.1.0",
            "protocol": 1,
            "capabilities": ["results.follow"],
            "interpreters": [{"sku": "cpu", "python": sys.executable, "version": PYTHON, "pickle": 5}],
        }
    )
    pools: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"sku": "cpu", "max_count": 2, "shape": {"cpus": 1}},
            {"sku": "wild", "max_count": 2, "untrusted": True},
        ]
    )
    token: str | None = None
    #: Jobs wait in the queue.
    held: bool = False
    #: Answers of the next job submissions: errors, or "cut" (take the job, then break the connection).
    next_submits: list[FirepoolError | str] = field(default_factory=list)
    #: Jobs of these names end with this error instead of running.
    doom: dict[str, list[FirepoolError]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Condition()
        self._lives: list[threading.Thread] = []
        self.by_key: dict[str, FakeJob] = {}
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.streams: list[Any] = []
        self.stopping = False
        self.temp = tempfile.TemporaryDirectory(prefix="fake-broker-")
        broker = self

        class Bound(Handler):
            pass

        Bound.broker = broker
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
        for job in list(self.jobs.values()):
            self._kill(job)
        for life in self._lives:
            life.join()
        self.cut_streams()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
        self.temp.cleanup()

    def cut_streams(self) -> None:
        """Break every event stream, as a proxy would."""
        for connection in list(self.streams):
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def count(self, method: str, path: str) -> int:
        return sum(1 for m, p in list(self.requests) if m == method and p.startswith(path))

    def hold(self) -> None:
        """Let jobs wait in the queue."""
        self.held = True

    def release(self) -> None:
        """Let them run."""
        with self.lock:
            self.held = False
            self.lock.notify_all()

    # -- jobs --

    def take(self, spec: dict[str, Any]) -> FakeJob:
        key = spec["idempotency_key"]
        with self.lock:
            if key in self.by_key:
                known = self.by_key[key]
                if known.spec != spec:
                    raise Conflict("that key was used with another body")
                return known
            function = spec["entrypoint"].get("function") or {}
            for digest in (function.get("payload"), function.get("args_blob"), spec.get("package")):
                if digest is not None and digest not in self.blobs:
                    raise BadRequest(f"no blob {digest}", missing=[digest])
            job = FakeJob(f"j{len(self.jobs) + 1}", spec)
            self.jobs[job.id] = self.by_key[key] = job
            life = threading.Thread(target=self._live, args=(job,), daemon=True)
            self._lives.append(life)
        life.start()
        return job

    def _live(self, job: FakeJob) -> None:
        with self.lock:
            self.lock.wait_for(lambda: not self.held or job.cancelled or self.stopping)
        depends = (job.spec["entrypoint"].get("function") or {}).get("depends", [])
        for other in depends:
            with self.lock:
                self.lock.wait_for(lambda: self.jobs[other].state in TERMINAL or self.stopping)
            if self.jobs[other].state != "SUCCEEDED":
                error = self.jobs[other].error
                self._end(job, "FAILED", error)
                return
        if job.cancelled or self.stopping:
            self._end(job, "CANCELLED", Cancelled("cancelled").to_json())
            return
        self._move(job, "RUNNING")
        job.runs += 1
        name = job.body()["name"]
        if self.doom.get(name):
            self._end(job, "FAILED", self.doom[name].pop(0).to_json())
            return
        try:
            self._run(job)
        except Exception as bug:
            self._end(job, "FAILED", Internal(repr(bug)).to_json())

    def _run(self, job: FakeJob) -> None:
        env = {**os.environ, "FIREPOOL_JOB_ID": job.id, "FIREPOOL_ATTEMPT": f"{job.id}:0", **job.spec.get("env", {})}
        env.pop("FIREPOOL_ADDRESS", None)
        argv = job.spec["entrypoint"].get("argv")
        read_end, write_end = os.pipe()
        command = argv or [sys.executable, f"{TESTS}/job_main.py", str(write_end)]
        job.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(write_end,),
            cwd=self.temp.name,
            start_new_session=True,
        )
        if job.cancelled or self.stopping:
            self._kill(job)
        os.close(write_end)
        log = threading.Thread(target=self._read_log, args=(job,), daemon=True)
        log.start()
        with contextlib.suppress(BrokenPipeError):
            job.process.stdin.write(b"" if argv else self._order(job))
        with contextlib.suppress(BrokenPipeError):
            job.process.stdin.close()
        parser = Parser()
        while data := os.read(read_end, 1 << 16):
            for frame in parser.feed(data):
                if frame.kind is Kind.RESULT:
                    with self.lock:
                        job.frames += Frames.again(frame.payload)
                        self.lock.notify_all()
        os.close(read_end)
        code = job.process.wait()
        log.join()
        self._conclude(job, code)

    def _order(self, job: FakeJob) -> bytes:
        function = job.spec["entrypoint"]["function"]
        args = function.get("args") or base64.b64encode(self.blobs[function["args_blob"]]).decode()
        payload = self.blobs[function["payload"]] if "payload" in function else b""
        package = self.blobs[job.spec["package"]] if job.spec.get("package") else b""
        return json.dumps(
            {
                "attempt": f"{job.id}:0",
                "function": function,
                "args": args,
                "payload": base64.b64encode(payload).decode(),
                "package": base64.b64encode(package).decode(),
                "depends": [base64.b64encode(self.jobs[d].frames).decode() for d in function.get("depends", [])],
                "untrusted": self._untrusted(job),
                "work": tempfile.mkdtemp(dir=self.temp.name),
                "hide": TESTS,
            }
        ).encode()

    def _untrusted(self, job: FakeJob) -> bool:
        pool = next((p for p in self.pools if p["sku"] == job.spec.get("sku", "cpu")), {})
        return bool(pool.get("untrusted") or job.spec.get("untrusted"))

    def _read_log(self, job: FakeJob) -> None:
        while data := os.read(job.process.stdout.fileno(), 1 << 16):
            with self.lock:
                job.log += data
                self.lock.notify_all()
        job.process.stdout.close()

    def _conclude(self, job: FakeJob, code: int) -> None:
        function = job.spec["entrypoint"].get("function")
        if job.cancelled:
            self._end(job, "CANCELLED", Cancelled(f"job {job.id} was cancelled").to_json())
        elif code < 0:
            self._end(job, "FAILED", Signaled(f"signal {-code}", signal=-code).to_json())
        elif function and function.get("kind", "call") != "map" and (failed := Frames.error(job.frames)):
            self._end(job, "FAILED", failed)
        elif code:
            self._end(job, "FAILED", NonZeroExit(f"exit code {code}", exit_code=code).to_json())
        else:
            self._end(job, "SUCCEEDED", None)

    def _end(self, job: FakeJob, state: str, error: dict[str, Any] | None) -> None:
        job.error = error
        self._move(job, state)

    def _move(self, job: FakeJob, state: str) -> None:
        with self.lock:
            job.state = state
            job.seq = len(self.history) + 1
            line: dict[str, Any] = {"seq": job.seq, "job": job.id, "state": state, "terminal": state in TERMINAL}
            if state in TERMINAL:
                line |= {"idempotency_key": job.spec.get("idempotency_key"), "body": job.body()}
                if len(job.frames) <= INLINE_RESULT_BYTES:
                    line["result"] = base64.b64encode(job.frames).decode()
            self.history.append((job.seq, line))
            self.lock.notify_all()

    def cancel(self, job: FakeJob) -> None:
        with self.lock:
            job.cancelled = True
            self.lock.notify_all()
        self._kill(job)

    def lose(self, job: FakeJob) -> None:
        """The host of a job is gone."""
        self._end(job, "FAILED", HostLost("the node went away", job_id=job.id).to_json())

    def _kill(self, job: FakeJob) -> None:
        if job.process is not None and job.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)


class Frames:
    """RESULT frames without the agent's log around them."""

    @staticmethod
    def again(payload: bytes) -> bytes:
        from firepool_wire.frames import pack

        return pack(Kind.RESULT, payload)

    @staticmethod
    def error(data: bytes) -> dict[str, Any] | None:
        from firepool_ray._calls import read_frames

        for status, payload in read_frames(data).values():
            if status is ItemStatus.ERROR:
                found: dict[str, Any] = json.loads(payload.partition(b"\0")[0])
                return found
        return None


class Handler(BaseHTTPRequestHandler):
    """The API."""

    broker: FakeBroker
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do_GET(self) -> None:
        self._route()

    do_POST = do_PUT = do_HEAD = do_GET

    def _route(self) -> None:
        parts = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(parts.query).items()}
        path = unquote(parts.path)
        self.broker.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.broker.token and self.headers.get("Authorization") != f"Bearer {self.broker.token}":
                from firepool_wire.errors import Unauthenticated

                raise Unauthenticated("no such token")
            self._dispatch(path, body)
        except FirepoolError as error:
            self._json({**error.to_json(), "detail": error.message}, error.status)

    def _dispatch(self, path: str, body: bytes) -> None:
        broker = self.broker
        head, _, tail = path.removeprefix("/v1/").partition("/")
        if path == "/v1/version":
            self._json(broker.version)
        elif path == "/v1/pools":
            self._json({"pools": broker.pools})
        elif path == "/v1/events":
            self._events()
        elif path == "/v1/jobs" and self.command == "POST":
            self._submit(json.loads(body))
        elif path == "/v1/jobs:batch":
            self._batch(json.loads(body)["jobs"])
        elif path == "/v1/blobs:missing":
            self._json({"missing": [d for d in json.loads(body)["digests"] if d not in broker.blobs]})
        elif head == "blobs":
            assert tail == "sha256:" + hashlib.sha256(body).hexdigest()
            broker.blobs[tail] = body
            self._json({}, 201)
        elif head == "clients":
            for job in json.loads(body)["jobs"]:
                broker.jobs[job].renewed += 1
            self._json({})
        elif head == "runs":
            self._json({"run": tail, "jobs": sum(j.spec.get("run") == tail for j in broker.jobs.values())})
        else:
            self._job(*tail.partition("/")[::2])

    def _submit(self, spec: dict[str, Any]) -> None:
        what = self.broker.next_submits.pop(0) if self.broker.next_submits else None
        if isinstance(what, FirepoolError):
            raise what
        job = self.broker.take(spec)
        if what == "cut":
            self.connection.shutdown(2)
            self.close_connection = True
            return
        self._json(job.body(), 201)

    def _batch(self, specs: list[dict[str, Any]]) -> None:
        self.broker.batches.append(len(specs))
        results: list[dict[str, Any]] = []
        for spec in specs:
            try:
                results.append({"job": self.broker.take(spec).body()})
            except FirepoolError as error:
                results.append({"error": error.to_json()})
        self._json({"results": results})

    def _job(self, job_id: str, what: str) -> None:
        job_id, _, verb = job_id.partition(":")
        job = self.broker.jobs.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        if verb == "cancel":
            self.broker.cancel(job)
            self._json(job.body(), 202)
        elif what == "wait":
            with self.broker.lock:
                self.broker.lock.wait_for(lambda: job.state in TERMINAL, float(self.query["timeout_s"]))
            self._json(job.body())
        elif what == "result":
            self._result(job)
        elif what == "logs":
            self._follow(lambda: job.log, lambda: job.state in TERMINAL)
        elif what == "explain":
            self._json({"id": job.id, "path": "warm"})
        else:
            self._json(job.body())

    def _result(self, job: FakeJob) -> None:
        if self.query.get("follow") != "true":
            if job.state not in TERMINAL:
                raise Conflict("no result yet")
            self._bytes(job.frames)
            return
        self._follow(lambda: job.frames, lambda: job.state in TERMINAL)

    def _follow(self, data: Any, over: Any) -> None:
        offset = int(self.query.get("offset", 0))
        if offset < 0:
            offset = max(0, len(data()) + offset)
        self._chunked_head()
        while True:
            with self.broker.lock:
                if self.query.get("follow") == "true":
                    self.broker.lock.wait_for(lambda: len(data()) > offset or over() or self.broker.stopping)
                ended = over() or self.broker.stopping or self.query.get("follow") != "true"
                piece = data()[offset:]
            if piece:
                self._chunk(piece)
                offset += len(piece)
            elif ended:
                self.wfile.write(b"0\r\n\r\n")
                return

    def _events(self) -> None:
        broker = self.broker
        broker.streams.append(self.connection)
        self._chunked_head()
        seen = int(self.query["from"]) if "from" in self.query else len(broker.history)
        self._chunk(json.dumps({"seq": seen, "heartbeat": True}).encode() + b"\n")
        try:
            while not broker.stopping:
                with broker.lock:
                    broker.lock.wait_for(lambda: len(broker.history) > seen or broker.stopping, 5)
                    lines = [line for seq, line in broker.history[seen:]]
                    seen = len(broker.history)
                if lines:
                    self._chunk(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        finally:
            broker.streams.remove(self.connection)

    def _chunked_head(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, body: Any, status: int = 200) -> None:
        self._bytes(json.dumps(body).encode(), status)

    def _bytes(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Poll a condition; fail when it does not become true."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        pause.wait(0.01)
