"""What a JSON Schema is made of: where its subschemas stand, and whether each keyword has a value that it may have."""

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

CHECKS = "x-reader-checks"  # what readers check that no keyword of JSON Schema says; `schemas.py` writes it
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

ONE = (
    "additionalProperties", "items", "propertyNames", "contains", "not", "if", "then", "else", "contentSchema",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class ShapeError(ValueError):
    """It is no JSON Schema; the words name the place."""


def subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yield what stands where a schema has a schema, each with its place, as in `/properties/amount`.

    Raises:
        ShapeError: a keyword that has several schemas is no list, or no object.
    """
    for keyword in ONE:
        if keyword in schema:
            yield f"/{keyword}", schema[keyword]
    for keyword in LISTED:
        if keyword in schema:
            if not isinstance(listed := schema[keyword], list) or not listed:
                raise ShapeError(f"/{keyword} is no list, or an empty one")
            yield from ((f"/{keyword}/{position}", each) for position, each in enumerate(listed))
    for keyword in NAMED:
        if keyword in schema:
            if not isinstance(named := schema[keyword], dict):
                raise ShapeError(f"/{keyword} is no object")
            yield from ((f"/{keyword}/{_escaped(name)}", each) for name, each in named.items())


def target(root: Schema, reference: str) -> Any:
    """Return what `#/...` refers to; raises ShapeError when nothing is there, or the reference leaves the document."""
    if reference != "#" and not reference.startswith("#/"):
        raise ShapeError(f"$ref {reference!r} leaves the document")
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise ShapeError(f"$ref {reference!r} refers to nothing")
        found = found[name]
    return found


def check(root: Schema) -> None:
    """Check a schema and all that is in it, however deep.

    Raises:
        ShapeError: names the place of the first fault.
    """
    schemas: dict[int, Schema] = {}
    references: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise ShapeError(f"{place or '/'} is no schema")
        schemas[id(schema)] = schema
        try:
            _check_keywords(schema)
            waiting += [(place + step, each) for step, each in subschemas(schema)]
        except ShapeError as error:
            raise ShapeError(f"{place}{error}") from None
        if "$ref" in schema:
            references.setdefault(schema["$ref"], place)
    for reference, place in references.items():
        try:
            found = target(root, reference)
        except ShapeError as error:
            raise ShapeError(f"{place or '/'}: {error}") from None
        if not isinstance(found, bool) and id(found) not in schemas:
            raise ShapeError(f"{place or '/'}: $ref {reference!r} refers to what is no schema")


def _check_keywords(schema: Schema) -> None:
    for keyword, (takes, is_right) in KEYWORDS.items():
        if keyword in schema and not is_right(schema[keyword]):
            raise ShapeError(f"/{keyword} is not {takes}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: object) -> bool:
    listed = value if isinstance(value, list) else [value]
    return all(isinstance(each, str) and each in TYPES for each in listed)


Kind = tuple[str, Callable[[object], bool]]
COUNT: Kind = ("a whole number from 0", _is_count)
NUMBER: Kind = ("a number", _is_number)
TEXT: Kind = ("text", _is_text)
TEXTS: Kind = ("a list of texts", _are_texts)

KEYWORDS: dict[str, Kind] = {
    "type": ("a type, or a list of types", _are_types),
    "enum": ("a list", lambda value: isinstance(value, list)),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    "required": TEXTS,
    CHECKS: TEXTS,
    **dict.fromkeys(("$ref", "pattern", "format"), TEXT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNT),
}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
