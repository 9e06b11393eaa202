"""Callers, their limits and their tokens. Operators act for everyone, a team's admin for the own team.

A token's text is shown once, when it is made; the store keeps a hash.
"""

import time
from dataclasses import dataclass
from typing import Literal

from fastapi import Request, Response
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from firepool_broker.api.answers import answer
from firepool_broker.api.auth import ROLES, Role, is_operator, no_such, require
from firepool_broker.api.limits import read_body
from firepool_broker.api.lobby import lobby, who
from firepool_broker.api.routes import declared, json_of, router
from firepool_broker.api.rules import bad_values, by_table
from firepool_broker.api.specs import parse_as
from firepool_broker.core.pools import CallerLimits
from firepool_broker.shell.ports import Identity
from firepool_wire.errors import Conflict, Forbidden, NotFound, PayloadTooLarge

api = router()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerBody:
    """A caller and its hard limits."""

    caller: str
    limits: CallerLimits = CallerLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBody:
    """The token to make. `ttl_s` None: it does not expire."""

    name: str
    caller: str | None = None
    person: str | None = None
    role: Literal["viewer", "submitter", "team-admin", "operator"] = "submitter"
    ttl_s: float | None = None


class TokenMade(TypedDict):
    """A new token; its text is not shown again."""

    name: str
    token: str
    caller: str
    person: str
    role: str
    expires_at: float | None


_CALLER: TypeAdapter[CallerBody] = TypeAdapter(CallerBody)
_LIMITS: TypeAdapter[CallerLimits] = TypeAdapter(CallerLimits)
_TOKEN: TypeAdapter[TokenBody] = TypeAdapter(TokenBody)

SHAPES = (CallerBody, CallerLimits, TokenBody, TokenMade)


@api.post(
    "/v1/callers",
    **declared(Role.OPERATOR, PayloadTooLarge, ok={200: json_of("CallerBody")}, body=json_of("CallerBody")),
)
async def set_caller(request: Request) -> Response:
    """Name a caller and set its limits; the same call changes them. They hold from the next claim on."""
    desk = lobby(request)
    named = parse_as(_CALLER, CallerBody, await read_body(request, desk.settings.small_bytes))
    _check("CallerBody", named)
    return await _limited(request, named)


@api.put(
    "/v1/callers/{caller}/limits",
    **declared(Role.OPERATOR, PayloadTooLarge, ok={200: json_of("CallerBody")}, body=json_of("CallerLimits")),
)
async def set_limits(request: Request, caller: str) -> Response:
    """Set a caller's limits."""
    desk = lobby(request)
    limits = parse_as(_LIMITS, CallerLimits, await read_body(request, desk.settings.small_bytes))
    named = CallerBody(caller=caller, limits=limits)
    _check("CallerBody", named)
    return await _limited(request, named)


async def _limited(request: Request, named: CallerBody) -> Response:
    _check("CallerLimits", named.limits)
    await lobby(request).runner.limit(named.caller, named.limits)
    return answer(named)


@api.post(
    "/v1/tokens",
    **declared(Role.TEAM_ADMIN, PayloadTooLarge, Conflict, ok={201: json_of("TokenMade")}, body=json_of("TokenBody")),
)
async def make_token(request: Request) -> Response:
    """Make a token. A team's admin makes tokens of the own caller, up to the own role."""
    desk, me = lobby(request), who(request)
    asked = parse_as(_TOKEN, TokenBody, await read_body(request, desk.settings.small_bytes))
    _check("TokenBody", asked)
    expires = time.time() + asked.ttl_s if asked.ttl_s is not None else None
    identity = Identity(
        caller=asked.caller or me.caller, person=asked.person or me.person, role=asked.role, expires_at=expires
    )
    _may_manage(me, identity.caller)
    require(me, ROLES[identity.role])
    token = await desk.runner.tokens.create(identity, asked.name)
    made: TokenMade = {
        "name": asked.name,
        "token": token,
        "caller": identity.caller,
        "person": identity.person,
        "role": identity.role,
        "expires_at": expires,
    }
    return answer(made, 201)


@api.delete("/v1/tokens/{name}", **declared(Role.TEAM_ADMIN, NotFound, ok={204: None}))
async def revoke_token(request: Request, name: str, caller: str | None = None) -> Response:
    """Revoke a token of the own caller (an operator names any); it stops working at once."""
    desk, me = lobby(request), who(request)
    owner = caller or me.caller
    _may_manage(me, owner)
    revoked = await desk.runner.tokens.revoke(name, owner)
    desk.gate.forget()
    if not revoked:
        raise no_such("token", name)
    return Response(status_code=204)


def _may_manage(me: Identity, caller: str) -> None:
    if caller != me.caller and not is_operator(me):
        raise Forbidden("only an operator manages other callers' tokens")


def _check(name: str, value: object) -> None:
    if found := list(by_table(name, value)):
        raise bad_values(found)
