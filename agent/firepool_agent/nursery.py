"""The nursery: one warm, single-threaded process per broker home that makes pods and sees them out.

It has its own session and outlives its broker: pods keep running through a broker's crash, and the next broker finds them
here with their annotations. Without a broker for `orphan_timeout_s` it ends everything itself. It holds no jobs and no
secrets; what a pod is made of is `birth`'s and `rootfs`'s business, what it does the agent's.

    python -m firepool_agent.nursery --home DIR --run DIR [--orphan-timeout-s N] [--serve module:function]
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firepool_agent import birth, procfs, syscalls
from firepool_agent.estate import Estate
from firepool_agent.line import Line
from firepool_wire.errors import FirepoolError, Internal
from firepool_wire.nursery import NURSERY_VERSION, PodState, PodWish
from firepool_wire.version import FIREPOOL
from firepool_wire.words import Isolation


@dataclass(slots=True)
class _Pod:
    """A pod and what the nursery holds for it."""

    state: PodState
    born: birth.Born
    pod_dir: str
    number: int
    ready_at: float
    why: str = ""


class Nursery:
    """The loop and its pods."""

    def __init__(self, estate: Estate, listener: socket.socket, serve: birth.Serve, orphan_timeout_s: float) -> None:
        self._estate, self._serve = estate, serve
        self._orphan_timeout_s = orphan_timeout_s
        self._selector = selectors.DefaultSelector()
        self._pods: dict[str, _Pod] = {}
        #: Pods that ended while nobody listened, by name, until the broker forgets them.
        self._ended: dict[str, dict[str, Any]] = {}
        self._orphan_since: float | None = time.monotonic()
        self._ending = False
        self._line = Line(self._selector, listener, self._obey, self._broker_changed)
        self._woken = _wake_on_signals()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))

    # -- life ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to end or orphaned too long; every pod is verified gone when this returns."""
        gc.freeze()
        try:
            while not (self._ending and not self._pods):
                self._turn(self._timeout())
                self._pass_time()
        finally:
            self._tear_down()

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            now = self._selector.get_map().get(key.fd)
            if now is None or now.data is not key.data:
                continue  # what came before it in this turn closed it
            try:
                key.data()
            except Exception:  # noqa: BLE001  (a fault over one pod must not cost every other pod its keeper)
                traceback.print_exc()

    def _timeout(self) -> float | None:
        now = time.monotonic()
        waits = [p.ready_at - now for p in self._pods.values() if not p.state.ready and p.ready_at > now]
        if self._orphan_since is not None:
            waits.append(self._orphan_since + self._orphan_timeout_s - now)
        return max(0.0, min(waits)) if waits else None

    def _pass_time(self) -> None:
        now = time.monotonic()
        for pod in self._pods.values():
            if not pod.state.ready and pod.born.ready == -1 and not pod.state.ending and now >= pod.ready_at:
                self._tell_ready(pod)
        if self._orphan_since is not None and now - self._orphan_since >= self._orphan_timeout_s:
            self.end()

    def end(self) -> None:
        """Unmake every pod; `run` returns when the last one is gone."""
        self._ending = True
        self._orphan_since = None
        for name in list(self._pods):
            self._unmake(name, "the nursery ends")

    def _tear_down(self) -> None:
        for pod in list(self._pods.values()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pod.born.pidfd, signal.SIGKILL)
        until = time.monotonic() + 10
        while self._pods and time.monotonic() < until:
            self._turn(0.1)
        self._estate.close()
        self._line.say({"is": "over"})

    # -- the broker ----------------------------------------------------------------------------------------------

    def _broker_changed(self, there: bool) -> None:
        self._orphan_since = None if there or self._ending else time.monotonic()

    def _obey(self, ask: dict[str, Any]) -> None:
        match ask.get("do"):
            case "hello":
                self._line.say(
                    {
                        "is": "hello",
                        "pid": os.getpid(),
                        "version": NURSERY_VERSION,
                        "firepool": FIREPOOL,
                        **self._estate.abilities(),
                    }
                )
            case "make":
                self._answer_make(PodWish.from_json(ask["wish"]))
            case "unmake":
                self._unmake(str(ask["name"]), str(ask.get("why", "")))
            case "annotate":
                self._annotate(str(ask["name"]), ask["set"])
            case "list":
                self._line.say(
                    {
                        "is": "pods",
                        "pods": [p.state.to_json() for p in self._pods.values()],
                        "ended": list(self._ended.values()),
                    }
                )
            case "forget":
                for name in ask["names"]:
                    self._ended.pop(name, None)
            case "end":
                self.end()
            case other:
                self._line.say(
                    {"is": "refused", "name": "", "error": Internal(f"the nursery does not know {other!r}").to_json()}
                )

    def _annotate(self, name: str, changes: dict[str, str | None]) -> None:
        pod = self._pods.get(name)
        if pod is None:
            return
        for key, value in changes.items():
            if value is None:
                pod.state.annotations.pop(key, None)
            else:
                pod.state.annotations[key] = value

    # -- making --------------------------------------------------------------------------------------------------

    def _answer_make(self, wish: PodWish) -> None:
        try:
            pod = self._pods.get(wish.name) or self._make(wish)
            if pod.state.ending:
                raise Internal(f"pod {wish.name} is just being unmade")
            self._line.say({"is": "made", "pod": pod.state.to_json()})
        except FirepoolError as e:
            self._line.say({"is": "refused", "name": wish.name, "error": e.to_json()})
        except OSError as e:
            error = Internal(f"pod {wish.name} could not be made: {e}")
            self._line.say({"is": "refused", "name": wish.name, "error": error.to_json()})

    def _make(self, wish: PodWish) -> _Pod:
        started = time.monotonic()
        if self._ending:
            raise Internal("the nursery is ending")
        self._estate.refuse_if_impossible(wish)
        number = self._free_number()
        order = self._estate.order(wish, number)
        try:
            born = birth.bear(order, self._serve, self._estate.attach(order))
            self._estate.site.enter(wish.name, born.pid)
        except (FirepoolError, OSError):
            self._estate.give_back(wish.name, order.pod_dir)
            raise
        state = PodState(
            name=wish.name,
            sku=wish.sku,
            template=wish.template,
            created_at=time.time(),
            socket=order.socket,
            pid=born.pid,
            incarnation=order.boot_id,
            single_use=wish.single_use,
            isolation=order.level,
            isolation_why=order.why,
            address=born.address,
            annotations=dict(wish.annotations),
            cards=wish.cards,
            made_ms=round((time.monotonic() - started) * 1000, 3),
        )
        pod = _Pod(state, born, order.pod_dir, number, time.monotonic() + wish.simulated_start_s)
        self._pods[wish.name] = pod
        self._ended.pop(wish.name, None)
        self._selector.register(born.pidfd, selectors.EVENT_READ, lambda: self._gone(pod))
        self._selector.register(born.ready, selectors.EVENT_READ, lambda: self._heard_ready(pod))
        return pod

    def _free_number(self) -> int:
        taken = {pod.number for pod in self._pods.values()}
        return next(n for n in range(len(taken) + 1) if n not in taken)

    # -- facts ---------------------------------------------------------------------------------------------------

    def _heard_ready(self, pod: _Pod) -> None:
        byte = os.read(pod.born.ready, 1)
        self._selector.unregister(pod.born.ready)
        os.close(pod.born.ready)
        pod.born.ready = -1 if byte else -2  # -2: it went away without; the pidfd tells the rest
        if byte and time.monotonic() >= pod.ready_at:
            self._tell_ready(pod)

    def _tell_ready(self, pod: _Pod) -> None:
        pod.state.ready = True
        self._line.say({"is": "ready", "name": pod.state.name})

    def _unmake(self, name: str, why: str) -> None:
        pod = self._pods.get(name)
        if pod is None or pod.state.ending:
            return
        pod.state.ending, pod.why = True, why
        self._estate.site.kill(name)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pod.born.pidfd, signal.SIGKILL)

    def _gone(self, pod: _Pod) -> None:
        """The agent's process is dead, and with it (PID namespace, or the sweep below) everything in the pod."""
        name = pod.state.name
        self._selector.unregister(pod.born.pidfd)
        if pod.born.ready >= 0:
            self._selector.unregister(pod.born.ready)
            os.close(pod.born.ready)
        status = _reap(pod.born.pid)
        trouble = _drain(pod.born.trouble)
        os.close(pod.born.pidfd)
        del self._pods[name]
        if pod.state.isolation in (Isolation.UID, Isolation.PROCESS):
            self._estate.site.kill(name)
            self._sweep_orphans()
        oom = status == signal.SIGKILL and not pod.state.ending and self._estate.site.oom_kills(name) > 0
        why = pod.why or (f"the agent ended with {_in_words(status)}" if not trouble else "the pod could not be built")
        fact = {"is": "ended", "name": name, "why": why, "oom": oom}
        if trouble and not pod.state.ready:
            fact["error"] = json.loads(trouble)
        elif not pod.state.ready and not pod.state.ending:
            fact["why"] = f"{why}; its log ends: {self._estate.log_tail(name)}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pod.state.socket)
        self._ended[name] = fact
        self._line.say(fact)  # its processes are gone; directories and groups are nobody's business but ours
        self._estate.give_back(name, pod.pod_dir)

    def _sweep_orphans(self) -> None:
        """Kill what dead agents left: at the weaker levels orphans become our children, as we are their sub-reaper."""
        agents = {pod.born.pid for pod in self._pods.values()}
        until = time.monotonic() + 5
        while time.monotonic() < until:
            orphans = [p for p in procfs.processes() if p.parent == os.getpid() and p.pid not in agents]
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)
                _reap(orphan.pid)


def _wake_on_signals() -> socket.socket:
    """A socket that is readable after a signal: a handler alone would not end a sleeping `select`."""
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    return ours


def _reap(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _in_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _load(name: str) -> birth.Serve:
    module, _, function = name.partition(":")
    serve: birth.Serve = getattr(importlib.import_module(module), function)
    return serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the nursery of a home; prints nothing, answers on `<run>/nursery.sock`."""
    parser = argparse.ArgumentParser(prog="firepool-agent nursery", description="makes this machine's pods")
    parser.add_argument("--home", required=True, help="directory of the broker, absolute")
    parser.add_argument("--run", required=True, help="short, private directory for sockets")
    parser.add_argument("--orphan-timeout-s", type=float, default=600.0)
    parser.add_argument("--serve", default="firepool_agent.server:serve", help="what runs in a pod: module:function")
    options = parser.parse_args(arguments)
    serve = _load(options.serve)
    with contextlib.suppress(OSError):
        syscalls.become_subreaper()
        syscalls.set_name("fp-nursery")
    path = f"{options.run}/nursery.sock"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.new")
    os.chmod(f"{path}.new", 0o600)
    listener.listen(8)
    nursery = Nursery(Estate(options.home, options.run), listener, serve, options.orphan_timeout_s)
    signal.signal(signal.SIGTERM, lambda *_: nursery.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.rename(f"{path}.new", path)
    try:
        nursery.run()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
