"""The routes of a console and their parameters, taken from the app: a test that walks them forgets no new one."""

import re
from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import BaseModel

from relay.console.access.identity import Requirement
from relay.console.access.writes import READING
from relay.operate.operation import Role

PARAMETER = re.compile(r"\{[^}]*\}")


def routes(app: FastAPI) -> Iterator[RouteContext]:
    """Yield each route but that of the static files."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute):
            yield route


def writes(app: FastAPI) -> list[tuple[str, str, Role | None]]:
    """Return method, path and least role of each route that changes something."""
    return [
        (method, PARAMETER.sub("1", (route.path or "").replace("{turn}", "pause")), role_of(route))
        for route in routes(app)
        for method in sorted((route.methods or set()) - READING)
    ]


def role_of(route: RouteContext) -> Role | None:
    """Return the least role that may use a route; None where it names no role."""
    roles = [each.call.role for each in route.dependant.dependencies if isinstance(each.call, Requirement)]
    return max(roles, key=list(Role).index, default=None)


def names(dependant: Dependant) -> list[str]:
    """Return the names of the parameters behind the question mark, or of the form."""
    found: list[str] = []
    for each in dependant.query_params + dependant.body_params:
        kind = each.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += kind.model_fields
        else:
            found.append(each.alias)
    return found + [name for each in dependant.dependencies for name in names(each)]
