"""The routes of `/api/v1` that do operations: one for each, as relay/operate/operations.py lists them.

What stands in the path of an operation is a parameter. The rest of what it asks is the query of a GET, and the body of
a POST.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from http import HTTPStatus
from string import Formatter
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo
from starlette.requests import Request
from starlette.responses import Response

from relay.console.access.identity import Identity, require
from relay.console.api.once import Asked, Once
from relay.console.given import Alone
from relay.console.site import site_of
from relay.observe.printable import printable_json
from relay.operate.operation import Effect, Operation, Servers
from relay.operate.operations import OPERATIONS

AnyOperation = Operation[Any, Any]


def router_of(part: str) -> APIRouter:
    """Return the routes of a part of the API."""
    router = APIRouter(tags=[part])
    for operation in OPERATIONS[part]:
        router.add_api_route(
            operation.path,
            _endpoint(operation),
            methods=[operation.method],
            status_code=_status(operation),
            response_model=operation.gives,
            operation_id=operation.id,
        )
    return router


def _endpoint(operation: AnyOperation) -> Callable[..., Any]:
    """Return the function of a route; FastAPI reads its signature, as of any function."""
    in_path = [name for _, name, _, _ in Formatter().parse(operation.path) if name]

    def endpoint(request: Request, who: Identity, **given: Any) -> Any:
        said = dict(given["asked"]) if "asked" in given else {}
        asked = operation.asks.model_construct(**said, **{name: given[name] for name in in_path})
        at = site_of(request).servers(who)
        if operation.effect is Effect.NOTHING:
            found = operation.does(at, asked)
            return _as_it_is(found) if isinstance(found, dict) else found
        return _change(operation, at, asked, given["once"], wake=site_of(request).runner.wake)

    taken: dict[str, Any] = {
        "request": Request,
        "who": Annotated[Identity, Depends(require(operation.role))],
        **({"alone": Alone} if operation.is_alone else {}),
        **({} if operation.effect is Effect.NOTHING else {"once": Once}),
        **{name: _in_path(operation.asks.model_fields[name]) for name in in_path},
        **_said(operation, in_path),
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in taken.items()
    ]
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__name__, endpoint.__doc__ = operation.does.__name__, operation.does.__doc__
    return endpoint


def _change(
    operation: AnyOperation, at: Servers, asked: BaseModel, once: Asked, *, wake: Callable[[], None]
) -> Response:
    if operation.effect is Effect.ELSEWHERE:
        return once.noted(at.by, operation.gives, lambda: operation.does(at, asked))
    answer = once.in_transaction(
        at.by,
        operation.gives,
        lambda tables: operation.does(replace(at, connect=lambda _: nullcontext(tables)), asked),
        status=_status(operation),
    )
    if operation.effect in (Effect.ORDERED, Effect.RESUMED):
        wake()
    return answer


def _as_it_is(found: dict[str, Any]) -> Response:
    """Return what has no fixed form, as the body of a letter: orjson copies it byte for byte."""
    return Response(printable_json(orjson.dumps(found).decode()), media_type="application/json")


def _said(operation: AnyOperation, in_path: list[str]) -> dict[str, Any]:
    """Return the query or the body, as a parameter of the endpoint; nothing where nothing is asked."""
    asks = operation.asks
    wanted = asks.model_fields.keys() - {*in_path}
    (said, *_) = [each for each in asks.__mro__ if issubclass(each, BaseModel) and each.model_fields.keys() == wanted]
    if operation.method == "POST":
        title = "".join(word.capitalize() for word in operation.id.split("_"))
        return {"asked": create_model(title, __base__=said, __doc__=said.__doc__)}
    return {"asked": Annotated[said, Query()]} if wanted else {}


def _in_path(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata, Path(description=field.description)]


def _status(operation: AnyOperation) -> HTTPStatus:
    return HTTPStatus.ACCEPTED if operation.effect is Effect.ORDERED else HTTPStatus.OK
