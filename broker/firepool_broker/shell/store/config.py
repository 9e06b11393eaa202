"""Running configuration that outlives the broker: callers with their limits, and the pools as last applied.

A broker that starts without a pools file goes on with what ran before.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firepool_broker.core.ids import Caller
from firepool_broker.core.pools import CallerLimits, Pool
from firepool_broker.shell.rows import StoreDown
from firepool_broker.shell.store.database import Database
from firepool_wire.jobspec import from_sparse, sparse

_SET = (
    "INSERT INTO settings (name, body, updated_at) VALUES (?, ?, ?)"
    " ON CONFLICT (name) DO UPDATE SET body = excluded.body, updated_at = excluded.updated_at"
)
_LIMIT = (
    "INSERT INTO callers (name, created_at, limits) VALUES (?, ?, ?)"
    " ON CONFLICT (name) DO UPDATE SET limits = excluded.limits"
)


class Configuration:
    """Settings, callers and limits of one open `Database`. Every call raises `StoreDown` when the store cannot serve."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def save_pools(self, pools: Sequence[Pool]) -> None:
        """Keep the pools as the running configuration."""
        await self._set("pools", [sparse(pool) for pool in pools])

    async def load_pools(self) -> list[Pool] | None:
        """The pools as last applied; None: none ever were."""
        body = self._get("pools")
        return None if body is None else [from_sparse(Pool, pool) for pool in body]

    async def set_limits(self, caller: Caller, limits: CallerLimits) -> None:
        """Set a caller's hard limits; an unknown caller becomes known."""
        row = (caller, self._clock(), json.dumps(sparse(limits)))
        await self._database.writer.do(lambda c: c.execute(_LIMIT, row).rowcount)

    async def limits(self) -> Mapping[Caller, CallerLimits]:
        """Every known caller with its limits."""
        rows = self._rows("SELECT name, limits FROM callers ORDER BY name", ())
        return {Caller(name): from_sparse(CallerLimits, json.loads(body)) for name, body in rows}

    async def add_caller(self, caller: Caller) -> bool:
        """Make a caller known; False: it was already."""
        text = "INSERT INTO callers (name, created_at, limits) VALUES (?, ?, '{}') ON CONFLICT DO NOTHING"
        row = (caller, self._clock())
        return await self._database.writer.do(lambda c: c.execute(text, row).rowcount) > 0

    async def people(self, caller: Caller) -> list[str]:
        """Persons that had a token of the caller."""
        return [name for (name,) in self._rows("SELECT name FROM people WHERE caller = ? ORDER BY name", (caller,))]

    async def _set(self, name: str, body: Any) -> None:
        row = (name, json.dumps(body), self._clock())
        await self._database.writer.do(lambda c: c.execute(_SET, row).rowcount)

    def _get(self, name: str) -> Any:
        rows = self._rows("SELECT body FROM settings WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def _rows(self, text: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._database.near.execute(text, values).fetchall()
        except sqlite3.Error as error:
            raise StoreDown(f"the configuration cannot be read: {error}") from error
