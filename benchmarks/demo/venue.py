"""The broker that the demo runs on: started for it in a folder of its own, one pool an arm, gone at the end."""

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

#: One pool an arm, so that no arm uses another's pods; 4 pods each, of one core and 512 MiB.
_POOL = """
[pools.demo-{arm}]
max_count = 4
idle_timeout_s = 60
untrusted = true
simulated_start_s = {start_s}
step = 200

[pools.demo-{arm}.shape]
cpus = 1
memory_mib = 512
"""

_READY_S = 60.0


class Venue:
    """A broker for the time of a `with` block, and the SDK connected to it."""

    def __init__(self, start_s: float, arms: tuple[str, ...] = ("on", "off", "fresh")) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="firepool-demo-"))
        (self._home / "pools.toml").write_text("".join(_POOL.format(arm=arm, start_s=start_s) for arm in arms))
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        command = [
            sys.executable,
            "-m",
            "firepool_broker",
            "--home",
            str(self._home),
            "--pools",
            str(self._home / "pools.toml"),
        ]
        log = (self._home / "broker.log").open("wb")
        self._process = subprocess.Popen([*command, "--embedded-parent", str(os.getpid())], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + _READY_S
        while not (self._home / "broker.json").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the broker did not start:\n{(self._home / 'broker.log').read_text()}")
            time.sleep(0.02)
        self.address = json.loads((self._home / "broker.json").read_text())["address"]
        firepool.init(self.address, token=self.token)
        return self

    @property
    def token(self) -> str:
        """The broker's own token."""
        return (self._home / "token").read_text().strip()

    def bodies(self, run: str) -> list[dict[str, Any]]:
        """Every job of a run, as the API shows it."""
        with Target(self.address, self.token, "").connect() as api:
            found: list[dict[str, Any]] = api.get("/v1/jobs", run=run, limit="500")["jobs"]
        return found

    def explain(self, job: str) -> str:
        """What `firepool explain` says of a job."""
        with Target(self.address, self.token, "").connect() as api:
            return str(api.get(f"/v1/jobs/{job}/explain")["text"])

    def api(self) -> Api:
        """The broker's API; close it."""
        return Target(self.address, self.token, "").connect().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        firepool.shutdown()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)
