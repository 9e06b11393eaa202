"""An agent in memory that speaks the real protocol over a real Unix socket: HTTP/1.1, JSON messages, event frames.

Attempts do what their argv says instead of running anything:

    ["print", text, ...]      each text is a line of stdout, exit 0
    ["exit", code]            exit code
    ["wait"]                  runs until it is stopped (or `FakeAgent.finish` ends it)
    ["write", path, text]     an output file
    ["result", base64]        a function's result: one item with these bytes

Troubles are switched on by attributes: `hang` (calls that never answer), `refuse` and `refuse_once` (call → error), `cut_events_after`
(the stream breaks off once behind this many bytes), `unclean` (the reset's problems), `settling`.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from firepool_wire.agentapi import AttemptStatus, ExitRecord, Hello, Launched, Prepared, ResetReport, Stats
from firepool_wire.errors import Cancelled, Conflict, FirepoolError, NonZeroExit, NotFound, PackageError, from_json
from firepool_wire.frames import ItemStatus, Kind, pack, pack_item
from firepool_wire.version import FIREPOOL, PROTOCOL


@dataclass
class FakeAttempt:
    """What the agent knows of one attempt."""

    prepare: dict[str, Any]
    state: str = "prepared"
    launch: dict[str, Any] | None = None
    log: bytearray = field(default_factory=bytearray)
    outputs: dict[str, bytes] = field(default_factory=dict)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    exit: ExitRecord | None = None
    launches: int = 0

    def add(self, kind: Kind, payload: bytes) -> None:
        self.log += pack(kind, payload)
        self.grown.set()


class FakeAgent:
    """One agent on one socket; an async context manager."""

    def __init__(self, socket: Path, pod: str = "pod-1") -> None:
        self.socket = socket
        self.address = f"unix:{socket}"
        self.pod = pod
        self.boot_id = "boot-1"
        self.attempts: dict[str, FakeAttempt] = {}
        self.blobs: dict[str, bytes] = {}
        self.acked: list[str] = []
        self.calls: list[str] = []
        #: Launch messages of attempts that really started, in order.
        self.launched: list[dict[str, Any]] = []
        self.last_user: dict[str, Any] | None = None
        self.hang: set[str] = set()
        self.refuse: dict[str, FirepoolError] = {}
        self.refuse_once: dict[str, FirepoolError] = {}
        self.cut_events_after: int | None = None
        self.unclean: list[dict[str, str]] = []
        self.settling = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Stop answering, as when the pod's processes are gone."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()
        self.socket.unlink(missing_ok=True)

    def finish(self, attempt: str, exit_code: int = 0) -> None:
        """End a waiting attempt by itself."""
        self._end(attempt, ExitRecord(attempt=attempt, exit_code=exit_code, error=_exit_error(exit_code)))

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None:  # accepted in the moment of death
            writer.close()
            return
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                continue
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return  # cancelled only by `die`; asyncio's server of 3.11 trips over a cancelled handler
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
        body = await reader.readexactly(int(lengths[0]) if lengths else 0)
        url = urlsplit(target)
        path = [unquote(p) for p in url.path.strip("/").split("/")][1:]
        name = path[-1] if path[0] != "blobs" else f"{method.lower()}-blob"
        self.calls.append(name)
        if name in self.hang:
            await asyncio.Event().wait()
        try:
            if name in self.refuse_once:
                raise self.refuse_once.pop(name)
            if name in self.refuse:
                raise self.refuse[name]
            if name == "events":
                return await self._events(path[1], int(url.query.removeprefix("from=") or 0), writer)
            status, answer = self._answer(method, path, body)
        except FirepoolError as error:
            status, answer = error.status, json.dumps(error.to_json()).encode()
        length = 0 if method == "HEAD" else len(answer)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n".encode() + answer[:length])
        await writer.drain()
        return True

    async def _events(self, attempt: str, offset: int, writer: asyncio.StreamWriter) -> bool:
        record = self._attempt(attempt)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = offset
        while True:
            piece = bytes(record.log[sent:])
            if self.cut_events_after is not None and sent + len(piece) > self.cut_events_after:
                piece = piece[: max(0, self.cut_events_after - sent)]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if piece else b"")
                self.cut_events_after = None
                return False
            if piece:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
                sent += len(piece)
            if record.exit is not None and sent == len(record.log):
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return True
            record.grown.clear()
            await record.grown.wait()

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _answer(self, method: str, path: list[str], body: bytes) -> tuple[int, bytes]:
        match method, path:
            case "GET", ["hello"]:
                return _ok(self._hello().to_json())
            case "PUT", ["attempts", attempt, "prepare"]:
                message = json.loads(body)
                self.attempts.setdefault(attempt, FakeAttempt(message))
                self.last_user = {k: message[k] for k in ("caller", "queue", "tag")}
                return _ok(Prepared(uid=1000, pid=1).to_json())
            case "PUT", ["attempts", attempt, "launch"]:
                return self._launch(attempt, json.loads(body))
            case "GET", ["attempts", attempt]:
                return self._status(attempt)
            case "POST", ["attempts", attempt, "stop"]:
                return self._stop(attempt, json.loads(body))
            case "POST", ["attempts", attempt, "abandon"]:
                self._attempt(attempt)
                del self.attempts[attempt]
                return _ok({})
            case "GET", ["attempts", attempt, "outputs", *rest]:
                return 200, self._attempt(attempt).outputs["/".join(rest)]
            case "POST", ["attempts", attempt, "ack"]:
                self.acked.append(attempt)
                self.attempts.pop(attempt, None)
                return _ok({})
            case "POST", ["reset"]:
                report = ResetReport(clean=not self.unclean, problems=self.unclean, settling_bytes=self.settling)
                return _ok(report.to_json())
            case "GET", ["settled"]:
                return _ok({})
            case "HEAD", ["blobs", digest]:
                return (200 if digest in self.blobs else 404), b""
            case "PUT", ["blobs", digest]:
                if digest != "sha256:" + hashlib.sha256(body).hexdigest():
                    raise PackageError("the bytes are not those of the digest")
                self.blobs[digest] = body
                return 201, b""
            case "POST", ["attempts", _, "stacks"]:
                return _ok({"stacks": "Thread 1: ..."})
            case "GET", ["stats"]:
                stats = Stats(attempt=None, rss_bytes=1, cpu_s=0.1, processes=1, disk_free_bytes=10)
                return _ok(stats.to_json())
        raise NotFound(f"no such call: {method} {path}")

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            version=FIREPOOL,
            pod=self.pod,
            boot_id=self.boot_id,
            isolation="namespaces",
            isolation_why="",
            python="/usr/bin/python3",
            python_version="3.11",
            pickle=5,
            attempts=list(self.attempts),
            last_user=self.last_user,
        )

    def _attempt(self, attempt: str) -> FakeAttempt:
        if attempt not in self.attempts:
            raise NotFound(f"attempt {attempt} is not known here")
        return self.attempts[attempt]

    def _status(self, attempt: str) -> tuple[int, bytes]:
        record = self.attempts.get(attempt)
        if record is None:
            return _ok(AttemptStatus(state="unknown").to_json())
        return _ok(AttemptStatus(state=record.state, exit=record.exit.to_json() if record.exit else None).to_json())

    def _launch(self, attempt: str, message: dict[str, Any]) -> tuple[int, bytes]:
        record = self._attempt(attempt)
        record.launches += 1
        if record.state == "prepared":
            record.state, record.launch = "running", message
            self.launched.append(message)
            record.add(Kind.STARTED, json.dumps({"at_s": time.monotonic()}).encode())
            self._run(attempt, record, message["argv"] or ["print"])
        return _ok(Launched(at_s=time.monotonic()).to_json())

    def _run(self, attempt: str, record: FakeAttempt, argv: list[str]) -> None:
        code, outputs = 0, []
        match argv:
            case ["wait"]:
                return
            case ["print", *texts]:
                for text in texts:
                    record.add(Kind.LOG, b"\x01" + text.encode() + b"\n")
            case ["exit", text]:
                code = int(text)
            case ["write", path, text]:
                record.outputs[path] = text.encode()
                outputs = [{"path": path, "bytes": len(text)}]
            case ["result", encoded]:
                for part in pack_item(0, ItemStatus.VALUE, base64.b64decode(encoded)):
                    record.add(Kind.RESULT, part)
        self._end(
            attempt, ExitRecord(attempt=attempt, exit_code=code, error=_exit_error(code), outputs=outputs, cpu_s=0.01)
        )

    def _stop(self, attempt: str, message: dict[str, Any]) -> tuple[int, bytes]:
        record = self._attempt(attempt)
        if record.exit is None:
            error = from_json(message["error"]) if message["error"] else Cancelled("stopped")
            self._end(attempt, ExitRecord(attempt=attempt, exit_code=143, signal=15, error=error.to_json()))
        return _ok({})

    def _end(self, attempt: str, record: ExitRecord) -> None:
        entry = self._attempt(attempt)
        if entry.exit is not None:
            raise Conflict(f"{attempt} ended already")
        entry.exit, entry.state = record, "ended"
        entry.add(Kind.EXIT, json.dumps(record.to_json()).encode())
        entry.add(Kind.END, b"")


def _exit_error(code: int) -> dict[str, Any] | None:
    return NonZeroExit(f"exit code {code}", exit_code=code).to_json() if code else None


def _ok(body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(body).encode()
