"""The routes of the console and their parameters, as the app itself has them: no test forgets a new one."""

from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import BaseModel


def routes(app: FastAPI) -> Iterator[RouteContext]:
    """Yield each route but the static files."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute):
            yield route


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
