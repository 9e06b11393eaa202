"""The thread that listens: one stream of changes of the caller's jobs, taken up again at the last `seq` when it breaks.

Nothing is lost by a break: jobs that ended meanwhile are told again. When nobody answers for long, waiters are told why
they wait.
"""

import json
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from firepool_ray._http import Connection, Disconnected
from firepool_wire.errors import FirepoolError
from firepool_wire.words import JobState

if TYPE_CHECKING:
    from firepool_ray._session import Session

#: The broker says something every 10 s; a stream that is silent for longer than this is dead.
SILENCE_S = 30.0
#: Pauses between two tries to get the stream back.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 2.0
#: Say once that nobody answers, after this long.
_COMPLAIN_S = 10.0


class Events:
    """Reads the stream and hands every line to the session."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        #: Place in the stream; None = from now on.
        self._seq: int | None = None
        self._connection: Connection | None = None
        self._closed = False
        #: When the broker last said something, on the monotonic clock.
        self._heard_at = 0.0
        #: Set once the stream stands: what is submitted from then on cannot be missed.
        self.listening = threading.Event()
        #: Why the first try failed, for `init`.
        self.refused: FirepoolError | None = None
        self._thread = threading.Thread(target=self._run, name="firepool-events", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Break the stream off and stop."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        pause, tried_at, complained_at = _FIRST_PAUSE_S, 0.0, 0.0
        self._heard_at = monotonic()
        while not self._closed:
            tried_at = monotonic()
            try:
                self._listen()
            except (Disconnected, FirepoolError, ValueError) as why:
                if self._session.closed:
                    return
                if isinstance(why, FirepoolError) and not why.retryable:
                    self._give_up(why)
                    return
                if self._session.broker_is_gone():
                    return
                if monotonic() - self._heard_at > _COMPLAIN_S and complained_at < self._heard_at:
                    complained_at = monotonic()
                    self._session.note(f"no broker answers at {self._session.api.target.address} ({why}); still trying")
            if self._closed or self._session.api.closing.wait(pause):
                return
            pause = _FIRST_PAUSE_S if self._heard_at > tried_at else min(pause * 2, _MAX_PAUSE_S)

    def _give_up(self, why: FirepoolError) -> None:
        """The broker refuses to tell (a revoked token, say): nothing that waits can ever end."""
        self.refused = why
        self.listening.set()
        self._session.lose_all(why)

    def _listen(self) -> None:
        """Read until the stream ends."""
        query = f"?client={self._session.client}" + ("" if self._seq is None else f"&from={self._seq}")
        with self._session.api.stream("/v1/events" + query, silence_s=SILENCE_S) as (_, connection, pieces):
            self._connection = connection
            rest = b""
            for piece in pieces:
                self._heard_at = monotonic()
                *lines, rest = (rest + piece).split(b"\n") if rest else piece.split(b"\n")
                for line in lines:
                    if line:
                        self._line(json.loads(line))
                self.listening.set()

    def _line(self, line: dict[str, Any]) -> None:
        if "seq" in line and (line.get("terminal") or self._seq is None or line.get("heartbeat")):
            self._seq = line["seq"]
        if "job" not in line:
            return
        call = self._session.find(line["job"], line.get("idempotency_key"))
        if call is None:
            if not line.get("terminal"):
                self._session.unknown(line["job"], JobState(line["state"]))
        elif line.get("terminal"):
            self._session.finished(call, line["body"], line.get("result"))
        else:
            self._session.moved(call, JobState(line["state"]))
