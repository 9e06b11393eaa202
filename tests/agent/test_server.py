"""The agent's HTTP: what it accepts, what it refuses and how, and that one bad client harms nobody."""

import hashlib
import http.client
import json
import os
import socket
from urllib.parse import quote

import pytest

from firepool_wire.errors import NotFound, PackageError
from firepool_wire.version import FIREPOOL, PROTOCOL
from tests.agent.driver import Agent, eventually


def _say(agent: Agent, data: bytes) -> bytes:
    """Send raw bytes on a connection of their own; everything that is answered until the agent closes or pauses."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(agent.socket_path)
        sock.sendall(data)
        return sock.recv(65536)


def test_hello_tells_who_the_agent_is_and_what_it_can_run(agent: Agent) -> None:
    hello = agent.call("GET", "/v1/hello")
    assert (hello["protocol"], hello["version"]) == (PROTOCOL, FIREPOOL)
    assert (hello["pod"], hello["boot_id"]) == ("pod-under-test", "boot-1")
    assert hello["isolation"] == "process"
    assert hello["python_version"].startswith("3.")
    assert hello["last_user"] is None


def test_calls_share_a_connection(agent: Agent) -> None:
    agent.call("GET", "/v1/hello")
    kept = agent.connection_id()
    for _ in range(20):
        agent.call("GET", "/v1/hello")
    assert agent.connection_id() == kept


def test_an_unknown_call_is_a_typed_error(agent: Agent) -> None:
    with pytest.raises(NotFound):
        agent.call("GET", "/v1/nothing")
    with pytest.raises(NotFound):
        agent.call("DELETE", "/v1/hello")


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(agent: Agent, body: bytes) -> None:
    status, told = agent.raw("PUT", agent.path("job:0", "/prepare"), body)
    assert (status, json.loads(told)["code"]) == (422, "BadRequest")


def test_a_message_without_a_required_key_names_it(agent: Agent) -> None:
    status, told = agent.raw("PUT", agent.path("job:0", "/prepare"), b'{"caller": "a"}')
    assert status == 422
    assert "person" in json.loads(told)["message"]


def test_keys_of_a_newer_broker_are_skipped(agent: Agent) -> None:
    assert agent.prepare("job:0", invented_later=[1])["pid"] > 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/hello HTTP/1.0\r\n\r\n", b"505"),
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET /v1/hello HTTP/1.1\r\nno colon here\r\n\r\n", b"400"),
        (b"PUT /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"PUT /v1/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"PUT /v1/x HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", b"400"),
        (b"GET /v1/hello HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
    ],
)
def test_what_is_not_our_http_is_refused(agent: Agent, head: bytes, status: bytes) -> None:
    assert _say(agent, head).startswith(b"HTTP/1.1 " + status)
    assert agent.call("GET", "/v1/hello")


def test_requests_may_come_in_pieces_and_in_one_piece(agent: Agent) -> None:
    request = b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(agent.socket_path)
        for byte in request:
            sock.sendall(bytes((byte,)))
        first = http.client.HTTPResponse(sock)
        first.begin()
        assert first.status == 200
        first.read()
        sock.sendall(request * 3)
        told = b""
        while told.count(b"HTTP/1.1 200") < 3:
            told += sock.recv(65536)


def test_a_blob_is_kept_only_under_its_own_digest(agent: Agent) -> None:
    data = os.urandom(3_000_000)
    digest = agent.put_blob(data)
    assert agent.raw("HEAD", f"/v1/blobs/{quote(digest)}")[0] == 200
    other = "sha256:" + hashlib.sha256(b"other").hexdigest()
    status, told = agent.raw("PUT", f"/v1/blobs/{quote(other)}", data)
    assert (status, json.loads(told)["code"]) == (PackageError.status, "PackageError")
    assert agent.raw("HEAD", f"/v1/blobs/{quote(other)}")[0] == 404
    blobs = agent.folder / "agent/caches/blobs"
    assert [p.name for p in blobs.iterdir()] == [digest.removeprefix("sha256:")]


@pytest.mark.parametrize("digest", ["sha256:../../etc/passwd", "md5:00", "sha256:" + "A" * 64, ""])
def test_what_is_no_digest_is_no_path_either(agent: Agent, digest: str) -> None:
    status, _ = agent.raw("PUT", f"/v1/blobs/{quote(digest, safe='')}", b"x")
    assert status in (404, 422)
    assert not list((agent.folder / "agent/caches/blobs").iterdir())


def test_an_upload_that_breaks_off_leaves_nothing(agent: Agent) -> None:
    digest = "sha256:" + "0" * 64
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(agent.socket_path)
        sock.sendall(f"PUT /v1/blobs/{quote(digest)} HTTP/1.1\r\nContent-Length: 1000\r\n\r\nabc".encode())
    blobs = agent.folder / "agent/caches/blobs"
    eventually(lambda: not list(blobs.iterdir()), "the half written blob is gone")
    assert agent.raw("HEAD", f"/v1/blobs/{quote(digest)}")[0] == 404


def test_clients_that_hang_up_in_the_middle_of_a_stream_cost_nothing(agent: Agent) -> None:
    attempt = agent.begin(argv=["sleep", "60"])
    before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    for _ in range(20):
        stream = agent.events(attempt)
        next(stream)
        stream.close()
    eventually(lambda: len(os.listdir(f"/proc/{agent.process.pid}/fd")) <= before, "descriptors are closed")
    agent.call("POST", agent.path(attempt, "/stop"), {"grace_s": 0})
    agent.finish(attempt)


def test_jobs_leave_no_descriptors_and_no_processes_in_the_agent(agent: Agent) -> None:
    for _ in range(3):
        agent.run_function(lambda: 1)
    agent.hang_up()
    eventually(lambda: not _zombies(agent), "no zombies")
    before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    for _ in range(10):
        agent.run_function(lambda: 1)
    agent.hang_up()
    eventually(lambda: len(os.listdir(f"/proc/{agent.process.pid}/fd")) <= before, "descriptors are closed")


def _zombies(agent: Agent) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as f:
                    fields = f.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] == "Z" and int(fields[1]) == agent.process.pid:
                found.append(int(name))
    return found


def test_stats_tell_what_runs(agent: Agent) -> None:
    assert agent.call("GET", "/v1/stats")["attempt"] is None
    attempt = agent.begin(argv=["sleep", "60"])
    stats = agent.call("GET", "/v1/stats")
    assert stats["attempt"] == attempt
    assert stats["processes"] >= 3
    assert stats["rss_bytes"] > 0
    assert stats["disk_free_bytes"] > 0


def test_a_shutdown_ends_the_running_attempt_and_the_agent(agent: Agent) -> None:
    attempt = agent.begin(argv=["sleep", "60"])
    agent.wait_started(attempt)
    agent.call("POST", "/v1/shutdown")
    assert agent.process.wait(15) == 0


def test_the_socket_is_the_users_alone(agent: Agent) -> None:
    assert os.stat(agent.socket_path).st_mode & 0o077 == 0
