"""Real pods for tests: a nursery of one's own, and inside every pod a small agent that runs code as attempts and resets.

The small agent stands in for the server: it uses the same rooms (scratch, isolate, janitor, reset), so what is tested is the
pod and not HTTP. `Nest` cleans up after itself by pid, also when the test failed.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from firepool_agent import gpu, isolate
from firepool_agent.cgroups import JobGroup
from firepool_agent.janitor import Janitor
from firepool_agent.reset import Resetter
from firepool_agent.scratch import Scratch, Slot
from firepool_wire.nursery import PodConfig

#: Expression for inside a pod: what lies in each place where a job may write. An interpreter that lies below /tmp stays visible.
LISTED = (
    "[[n for n in __import__('os').listdir(d) if not any(p.startswith(f'{d}/{n}/') for p in"
    " (__import__('sys').prefix, *__import__('sys').path))] for d in ('/job', '/home/job', '/tmp', '/dev/shm')]"
)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CAN_NAMESPACE = sys.platform == "linux" and isolate.probe().level == "namespaces"


def until(check: Any, what: str, timeout_s: float = 15.0) -> Any:
    """Poll `check` until it is true. Raises: AssertionError with `what`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        select.select([], [], [], 0.005)


class SmallAgent:
    """What runs in a test's pod."""

    def __init__(self, config: PodConfig) -> None:
        self.config = config
        self.janitor = Janitor.start(config)
        self.scratch = Scratch(config)
        self.uids = isolate.Uids(config)
        self.resetter = Resetter(config, self.janitor, self.scratch)
        self.group = JobGroup(config)
        self.slot: Slot | None = None
        self.guard = 0
        self.status_r = self.out_r = -1
        self.resetter.baseline()

    def attempt(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run code as an attempt; answers when it ended, or after `timeout_s` with what it said so far."""
        self.slot = slot = self.scratch.fresh(self.uids.next())
        self.status_r, status_w = os.pipe()
        self.out_r, out_w = os.pipe()
        started = time.perf_counter()
        child = isolate.fork_attempt(self.config, slot, status_w)
        if child is None:
            _be_the_job(self.config, slot, ask, out_w)
        assert child is not None
        os.close(status_w)
        os.close(out_w)
        self.guard = child.pid
        readable, _, _ = select.select([self.status_r], [], [], float(ask.get("timeout_s", 20)))
        end = isolate.read_end(os.read(self.status_r, 4096)) if readable else None
        out = b""
        while select.select([self.out_r], [], [], 0)[0] and (data := os.read(self.out_r, 65536)):
            out += data
        return {
            "out": out.decode(errors="replace"),
            "uid": slot.uid,
            "guard": child.pid,
            "took_ms": (time.perf_counter() - started) * 1000,
            "ended": bool(readable),
            "end": asdict(end) if end else None,
            "exit": os.waitstatus_to_exitcode(end.status) if end else None,
        }

    def reset(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Reset after the last attempt, as the server would."""
        report = self.resetter.run(self.slot, self.guard, float(ask.get("wait_s", 5)))
        if self.guard:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.guard, 0)
        for fd in (self.status_r, self.out_r):
            if fd >= 0:
                os.close(fd)
        self.slot, self.guard, self.status_r, self.out_r = None, 0, -1, -1
        return report.to_json()

    def look(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run code in the agent itself; its `result` comes back."""
        names: dict[str, Any] = {"agent": self, "gpu": gpu, "isolate": isolate}
        exec(ask["code"], names)
        return {"result": names.get("result")}


def _be_the_job(config: PodConfig, slot: Slot, ask: dict[str, Any], out_w: int) -> None:
    code = 1
    try:
        os.dup2(out_w, 1)
        os.dup2(out_w, 2)
        os.closerange(3, 4096)
        for fd in ask.get("close", []):
            os.close(fd)
        exposure = isolate.Exposure(ask.get("package"), tuple(ask.get("layers", ())))
        isolate.enter_attempt(config, slot, exposure)
        exec(compile(ask["code"], "<job>", "exec"), {"__name__": "__job__"})
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve(config: PodConfig) -> int:
    """Entry that the nursery calls."""
    agent = SmallAgent(config)
    listener = socket.socket(fileno=config.listen_fd)
    os.write(config.ready_fd, b"1")
    os.close(config.ready_fd)
    while True:
        peer, _ = listener.accept()
        with peer, peer.makefile("rwb") as stream:
            ask = json.loads(stream.readline())
            if ask["do"] == "config":
                answer = config.to_json()
            elif ask["do"] == "settled":
                answer = {"problems": agent.resetter.wait_settled()}
            elif ask["do"] == "exit":
                return int(ask.get("code", 0))
            else:
                try:
                    answer = getattr(agent, ask["do"])(ask)
                except Exception:
                    answer = {"failed": traceback.format_exc()}
            stream.write(json.dumps(answer).encode() + b"\n")


@dataclass(frozen=True)
class House:
    """Where the agent's code lies, which Python runs it, and as whom."""

    root: str = ROOT
    python: str = sys.executable
    uid: int = os.geteuid()
    #: Command line in front of the nursery's (a changed view of the machine).
    before: tuple[str, ...] = ()
    #: What runs in a pod: the small agent, or `firepool_agent.server:serve`.
    serve: str = "tests.agent.podkit:serve"


class Nest:
    """A nursery for one test (or module)."""

    def __init__(
        self,
        *,
        env: dict[str, str] | None = None,
        orphan_s: float = 60.0,
        house: "House | None" = None,
        directories: tuple[str, str] | None = None,
    ) -> None:
        house = house or House()
        made = directories or (tempfile.mkdtemp(prefix="fp-home-"), tempfile.mkdtemp(prefix="fp-run-"))
        self.home, self.run_dir = made
        for path in made:
            os.makedirs(path, exist_ok=True)
            os.chown(path, house.uid, house.uid)
        command = [
            *house.before,
            house.python,
            "-m",
            "firepool_agent.nursery",
            "--home",
            self.home,
            "--run",
            self.run_dir,
        ]
        command += ["--serve", house.serve, "--orphan-timeout-s", str(orphan_s)]
        as_other: dict[str, Any] = {}
        if house.uid != os.geteuid():
            as_other = {"user": house.uid, "group": house.uid, "extra_groups": []}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": house.root, **(env or {})},
            cwd=house.root,
            start_new_session=True,
            **as_other,
        )
        path = f"{self.run_dir}/nursery.sock"
        until(lambda: os.path.exists(path) or self.process.poll() is not None, "the nursery's socket")
        self.peer = socket.socket(socket.AF_UNIX)
        self.peer.settimeout(30)
        self.peer.connect(path)
        self._stream = self.peer.makefile("rwb")
        self.facts: list[dict[str, Any]] = []

    def say(self, **message: Any) -> None:
        """Send one request."""
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def hear(self, kind: str, name: str = "") -> dict[str, Any]:
        """The next message of a kind (for a pod); others are kept."""
        while True:
            for fact in self.facts:
                if fact["is"] == kind and (not name or name == fact.get("name", fact.get("pod", {}).get("name"))):
                    self.facts.remove(fact)
                    return fact
            line = self._stream.readline()
            assert line, f"the nursery hung up while waiting for {kind} {name}"
            fact = json.loads(line)
            assert kind != "made" or fact["is"] != "refused", fact
            self.facts.append(fact)

    def make(self, name: str = "pod", **wish: Any) -> dict[str, Any]:
        """Make a pod and wait until it is ready; its state."""
        self.say(do="make", wish={"name": name, "sku": "cpu", "template": "t0", **wish})
        state = self.hear("made", name)["pod"]
        self.hear("ready", name)
        return state

    def ask(self, name: str, do: str, **more: Any) -> dict[str, Any]:
        """One call to a pod's small agent."""
        path = f"{self.run_dir}/{name}.sock"
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(60)
            peer.connect(path)
            with peer.makefile("rwb") as stream:
                stream.write(json.dumps({"do": do, **more}).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        assert line, f"pod {name} hung up"
        answer: dict[str, Any] = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer

    def attempt(self, code: str, name: str = "pod", **more: Any) -> dict[str, Any]:
        """Run code as an attempt in a pod."""
        return self.ask(name, "attempt", code=code, **more)

    def reset(self, name: str = "pod", **more: Any) -> dict[str, Any]:
        """Reset a pod."""
        return self.ask(name, "reset", **more)

    def look(self, code: str, name: str = "pod") -> Any:
        """Run code in the agent of a pod; its `result`."""
        return self.ask(name, "look", code=code)["result"]

    def close(self) -> None:
        """End the nursery and everything in it; by force when it does not answer."""
        with contextlib.suppress(Exception):
            self.say(do="end")
            self.hear("over")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with contextlib.suppress(OSError):
            self._stream.close()
        self.peer.close()
        for path in (self.home, self.run_dir):
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> "Nest":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
