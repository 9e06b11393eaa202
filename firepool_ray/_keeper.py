"""The thread that keeps jobs alive: renews the client lease of everything in flight, so that jobs of a program that died
end by themselves. Started with the first job that has a lease.
"""

import threading
from typing import TYPE_CHECKING

from firepool_ray._http import path_of
from firepool_wire.errors import FirepoolError

if TYPE_CHECKING:
    from firepool_ray._session import Session

#: A lease is renewed this many times within its length.
RENEWALS = 4
#: Job ids of one renewal.
_PAGE = 20_000


class Keeper:
    """Renews leases until closed."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Make sure that leases are renewed from now on."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="firepool-keeper", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(max(0.05, self._session.shortest_lease_s / RENEWALS)):
            ids = self._session.leased()
            for n in range(0, len(ids), _PAGE):
                self._renew(ids[n : n + _PAGE])

    def _renew(self, ids: list[str]) -> None:
        try:
            self._session.api.json(
                "POST", path_of("clients", f"{self._session.client}:renew"), {"jobs": ids}, patience_s=0
            )
        except FirepoolError as why:
            # The next round comes well within the lease.
            self._session.note(f"leases were not renewed: {why}")
