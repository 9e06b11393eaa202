"""How a route is declared: with the role that it needs and the errors that it may answer, or not at all.

`Guarded` is the only class of route of the application: it verifies the token and the role before anything of the endpoint
runs, and refuses query parameters that the endpoint does not know. A route that names no role cannot be registered, so
a new route without authentication fails when the application is built.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from firepool_broker.api.answers import PROBLEM
from firepool_broker.api.auth import Role, require
from firepool_broker.api.lobby import lobby
from firepool_broker.api.specs import nearest
from firepool_wire.errors import (
    BadRequest,
    FirepoolError,
    Forbidden,
    Internal,
    StoreUnavailable,
    Unauthenticated,
    UnknownField,
)

#: Where a route's declaration keeps its role in the OpenAPI document.
ROLE = "x-firepool-role"
#: Prefixes of query parameters that are a family (`label.k=v`).
FAMILIES = "x-firepool-query-families"

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Guarded(APIRoute):
    """A route behind the gate."""

    def get_route_handler(self) -> Handler:
        """The endpoint, behind the checks that all endpoints share."""
        extra = self.openapi_extra or {}
        if ROLE not in extra:
            raise TypeError(f"{self.path} names no role; declare it with routes.declared")
        role = Role[extra[ROLE]]
        inner = self._straight() or super().get_route_handler()
        known = frozenset(field.alias for field in self.dependant.query_params)
        families: tuple[str, ...] = tuple(extra.get(FAMILIES, ()))

        async def handle(request: Request) -> Response:
            if role is not Role.PUBLIC:
                identity = await lobby(request).gate.identify(request.headers.get("authorization"))
                require(identity, role)
                request.scope["firepool.who"] = identity
            if request.scope["query_string"]:
                _check_query(request, known, families)
            return await inner(request)

        return handle

    def _straight(self) -> Handler | None:
        """The endpoint itself where it wants nothing but the request: FastAPI's solving of no dependencies would cost a
        submission 20 µs of its 130."""
        wants = self.dependant
        if wants.request_param_name is None or any(
            (wants.path_params, wants.query_params, wants.header_params, wants.cookie_params, wants.body_params)
        ):
            return None
        endpoint: Handler = self.endpoint
        return endpoint


def _check_query(request: Request, known: frozenset[str], families: tuple[str, ...]) -> None:
    for name in request.query_params:
        if name not in known and not (families and name.startswith(families)):
            near = nearest(name[:80], known)
            hint = f"; did you mean {near}?" if near else ""
            raise UnknownField(f"{name[:80]!r} is no parameter of this call{hint}", path=name[:80], nearest=near)


def router() -> APIRouter:
    """A router whose every route is guarded."""
    return APIRouter(route_class=Guarded)


def declared(
    role: Role,
    *raises: type[FirepoolError],
    ok: Mapping[int, Any] | None = None,
    body: Any = None,
    families: tuple[str, ...] = (),
    headers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route decorator.

    Args:
        role: least role of the token.
        raises: errors beyond those that every route may answer.
        ok: status → media type and schema of a good answer, as `json_of` or `bytes_of` make them.
        body: the same for the request's body.
        families: prefixes of query parameters that are a family.
        headers: optional request headers and their schemas.
    """
    common: list[type[FirepoolError]] = [Internal, UnknownField, BadRequest]
    if role is not Role.PUBLIC:
        common += [Unauthenticated, Forbidden, StoreUnavailable]
    extra: dict[str, Any] = {ROLE: role.name}
    if role is Role.PUBLIC:
        extra["security"] = []
    if families:
        extra[FAMILIES] = list(families)
        extra["x-firepool-note"] = "further parameters: " + ", ".join(f"{f}<key>=<value>" for f in families)
    if headers:
        extra["parameters"] = [{"name": n, "in": "header", "required": False, "schema": s} for n, s in headers.items()]
    if body is not None:
        extra["requestBody"] = {"required": True, "content": body}
    return {
        "responses": {**_answers(ok or {}), **_problems([*common, *raises])},
        "status_code": next(iter(ok), 200) if ok else 200,
        "openapi_extra": extra,
        "response_model": None,
        "response_class": Response,
    }


def json_of(name: str) -> dict[str, Any]:
    """JSON content whose schema is the component `name`."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def bytes_of(media: str = "application/octet-stream") -> dict[str, Any]:
    """Raw content."""
    return {media: {"schema": {"type": "string", "format": "binary"}}}


def _answers(ok: Mapping[int, Any]) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"description": "Done", "content": content} if content else {"description": "Done"}
        for status, content in ok.items()
    }


def _problems(raises: list[type[FirepoolError]]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int, list[str]] = {}
    for cls in raises:
        names = by_status.setdefault(cls.status, [])
        if cls.__name__ not in names:
            names.append(cls.__name__)
    content = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": ", ".join(names), "content": content} for status, names in by_status.items()}
