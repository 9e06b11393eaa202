"""A broker beside this program: started as a child process by its console script, so nothing of it is imported here.

It ends with this process, however that ends (`--embedded-parent`).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

from firepool_ray._config import Settings, Target, local_broker
from firepool_ray._errors import MissingExtra
from firepool_wire.errors import BrokerUnavailable

#: Packages of the `local` extra whose absence is found before anything is started.
_NEEDED = ("firepool_broker", "firepool_agent", "fastapi", "uvicorn", "sqlmodel")
_LOOK_EVERY_S = 0.01
_STOP_S = 10.0


class Child:
    """The embedded broker's process and its folder."""

    def __init__(self, process: "subprocess.Popen[bytes]", home: Path) -> None:
        self._process = process
        self.home = home

    def lives(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of what it wrote."""
        try:
            text = (self.home / "broker.log").read_text(errors="replace").strip()
        except OSError:
            text = ""
        code = self._process.poll()
        return f"exit code {code}\n{text[-2000:]}" if text else f"exit code {code}, it wrote nothing"

    def stop(self) -> None:
        """End it and remove its folder; its pods end with it."""
        if self.lives():
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def command() -> list[str]:
    """How to start the broker with this interpreter. Raises: MissingExtra."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"a broker beside this program needs {', '.join(missing)}: pip install 'firepool-ray[local]', or name a "
            "running broker with firepool.init('http://host:port') or FIREPOOL_ADDRESS",
            missing=missing,
        )
    script = Path(sys.executable).with_name("firepool-broker" + (".exe" if os.name == "nt" else ""))
    return [str(script)] if script.is_file() else [sys.executable, "-m", "firepool_broker"]


def start(settings: Settings) -> tuple[Target, Child]:
    """Start one and wait until it takes jobs. Raises: MissingExtra, BrokerUnavailable."""
    start_with = command()
    home = Path(tempfile.mkdtemp(prefix="firepool-"))
    options = ["--home", str(home), "--embedded-parent", str(os.getpid()), "--port", "0", "--python", sys.executable]
    options += ["--simulate", settings.simulate] if settings.simulate else []
    options += ["--pools", settings.pools] if settings.pools else []
    with (home / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [*start_with, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the program; it ends its broker itself.
            start_new_session=os.name == "posix",
        )
    child = Child(process, home)
    try:
        return _wait(child, settings.start_timeout_s), child
    except BaseException:
        child.stop()
        raise


def _wait(child: Child, timeout_s: float) -> Target:
    deadline = monotonic() + timeout_s
    while monotonic() < deadline:
        if not child.lives():
            raise BrokerUnavailable(f"the embedded broker did not start: {child.last_words()}")
        found = local_broker(child.home)
        if found is not None:
            return Target(address=found.address, token=found.token, how="embedded", home=child.home)
        sleep(_LOOK_EVERY_S)
    raise BrokerUnavailable(f"the embedded broker was not ready after {timeout_s:g} s: {child.last_words()}")
