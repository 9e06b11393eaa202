"""What the agent remembers on its own disk: who used the pod last, and how attempts ended, until the broker took it over.

One append-only file of JSON lines, rewritten when the agent starts or the file has grown. No `fsync`: the pod does not outlive
its node's power, so what has to survive is the broker and, at weak isolation levels, this process; the page cache does.
"""

import json
import os
from pathlib import Path
from typing import Any

#: The file is rewritten with what still counts beyond this many bytes.
COMPACT_BYTES = 1 << 20


class Journal:
    """Records by attempt id, and the last user of the pod."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        #: Attempt id → {"user": {...}, "exit": {...} | None}.
        self.attempts: dict[str, dict[str, Any]] = {}
        #: Caller, person, queue and tag of the last prepared attempt; None = never used.
        self.last_user: dict[str, Any] | None = None
        for line in self._lines():
            self._apply(line)
        self._rewrite()

    def prepared(self, attempt: str, user: dict[str, Any]) -> None:
        """Record who will run here. Written before the broker may commit the start."""
        self._write({"prepared": attempt, "user": user})

    def abandoned(self, attempt: str, last_user: dict[str, Any] | None) -> None:
        """The attempt never ran; the pod's last user is again the one before it."""
        self._write({"abandoned": attempt, "user": last_user})

    def ended(self, attempt: str, exit_record: dict[str, Any]) -> None:
        """Record how it ended."""
        self._write({"ended": attempt, "exit": exit_record})

    def acknowledged(self, attempt: str) -> None:
        """The broker has stored exit record and log."""
        self._write({"acked": attempt})

    def _write(self, line: dict[str, Any]) -> None:
        self._apply(line)
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._size += len(data)
        if self._size > COMPACT_BYTES:
            self._rewrite()
        else:
            os.write(self._fd, data)

    def _apply(self, line: dict[str, Any]) -> None:
        match line:
            case {"last_user": user}:
                self.last_user = user
            case {"prepared": attempt, "user": user}:
                self.last_user = user
                self.attempts[attempt] = {"user": user, "exit": None}
            case {"abandoned": attempt, "user": user}:
                self.last_user = user
                self.attempts.pop(attempt, None)
            case {"ended": attempt, "exit": exit_record}:
                self.attempts.setdefault(attempt, {"user": None})["exit"] = exit_record
            case {"acked": attempt}:
                self.attempts.pop(attempt, None)

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().split(b"\n")
        # The last piece is empty, or a line that was cut off while it was written: it never took effect.
        return [json.loads(line) for line in lines[:-1] if line]

    def _rewrite(self) -> None:
        lines: list[dict[str, Any]] = []
        for attempt, record in self.attempts.items():
            lines.append({"prepared": attempt, "user": record["user"]})
            if record["exit"] is not None:
                lines.append({"ended": attempt, "exit": record["exit"]})
        lines.append({"last_user": self.last_user})
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
