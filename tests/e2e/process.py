"""A real `firepool-broker` process in a folder of its own, talked to by plain HTTP with nothing of ours in between."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 60.0
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class BrokerProcess:
    """One broker process after the other over the same home."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: http.client.HTTPConnection | None = None

    def start(self) -> None:
        """Start and wait until it takes jobs."""
        with (self.home / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "firepool_broker", "--home", str(self.home), *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "FIREPOOL_ORPHAN_TIMEOUT_S": "60"},
            )
        self.until(lambda: self._published_by(self.process), "broker.json")

    def _published_by(self, process: "subprocess.Popen[bytes] | None") -> bool:
        assert process is not None
        assert process.poll() is None, f"the broker ended: {self.log()}"
        try:
            return bool(json.loads((self.home / "broker.json").read_text())["pid"] == process.pid)
        except FileNotFoundError:
            return False

    def log(self) -> str:
        return (self.home / "broker.log").read_text()[-4000:]

    @property
    def address(self) -> str:
        return str(json.loads((self.home / "broker.json").read_text())["address"])

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        assert self.process is not None
        self.hang_up()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.hang_up()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def hang_up(self) -> None:
        """Close the connection to the broker."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request as the operator of the token file."""
        if self._connection is None:
            host = urlsplit(self.address).netloc
            self._connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        token = (self.home / "token").read_text()
        try:
            self._connection.request(method, path, data, {"Authorization": f"Bearer {token}"})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError):
            self.hang_up()
            raise

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """A request that must succeed; its JSON answer."""
        status, answer = self.call(method, path, body)
        assert status < 300, f"{method} {path}: {status} {answer!r}\n{self.log()}"
        return json.loads(answer) if answer else None

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.json("POST", "/v1/jobs", spec)["id"])

    def done(self, job: str) -> Any:
        """The terminal body of a job."""
        return self.until(lambda: self._ended(job), f"the end of {job}")

    def _ended(self, job: str) -> Any:
        body = self.json("GET", f"/v1/jobs/{job}/wait?timeout_s=5")
        return body if body["state"] in TERMINAL else None

    def until(self, true: Any, what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true()):
            assert time.monotonic() < deadline, f"{what} did not come\n{self.log()}"
            time.sleep(0.01)
        return found


@contextmanager
def broker(home: Path, *flags: str) -> Iterator[BrokerProcess]:
    """A running broker; at the end it is stopped with all its pods, also when the test failed."""
    one = BrokerProcess(home, *flags)
    try:
        one.start()
        yield one
    finally:
        if one.process is not None:
            if one.process.poll() is not None:  # the next broker finds the pods of a dead one and ends them
                one.start()
            one.stop()
