"""The line to the nursery: starts it or finds the one that an earlier broker left, and exchanges JSON lines with it.

What the messages mean is `provider`'s business. The nursery outlives this process on purpose; it is started in a session of
its own and told its broker's absence only by the line going dead.
"""

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from firepool_wire.errors import Internal
from firepool_wire.nursery import NURSERY_VERSION

Heard = Callable[[dict[str, Any]], None]

#: How long a nursery may take to come up (it imports the agent), and to end its pods.
_START_S, _END_S = 30.0, 30.0
_LONGEST_LINE = 16 << 20
#: Bytes that an address of a Unix socket can hold, less what a pod's name and `.sock` need.
_SHORT = 60


def run_directory(home: Path) -> Path:
    """The private directory for the sockets of a home: in it where the path is short enough, else a short one in /tmp.

    Raises: Internal: the directory is somebody else's.
    """
    inside = home / "run"
    if len(str(inside)) > _SHORT:
        inside = Path(f"/tmp/firepool-{os.geteuid()}-{zlib.crc32(str(home.resolve()).encode()):08x}")
    inside.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = inside.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise Internal(f"{inside} is not a directory of this user: remove it and start again")
    inside.chmod(0o700)
    return inside


class Link:
    """One connection to the nursery of a home."""

    def __init__(self, home: Path, heard: Heard, lost: Callable[[], None]) -> None:
        self.home = home.absolute()
        self.run = run_directory(self.home)
        self._heard, self._lost = heard, lost
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: The nursery's `hello`.
        self.about: Mapping[str, Any] = {}

    @property
    def up(self) -> bool:
        """Whether messages can be sent."""
        return self._writer is not None

    async def open(self, *, orphan_timeout_s: float) -> None:
        """Connect to a nursery of our version, starting one if need be. Raises: Internal: it does not come up."""
        found = await self._connect()
        if found is not None and await self._greet(*found):
            return
        self._start(orphan_timeout_s)
        async with asyncio.timeout(_START_S):
            while (found := await self._connect()) is None:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise Internal(f"the nursery ended at once ({self._process.returncode}): {self._last_words()}")
                await asyncio.sleep(0.005)
        if not await self._greet(*found):
            raise Internal("the nursery speaks another version right after its start")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return await asyncio.open_unix_connection(self.run / "nursery.sock", limit=_LONGEST_LINE)
        return None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Exchange hellos; False when it was one of another version, which is then ended."""
        writer.write(b'{"do": "hello"}\n')
        async with asyncio.timeout(_START_S):
            self.about = json.loads(await reader.readline() or b"{}")
        if self.about.get("version") == NURSERY_VERSION:
            self._writer = writer
            self._reader_task = asyncio.create_task(self._listen(reader), name="nursery line")
            return True
        writer.write(b'{"do": "end"}\n')
        async with asyncio.timeout(_END_S):
            while await reader.readline():
                pass
        writer.close()
        return False

    def _start(self, orphan_timeout_s: float) -> None:
        if self._process is not None:
            self._process.wait()  # it hung up by dying
        with (self.home / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "firepool_agent", "nursery"),
                    *("--home", str(self.home), "--run", str(self.run), "--orphan-timeout-s", str(orphan_timeout_s)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def _last_words(self) -> str:
        text = (self.home / "nursery.log").read_text(errors="replace")
        return text.strip()[-500:]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._heard(json.loads(line))
        except ConnectionError:
            pass  # the same as an end of the line
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._lost()

    def say(self, **message: Any) -> None:
        """Send a request. Raises: Internal: there is no nursery."""
        if self._writer is None:
            raise Internal("the nursery is gone")
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def hang_up(self) -> None:
        """Leave the nursery to itself (and to the next broker)."""
        task, self._reader_task = self._reader_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        if self._process is not None and self._process.poll() is None:
            # It stays, by design; Popen would complain about a child that it thinks was forgotten.
            self._process.returncode = 0

    async def wait_ended(self) -> None:
        """After `end`: wait until the nursery has closed the line (every pod is verified gone then) and reap it."""
        if self._reader_task is not None:
            await asyncio.wait({self._reader_task}, timeout=_END_S)
        if self._process is not None:
            await asyncio.to_thread(self._process.wait, _END_S)
        with contextlib.suppress(OSError):
            self.run.rmdir()
