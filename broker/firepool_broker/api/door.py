"""The outermost layer of the application: whatever an endpoint raises leaves here as a problem document.

Pure ASGI, since every request pays for it. An error after the answer has begun cannot be told any more: the connection is
cut, so that no client takes a broken-off stream for a complete one.
"""

from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firepool_broker.api.answers import problem, surprise
from firepool_broker.shell.ports import StoreDown
from firepool_wire.errors import BadRequest, FirepoolError, NotFound, StoreUnavailable


class StreamCut(Exception):
    """Raised inside a streaming answer: break the connection off without the answer's end."""


class Door:
    """Turns exceptions into answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (ClientDisconnect, StreamCut):
            return
        except Exception as error:
            told = as_told(error, scope)
            if begun:
                raise
            await problem(told)(scope, receive, send)


def as_told(error: Exception, scope: Scope) -> FirepoolError:
    """The error of the table that a client hears for an exception."""
    if isinstance(error, FirepoolError):
        return error
    if isinstance(error, StoreDown):
        return StoreUnavailable(f"the store cannot answer now: {error}", retry_after_s=1.0)
    return surprise(error, f"{scope['method']} {scope['path']}")


async def http_problem(request: Request, error: Any) -> Any:
    """Handler of starlette's own refusals (no such route, method not allowed)."""
    if error.status_code == 404:
        return problem(NotFound(f"no such endpoint: {request.method} {request.url.path[:200]}"))
    headers = dict(error.headers or {})
    return problem(BadRequest(str(error.detail)), status=error.status_code, headers=headers)
