"""A broker of one's own for the time of a `with` block, in a folder of its own, with the SDK connected to it.

What the demo and the benchmarks of the real path run on: the real process with its durable store, real pods. It ends with
this program, and everything it made goes with it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import firepool_ray as firepool
from firepool_ray.cli.api import Api, Target

_READY_S = 60.0
#: Jobs on one page of the API's list, at most.
_PAGE = 500


class Venue:
    """A broker with these pools (the text of a pools file)."""

    def __init__(self, pools: str, name: str = "benchmark") -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"firepool-{name}-"))
        (self.home / "pools.toml").write_text(pools)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "firepool_broker", "--home", str(self.home)]
        command += ["--pools", str(self.home / "pools.toml"), "--embedded-parent", str(os.getpid())]
        with (self.home / "broker.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._await_ready(self._process)
            self.address = json.loads((self.home / "broker.json").read_text())["address"]
            firepool.init(self.address, token=self.token)
        except BaseException:
            self.close()
            raise
        return self

    def _await_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + _READY_S
        while not (self.home / "broker.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the broker did not start:\n{(self.home / 'broker.log').read_text()}")
            time.sleep(0.02)

    @property
    def token(self) -> str:
        """The broker's own token."""
        return (self.home / "token").read_text().strip()

    @property
    def pid(self) -> int:
        """The broker's process."""
        assert self._process is not None, "the venue was entered"
        return self._process.pid

    def bodies(self, run: str) -> list[dict[str, Any]]:
        """Every job of a run, as the API shows it, newest first."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        with Target(self.address, self.token, "").connect() as api:
            while True:
                page = api.get("/v1/jobs", run=run, limit=str(_PAGE), **cursor)
                found += page["jobs"]
                if not page["cursor"]:
                    return found
                cursor = {"cursor": page["cursor"]}

    def body(self, job: str) -> dict[str, Any]:
        """One job, as the API shows it."""
        with Target(self.address, self.token, "").connect() as api:
            found: dict[str, Any] = api.get(f"/v1/jobs/{job}")
        return found

    def explain(self, job: str) -> str:
        """What `firepool explain` says of a job."""
        with Target(self.address, self.token, "").connect() as api:
            return str(api.get(f"/v1/jobs/{job}/explain")["text"])

    def api(self) -> Api:
        """The broker's API; close it."""
        return Target(self.address, self.token, "").connect().__enter__()

    def interpreter(self, sku: str) -> str:
        """Path of the pool's job interpreter."""
        with Target(self.address, self.token, "").connect() as api:
            found = api.get("/v1/version")["interpreters"]
        return next(str(entry["python"]) for entry in found if entry["sku"] == sku)

    def await_idle(self, sku: str, count: int, timeout_s: float = 30.0) -> None:
        """Return once the pool has this many idle pods. Raises: TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with Target(self.address, self.token, "").connect() as api:
            while sum(pod["state"] == "idle" for pod in api.get("/v1/pods", sku=sku)["pods"]) < count:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"pool {sku} had not {count} idle pods within {timeout_s:g} s")
                time.sleep(0.01)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the broker, its pods and its folder."""
        firepool.shutdown()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def pool(sku: str, *, pods: int, ready: int = 0, memory_mib: int = 512, untrusted: bool = False) -> str:
    """A table of a pools file: pods of one core, held for longer than any benchmark runs."""
    return f"""
[pools.{sku}]
max_count = {pods}
min_count = {ready}
max_idle_count = {pods}
step = {pods}
idle_timeout_s = 600
untrusted = {str(untrusted).lower()}

[pools.{sku}.shape]
cpus = 1
memory_mib = {memory_mib}
"""
