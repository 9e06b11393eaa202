"""The agent's API (`firepool_wire.agentapi`) over its rooms: paths in, messages out. No state of its own."""

import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar
from urllib.parse import parse_qs, unquote

from firepool_agent import outputs, procfs
from firepool_agent.attempts import Attempts
from firepool_agent.h1 import Answer, Request
from firepool_agent.parts import Parts
from firepool_wire.agentapi import Hello, Launch, Message, Prepare, Reset, Stats, Stop
from firepool_wire.errors import BadRequest, Internal, NotFound
from firepool_wire.version import FIREPOOL, PROTOCOL

_READ_BYTES = 256 * 1024


class Routes:
    """Dispatches requests."""

    def __init__(self, parts: Parts, attempts: Attempts, shutdown: Callable[[], None]) -> None:
        self._parts = parts
        self._attempts = attempts
        self._shutdown = shutdown

    async def handle(self, request: Request) -> Answer:
        """Answer a request. Raises: FirepoolError."""
        match (request.method, *map(unquote, request.path.strip("/").split("/"))):
            case (method, "v1", "attempts", attempt_id, *rest):
                return await self._attempt(request, method, attempt_id, rest)
            case ("GET", "v1", "hello"):
                return _message(self._hello())
            case ("HEAD", "v1", "blobs", digest):
                return Answer(b"", status=200 if self._parts.blobs.has(digest) else 404)
            case ("PUT", "v1", "blobs", digest):
                await self._parts.blobs.put(digest, request.chunks())
                return Answer(status=201)
            case ("POST", "v1", "reset"):
                return _message(self._attempts.reset(_read(Reset, await request.json())))
            case ("GET", "v1", "settled"):
                if problems := await self._parts.resetter.settled():
                    words = "; ".join(f"{p['what']} at {p['where']}: {p['detail']}" for p in problems)
                    raise Internal(f"the pod's space did not come back after its reset: {words}", problems=problems)
                return Answer()
            case ("GET", "v1", "stats"):
                return _message(self._stats())
            case ("POST", "v1", "shutdown"):
                self._shutdown()
                return Answer()
        raise NotFound(f"no such call: {request.method} {request.path}")

    async def _attempt(self, request: Request, method: str, attempt_id: str, rest: list[str]) -> Answer:
        attempts = self._attempts
        match (method, *rest):
            case ("PUT", "prepare"):
                return _message(await attempts.prepare(attempt_id, _read(Prepare, await request.json())))
            case ("PUT", "launch"):
                return _message(await attempts.launch(attempt_id, _read(Launch, await request.json())))
            case ("GET",):
                return _message(attempts.status(attempt_id))
            case ("GET", "events"):
                log = attempts.events(attempt_id)
                return Answer(stream=log.follow(_offset(request.query)))
            case ("POST", "stop"):
                attempts.stop(attempt_id, _read(Stop, await request.json()))
                return Answer()
            case ("POST", "abandon"):
                await attempts.abandon(attempt_id)
                return Answer()
            case ("GET", "outputs", *path):
                found = outputs.locate(attempts.keep_dir(attempt_id), "/".join(path))
                return Answer(stream=_file(os.open(found, os.O_RDONLY | os.O_CLOEXEC)))
            case ("POST", "ack"):
                await attempts.acknowledge(attempt_id)
                return Answer()
            case ("POST", "stacks"):
                return Answer(json.dumps({"stacks": await attempts.stacks(attempt_id)}).encode())
        raise NotFound(f"no such call: {request.method} {request.path}")

    def _hello(self) -> Hello:
        config, about = self._parts.config, self._parts.zygote.about
        return Hello(
            protocol=PROTOCOL,
            version=FIREPOOL,
            pod=config.pod,
            boot_id=config.boot_id,
            isolation=config.isolation,
            isolation_why=config.isolation_why,
            python=config.python,
            python_version=str(about.get("python_version", "")),
            pickle=int(about.get("pickle", 0)),
            cards=config.cards,
            preload_failed=dict(about.get("failed", {})),
            attempts=self._attempts.ids(),
            memory_limit_bytes=config.memory_limit_bytes,
            last_user=self._parts.journal.last_user,
        )

    def _stats(self) -> Stats:
        attempt, rss_bytes, cpu_s = self._attempts.live()
        return Stats(
            attempt=attempt,
            rss_bytes=rss_bytes,
            cpu_s=cpu_s,
            processes=len(procfs.pids()),
            disk_free_bytes=self._parts.scratch.free_bytes(),
        )


def _message(message: Message) -> Answer:
    names: tuple[str, ...] = type(message).__slots__  # type: ignore[attr-defined]
    return Answer(json.dumps({name: getattr(message, name) for name in names}).encode())


M = TypeVar("M", bound=Message)


def _read(kind: type[M], body: dict[str, object]) -> M:
    try:
        return kind.from_json(body)
    except TypeError as why:
        raise BadRequest(f"not a {kind.__name__}: {why}") from None


def _offset(query: str) -> int:
    text = parse_qs(query).get("from", ["0"])[0]
    if not text.isdigit():
        raise BadRequest(f"offset {text!r} is not a number", field="from")
    return int(text)


async def _file(fd: int) -> AsyncGenerator[bytes, None]:
    try:
        while data := os.read(fd, _READ_BYTES):
            yield data
    finally:
        os.close(fd)
