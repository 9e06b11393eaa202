"""How the API answers: JSON as bytes without detours, errors as `application/problem+json` (RFC 9457) from the one table.

The body of a problem holds what `FirepoolError.to_json` says, so a Python client rebuilds the same exception from it.
"""

import inspect
import secrets
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import Response
from pydantic_core import to_json

from firepool_wire.errors import TABLE, FirepoolError, Internal

PROBLEM = "application/problem+json"

_log: Any = structlog.get_logger("firepool.api")


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer. Figures that do not exist (NaN, infinities) are null."""
    return Response(to_json(body, inf_nan_mode="null"), status, headers, "application/json")


def problem_body(error: FirepoolError, status: int | None = None) -> dict[str, Any]:
    """The problem document of an error."""
    return {
        "type": f"urn:firepool:error:{error.code}",
        "title": title_of(error.code),
        "status": status or error.status,
        "detail": error.message,
        **error.to_json(),
    }


def problem(error: FirepoolError, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that carries an error; `status` only where HTTP itself knows better (405)."""
    extra = dict(headers or {})
    if error.retry_after_s is not None:
        # The header knows whole seconds only; a client that reads the body gets the exact figure.
        extra["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        extra["WWW-Authenticate"] = 'Bearer realm="firepool"'
    body = problem_body(error, status)
    return Response(to_json(body, inf_nan_mode="null", fallback=str), body["status"], extra, PROBLEM)


def title_of(code: str) -> str:
    """The first sentence of what the error table says about a class."""
    cls = TABLE.get(code, Internal)
    return (inspect.getdoc(cls) or code).partition("\n")[0]


def surprise(error: BaseException, doing: str) -> Internal:
    """An unforeseen exception as `Internal`: the whole story goes to the log under an id, the client gets only the id
    (texts of exceptions may hold paths, SQL or secrets)."""
    incident = secrets.token_hex(8)
    _log.error("surprise", incident=incident, doing=doing, exc_info=error)
    return Internal(
        f"the broker met a bug of its own; its log has the story under incident {incident}", incident=incident
    )
