"""The OpenAPI document of `/api/v1`."""

from typing import Any

import orjson
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import BaseRoute

from relay import __version__

ABOUT = (
    """Everything that an operator can do by the command `relay`, with the same names. docs/api.md says how to begin."""
)

# What may be answered in place of what was asked for.
PROBLEMS = {
    "400": "The request is no HTTP request that can be read, or its body no JSON.",
    "401": "The request is of nobody that is known: send a token.",
    "403": "The role does not allow it, or the console is read-only.",
    "404": "Nothing of that name or id is there.",
    "405": "The path takes other methods.",
    "409": "Another process is working on it, or an earlier request with this key has no answer.",
    "421": "The console has another name.",
    "422": "A parameter cannot be, nothing was chosen, or the key came with another request.",
    "429": "Too many requests.",
    "500": "A fault of the console: see its log.",
    "503": "PostgreSQL or RabbitMQ is not reachable, or lets the console not in.",
    "504": "PostgreSQL or RabbitMQ did not answer in time.",
}


class Problem(BaseModel):
    """Why a request was not done (RFC 9457)."""

    model_config = ConfigDict(extra="forbid")

    type: str
    title: str
    status: int
    detail: str = Field(description="What happened, to what, and what to do.")


def document(routes: list[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes of the API."""
    told = _with_names(
        get_openapi(
            title="Outbox relay", version=__version__, openapi_version="3.1.0", description=ABOUT, routes=routes
        )
    )
    parts = told["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    parts["schemas"]["Problem"] = Problem.model_json_schema()
    parts["responses"] = _problems()
    parts["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "`relay console token add` makes one."}
    }
    told["security"] = [{"token": []}]
    for item in told["paths"].values():
        for operation in item.values():
            operation["responses"] |= {code: {"$ref": f"#/components/responses/{code}"} for code in PROBLEMS}
            operation["responses"] = dict(sorted(operation["responses"].items()))
    return told


def _with_names(told: dict[str, Any]) -> dict[str, Any]:
    """Name the noun, in place of the module, before classes that several nouns have: ParkedDone, LettersDone."""
    text = orjson.dumps(told).decode()
    for name in (each for each in told["components"]["schemas"] if "__" in each):
        _, _, noun, *_, kind = name.split("__")
        text = text.replace(name, f"{noun.capitalize()}{kind}")
    named: dict[str, Any] = orjson.loads(text)
    for name, schema in named["components"]["schemas"].items():
        schema["title"] = name
    return named


def _problems() -> dict[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {code: {"description": words, "content": content} for code, words in PROBLEMS.items()}


def as_text(told: dict[str, Any]) -> str:
    """Return the document as the file has it."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SORT_KEYS
    return orjson.dumps(told, option=options).decode()
