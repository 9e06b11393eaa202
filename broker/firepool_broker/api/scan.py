"""Reading many of a caller's jobs for one figure: page by page, bounded, so that no answer holds the broker up."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from firepool_broker.api.lobby import Lobby
from firepool_broker.shell.ports import JobFilter, JobRow

#: Rows of one read; the event loop turns between two.
_PAGE = 500


class Scan:
    """One pass over the jobs that a filter finds, newest first."""

    def __init__(self, desk: Lobby, where: JobFilter) -> None:
        self._store = desk.runner.store
        self._where = where
        self._left = desk.settings.scan_rows
        #: There were more jobs than one answer reads.
        self.truncated = False

    async def rows(self) -> AsyncIterator[JobRow]:
        """The rows."""
        cursor: str | None = None
        while True:
            found, cursor = await self._store.page(replace(self._where, cursor=cursor, limit=_PAGE))
            for row in found[: self._left]:
                yield row
            self._left -= len(found)
            self.truncated = self._left < 0 or (self._left == 0 and cursor is not None)
            if cursor is None or self._left <= 0:
                return


def percentile(ordered: Sequence[float], q: float) -> float | None:
    """The q-quantile (0–1) of sorted figures by linear interpolation (spec §13); None: no figures."""
    if not ordered:
        return None
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
