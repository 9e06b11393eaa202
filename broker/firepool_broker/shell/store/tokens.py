"""`ports.TokenStore`: bearer tokens by the sha256 of their text, which is never stored.

A token of 256 random bits needs no slow hash: there is nothing to guess. Identified tokens are cached for as long as this
broker leads: it is the only writer, and forgets at every change what a change could touch.
"""

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Literal

from firepool_broker.shell.ports import Identity
from firepool_broker.shell.rows import StoreDown
from firepool_broker.shell.store.database import Database
from firepool_wire.errors import BadRequest, Conflict

#: Weakest first; the API says what each may do.
ROLES: tuple[str, ...] = ("viewer", "submitter", "team-admin", "operator")

#: Begin of every token, so that a leaked one is recognised by secret scanners.
PREFIX = "fp_"

#: Most tokens cached. Raise: memory. Lower: a 20 µs read for more requests.
_CACHED = 10_000


class SqliteTokens:
    """The tokens, callers and people of one open `Database`."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        #: Wall clock seconds, compared with expiry.
        self._clock = clock
        self._known: dict[bytes, Identity] = {}

    async def identify(self, token: str) -> Identity | None:
        """Who the token speaks for; None: unknown, expired or revoked. Raises: StoreDown."""
        digest = _digest(token)
        identity = self._known.get(digest)
        if identity is None:
            identity = self._read(digest)
            if identity is None:
                return None
            if len(self._known) >= _CACHED:
                self._known.clear()
            self._known[digest] = identity
        if identity.expires_at is not None and identity.expires_at <= self._clock():
            self._known.pop(digest, None)
            return None
        return identity

    async def create(self, identity: Identity, name: str) -> str:
        """A new token's text, shown once; makes its caller and person known.

        Raises:
            BadRequest: no such role, or an empty or malformed name.
            Conflict: the caller has a valid token of that name.
            StoreDown: nothing was written.
        """
        if identity.role not in ROLES:
            raise BadRequest(f"No such role: {identity.role!r}; roles are {', '.join(ROLES)}.", field="role")
        for field, value in (("caller", identity.caller), ("person", identity.person), ("name", name)):
            if not value or not value.isprintable():
                raise BadRequest(f"A {field} is one or more printable characters, not {value!r}.", field=field)
        token = PREFIX + secrets.token_urlsafe(32)
        created = await self._database.writer.do(lambda c: _insert(c, identity, name, token, self._clock()))
        if created == "taken":
            raise Conflict(f"The caller {identity.caller} already has a token named {name}; revoke it first.")
        return token

    async def revoke(self, name: str, caller: str) -> bool:
        """Make the caller's token of that name void from now on; False: there is no such valid token."""
        text = "UPDATE tokens SET revoked_at = ? WHERE caller = ? AND name = ? AND revoked_at IS NULL"
        at = self._clock()
        count = await self._database.writer.do(lambda c: c.execute(text, (at, caller, name)).rowcount)
        self._known = {d: i for d, i in self._known.items() if i.caller != caller}
        return count > 0

    def _read(self, digest: bytes) -> Identity | None:
        text = "SELECT caller, person, role, expires_at FROM tokens WHERE digest = ? AND revoked_at IS NULL"
        try:
            row = self._database.near.execute(text, (digest.hex(),)).fetchone()
        except sqlite3.Error as error:
            raise StoreDown(f"the token store cannot be read: {error}") from error
        return None if row is None else Identity(caller=row[0], person=row[1], role=row[2], expires_at=row[3])


def _digest(token: str) -> bytes:
    # What no token can be (half a surrogate pair from a header) must be unknown, not an error.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _insert(
    connection: sqlite3.Connection, identity: Identity, name: str, token: str, now: float
) -> Literal["created", "taken"]:
    connection.execute(
        "INSERT INTO callers (name, created_at, limits) VALUES (?, ?, '{}') ON CONFLICT DO NOTHING",
        (identity.caller, now),
    )
    connection.execute(
        "INSERT INTO people (caller, name, created_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (identity.caller, identity.person, now),
    )
    # An expired token gives its name free.
    connection.execute(
        "UPDATE tokens SET revoked_at = ? WHERE caller = ? AND name = ? AND revoked_at IS NULL AND expires_at <= ?",
        (now, identity.caller, name, now),
    )
    values = (_digest(token).hex(), name, identity.caller, identity.person, identity.role, now, identity.expires_at)
    added = connection.execute(
        "INSERT INTO tokens (digest, name, caller, person, role, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        values,
    )
    return "created" if added.rowcount else "taken"
