"""What every endpoint finds on its request: the runner, the settings, and who is asking."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastapi import Request

from firepool_broker.api.auth import Gate, is_operator, may_see, no_such
from firepool_broker.api.limits import Admission, ApiSettings
from firepool_broker.api.needs import Broker
from firepool_broker.api.references import References
from firepool_broker.core.pools import Pool
from firepool_broker.shell.ports import Identity, JobRow
from firepool_wire.errors import Forbidden

Stamp = Callable[[Sequence[Pool]], list[Pool]]


@dataclass(frozen=True, slots=True)
class Lobby:
    """One per application."""

    runner: Broker
    settings: ApiSettings
    gate: Gate
    admission: Admission
    references: References
    #: Gives pools their template digests; `main` knows what a pod is made from.
    stamp: Stamp
    #: Set when the broker is about to stop: open streams break off, their clients come back elsewhere.
    closing: asyncio.Event = field(default_factory=asyncio.Event)


def lobby(request: Request) -> Lobby:
    """The application's lobby."""
    found: Lobby = request.app.state.lobby
    return found


def who(request: Request) -> Identity:
    """The verified identity; put there by `routes.Guarded` before any endpoint runs."""
    found: Identity = request.scope["firepool.who"]
    return found


async def visible_row(request: Request, job: str) -> JobRow:
    """The job's row.

    Raises:
        NotFound: no such job for this caller.
    """
    row = await lobby(request).runner.row(job)
    if row is None or not may_see(who(request), row.caller):
        raise no_such("job", job)
    return row


def caller_asked_for(request: Request, caller: str | None) -> str | None:
    """Whose things a list shows: the asker's own; for an operator those of the caller named, or (None) of everyone.

    Raises:
        Forbidden: another caller's things were asked for.
    """
    me = who(request)
    if is_operator(me):
        return caller
    if caller is not None and caller != me.caller:
        raise Forbidden("only an operator sees other callers' things")
    return me.caller
