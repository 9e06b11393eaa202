"""Who is asking, and may they: bearer tokens, roles, and whose things a caller may see.

A token is verified once and believed for a short while (never past its expiry). Somebody else's job does not exist:
the answer is the same `NotFound` as for a job that never was, so ids cannot be probed.
"""

import hashlib
import time
from dataclasses import dataclass
from enum import IntEnum

from firepool_broker.shell.ports import Identity, TokenStore
from firepool_wire.errors import Forbidden, NotFound, Unauthenticated

#: Verified tokens remembered at most; beyond that the oldest half is forgotten.
REMEMBERED = 10_000


class Role(IntEnum):
    """What a token may do; a higher role may do all that a lower one may."""

    PUBLIC = 0
    VIEWER = 1
    SUBMITTER = 2
    TEAM_ADMIN = 3
    OPERATOR = 4

    @property
    def word(self) -> str:
        """As `Identity.role` spells it."""
        return self.name.lower().replace("_", "-")


#: Word of an identity → role.
ROLES = {role.word: role for role in Role if role is not Role.PUBLIC}


@dataclass(frozen=True, slots=True)
class _Known:
    who: Identity
    #: `time.monotonic()` until which the store need not be asked again.
    until: float


class Gate:
    """Verifies tokens against the store, with a short memory."""

    def __init__(self, tokens: TokenStore, remember_s: float) -> None:
        self._tokens = tokens
        self._remember_s = remember_s
        #: By the token's hash: a dump of the broker's memory should not be a list of keys.
        self._known: dict[bytes, _Known] = {}

    async def identify(self, authorization: str | None) -> Identity:
        """The identity behind an `Authorization` header.

        Raises:
            Unauthenticated: no token, or one that is unknown, expired or revoked.
        """
        token = _bearer(authorization)
        key = hashlib.sha256(token.encode()).digest()
        known = self._known.get(key)
        if known is not None and known.until > time.monotonic() and not _expired(known.who):
            return known.who
        self._known.pop(key, None)
        who = await self._tokens.identify(token)
        if who is None or _expired(who) or who.role not in ROLES:
            raise Unauthenticated("the token is unknown, expired or revoked")
        self._remember(key, who)
        return who

    def _remember(self, key: bytes, who: Identity) -> None:
        if len(self._known) >= REMEMBERED:
            for old in list(self._known)[: REMEMBERED // 2]:
                del self._known[old]
        self._known[key] = _Known(who, time.monotonic() + self._remember_s)

    def forget(self) -> None:
        """Ask the store about every token again (one was revoked)."""
        self._known.clear()


def _bearer(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthenticated("no token: send `Authorization: Bearer <token>`")
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("not a bearer token: send `Authorization: Bearer <token>`")
    return token


def _expired(who: Identity) -> bool:
    return who.expires_at is not None and who.expires_at <= time.time()


def require(who: Identity, role: Role) -> None:
    """Raises: Forbidden: the identity's role is below `role`."""
    if ROLES[who.role] < role:
        raise Forbidden(f"this needs the role {role.word}, the token has {who.role}", needs=role.word, has=who.role)


def is_operator(who: Identity) -> bool:
    """Whether the identity sees across callers."""
    return who.role == Role.OPERATOR.word


def may_see(who: Identity, caller: str) -> bool:
    """Whether something that belongs to `caller` exists for the identity."""
    return who.caller == caller or is_operator(who)


def no_such(kind: str, name: str) -> NotFound:
    """The one answer for what does not exist and for what belongs to somebody else."""
    return NotFound(f"no {kind} {name[:200]!r}", kind=kind, name=name[:200])
