"""Small parts on their own: HTTP, configuration, errors, signals of completion, jobs by id, the embedded broker's start."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import firepool
from firepool import errors
from firepool_ray import _config, _embedded, _errors
from firepool_ray._api import Api
from firepool_ray._completion import Completion, wait_for
from firepool_ray._config import Settings, Target, with_profile
from firepool_ray._http import Address, Connections, Disconnected, Request
from tests.sdk.fake_broker import FakeBroker, until

# -- HTTP --


@contextmanager
def peer(*answers: bytes, close: bool = False) -> Iterator[tuple[Connections, list[bytes]]]:
    """A server that answers the n-th request with the n-th bytes."""
    server = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def serve() -> None:
        left = list(answers)
        while left:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                while left:
                    data = sock.recv(65536)
                    if not data:
                        break
                    seen.append(data)
                    for byte in (left.pop(0),):
                        sock.sendall(byte)
                    if close:
                        break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    connections = Connections(Address.parse(f"http://127.0.0.1:{server.getsockname()[1]}"), 5.0, None)
    try:
        yield connections, seen
    finally:
        connections.close()
        server.shutdown(socket.SHUT_RDWR) if sys.platform == "linux" else None
        server.close()
        thread.join(5)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def test_answers_with_a_length_in_chunks_and_to_the_end() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\nTrailer: 1\r\n\r\n"
    with peer(OK, chunked, OK) as (connections, _):
        assert [connections.call(Request("GET", "/")).body for _ in range(3)] == [b"hi"] * 3
    with peer(b"HTTP/1.0 200 OK\r\n\r\nhi", close=True) as (connections, _):
        assert connections.call(Request("GET", "/")).body == b"hi"
    with peer(b"HTTP/1.1 100 Continue\r\n\r\n" + OK) as (connections, _):
        assert connections.call(Request("GET", "/")).body == b"hi"
    with peer(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n") as (connections, _):
        assert connections.call(Request("HEAD", "/")).body == b""


def test_a_request_is_one_segment_with_what_it_needs() -> None:
    with peer(OK) as (connections, seen):
        connections.call(Request("POST", "/v1/jobs", b"{}", {"X": "y"}))
    assert seen[0].startswith(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:") and seen[0].endswith(b"\r\n\r\n{}")
    assert b"Content-Length: 2\r\n" in seen[0] and b"X: y\r\n" in seen[0]


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    with peer(OK, OK, close=True) as (connections, seen):
        assert [connections.call(Request("GET", "/")).body for _ in range(2)] == [b"hi", b"hi"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", b"x" * 70000]
)
def test_what_is_not_http_is_a_broken_connection(answer: bytes) -> None:
    with peer(answer, close=True) as (connections, _), pytest.raises(Disconnected) as caught:
        connections.call(Request("GET", "/"))
    assert caught.value.sent


def test_words_of_a_proxy_are_not_the_brokers() -> None:
    answer = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 14\r\n\r\n<html>no</html"
    with peer(answer) as (connections, _), pytest.raises(errors.BrokerUnavailable, match="502"):
        api = Api(Target(address=connections.address.text), request_timeout_s=5, patience_s=0)
        try:
            api.json("GET", "/v1/version")
        finally:
            api.close()


def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            sock.recv(65536)
            sock.sendall(OK)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    connections = Connections(Address.parse(f"unix:{path}"), 5.0, None)
    assert connections.call(Request("GET", "/")).body == b"hi"
    connections.close()
    thread.join(5)
    server.close()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("http://a:8", "a", 8),
        ("a:8", "a", 8),
        ("https://a/base/", "a", 443),
        ("http://[::1]:5", "::1", 5),
        ("http://a", "a", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    found = Address.parse(text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["ftp://a", "http://", "http://a:port"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(text)


# -- configuration --


def test_the_program_beats_the_environment_and_that_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firepool.toml").write_text(
        'profile = "big"\n[sku_alias]\ngpu = "h200"\n'
        '[profiles.big]\naddress = "http://big:1"\ntoken = "t"\n[profiles.small]\naddress = "http://small:1"\n'
        '[profiles.small.sku_alias]\ngpu = "cpu"\n'
    )
    found = with_profile(Settings())
    assert (found.address, found.token, found.sku_alias) == ("http://big:1", "t", {"gpu": "h200"})
    monkeypatch.setenv("FIREPOOL_PROFILE", "small")
    assert with_profile(Settings()).sku_alias == {"gpu": "cpu"}
    monkeypatch.setenv("FIREPOOL_ADDRESS", "http://env:1")
    assert with_profile(Settings()).address == "http://env:1"
    assert with_profile(Settings(address="http://said:1")).address == "http://said:1"
    with pytest.raises(errors.BadRequest, match="big, small"):
        with_profile(Settings(profile="huge"))


def test_the_file_is_found_in_a_parent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "firepool.toml").write_text('[profiles.p]\naddress = "http://p:1"\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert with_profile(Settings(profile="p")).address == "http://p:1"


def test_a_sku_means_what_the_alias_says(broker: FakeBroker) -> None:
    firepool.init(broker.address, sku_alias={"gpu": "wild"})

    @firepool.remote(sku="gpu")
    def f() -> int:
        return 1

    assert f.remote().result() == 1
    assert broker.jobs["j1"].spec["sku"] == "wild"


def test_a_running_local_broker_is_found_by_its_file(broker: FakeBroker, tmp_path: Path) -> None:
    broker.token = "secret"
    folder = _config.home()
    folder.mkdir(parents=True)
    (folder / "token").write_text("secret\n")
    (folder / "broker.json").write_text(
        json.dumps({"address": broker.address, "pid": os.getpid(), "token_file": str(folder / "token")})
    )
    connected = firepool.init()
    assert (connected.how, connected.address) == ("local", broker.address)


def test_the_file_of_a_broker_that_is_gone_is_not_believed() -> None:
    folder = _config.home()
    folder.mkdir(parents=True)
    (folder / "broker.json").write_text(json.dumps({"address": "http://127.0.0.1:1", "pid": 2**22 + 1}))
    assert _config.local_broker(folder) is None
    (folder / "broker.json").write_text("{")
    assert _config.local_broker(folder) is None


# -- the embedded broker --


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_embedded, "find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(firepool.MissingExtra, match=r"fastapi: pip install 'firepool-ray\[local\]'") as caught:
        firepool.init("embedded")
    assert isinstance(caught.value, ImportError) and caught.value.fault == "user"


def test_a_broker_that_does_not_start_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _embedded, "command", lambda: [sys.executable, "-c", "print('no port left'); raise SystemExit(3)"]
    )
    with pytest.raises(errors.BrokerUnavailable, match="no port left"):
        firepool.init("embedded")


def test_a_broker_that_never_gets_ready_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(_embedded, "command", lambda: [sys.executable, "-c", code])
    with pytest.raises(errors.BrokerUnavailable, match="not ready"):
        firepool.init("embedded", start_timeout_s=3)
    assert not _config.process_lives(int(pid.read_text()))


# -- errors --


class Fussy(OSError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, "why")
        self.extra = b


def test_an_exception_keeps_what_its_class_and_its_c_base_hold() -> None:
    error = _errors.task_error({"message": "Fussy: x", "details": {"type": "Fussy", "traceback": "tb"}}, Fussy(2, 3))
    assert isinstance(error, Fussy) and isinstance(error, firepool.TaskError)
    assert (error.errno, error.extra, error.strerror) == (2, 3, "why")


def test_an_exception_that_steers_control_flow_is_not_raised_by_a_strangers_wish() -> None:
    for name in ("StopIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "os.system", "int", "Exception"):
        assert type(_errors.task_error({"message": "x", "details": {"type": name}}, None)) is firepool.TaskError


def test_a_user_error_of_a_class_that_cannot_be_combined_is_still_a_task_error() -> None:
    class Final(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("no heirs")

    cause = Final("x")
    error = _errors.task_error({"message": "Final: x"}, cause)
    assert type(error) is firepool.TaskError and error.cause is cause


# -- completion --


def test_completion_wakes_everyone_once() -> None:
    completion, seen = Completion(), []
    completion.subscribe(lambda: seen.append(1))
    assert not completion.wait(0) and not completion.wait(0.01)
    waiter = threading.Thread(target=lambda: seen.append(completion.wait(10)))
    waiter.start()
    completion.complete()
    completion.complete()
    waiter.join()
    completion.subscribe(lambda: seen.append(2))
    assert sorted(seen) == [1, 1, 2] and completion.wait(None)


def test_waiting_for_some_of_many() -> None:
    many = [Completion() for _ in range(5)]
    many[3].complete()
    wait_for(many, 1, None)
    wait_for(many, 2, 0.01)
    for completion in many[:2]:
        completion.complete()
    wait_for(many, 3, 5)
    assert not any(c._waiters for c in many)


# -- jobs by id --


def test_a_command_is_a_job(connected: FakeBroker) -> None:
    job = firepool.submit([sys.executable, "-c", "print('one'); print('two')"], env={"A": "b"}, labels={"k": "v"})
    ended = job.result(30)
    assert ended.exit_code == 0 and ended.state == "SUCCEEDED"
    assert (
        b"".join(job.logs.stream()) == b"one\ntwo\n" and job.logs.tail(1) == ["two"] and job.logs.fetch(4) == b"two\n"
    )
    again = firepool.Job.from_id(job.id)
    assert again == job and again.status() == "SUCCEEDED" and again.explain()["path"] == "warm"
    assert again.url.endswith(f"/v1/jobs/{job.id}")
    assert [event["terminal"] for event in job.events()] == [True]
    assert "client_lease_s" not in connected.jobs[job.id].spec


def test_a_failed_command_raises_its_error(connected: FakeBroker) -> None:
    job = firepool.submit([sys.executable, "-c", "raise SystemExit(3)"])
    assert job.wait(30).exit_code == 3
    with pytest.raises(errors.NonZeroExit):
        job.result()


def test_a_command_can_be_cancelled_and_waited_for_with_a_time_out(connected: FakeBroker) -> None:
    job = firepool.submit([sys.executable, "-c", "import threading; threading.Event().wait()"])
    with pytest.raises(firepool.GetTimeoutError):
        job.wait(0.05)
    events = job.events()
    assert next(events)["terminal"] is False
    assert job.cancel(wait=True) == "CANCELLED"
    assert list(events)[-1]["state"] == "CANCELLED"
    with pytest.raises(errors.Cancelled):
        job.result()
    with pytest.raises(errors.NotFound):
        firepool.Job.from_id("j99").status()


def test_a_log_is_followed_while_the_job_writes(connected: FakeBroker, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = f"print('first', flush=True)\nimport os, threading\nwhile not os.path.exists({str(gate)!r}): threading.Event().wait(.01)\nprint('last')"
    job = firepool.submit([sys.executable, "-c", code])
    stream = job.logs.stream()
    seen = next(stream)
    gate.write_text("")
    assert seen.startswith(b"f") and seen + b"".join(stream) == b"first\nlast\n"


def test_a_command_is_a_list_of_texts(connected: FakeBroker) -> None:
    for wrong in ("ls -l", [1]):
        with pytest.raises(TypeError):
            firepool.submit(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        firepool.submit(["ls"], no_such=1)  # type: ignore[call-arg]
    until(lambda: not connected.jobs)
