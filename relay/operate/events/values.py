"""Types and values of JSON, as a schema names them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from relay.operate.events.shape import TYPES, Schema

LONGEST_SHOWN = 40
MOST_SHOWN = 5
SIMPLE_TYPES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def types_of(schema: Schema) -> Sequence[str]:
    """Return the types that a schema names; each type where it names no type."""
    given = schema.get("type", [kind for kind in TYPES if kind != "integer"])
    return [given] if isinstance(given, str) else given


def values_of(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None when it lists no values."""
    if "const" in schema and "enum" in schema:
        return common(schema["enum"], [schema["const"]])
    return [schema["const"]] if "const" in schema else schema.get("enum")


def type_of(value: object) -> str:
    """Return the type of a value; 5.0 is an integer, as in JSON Schema."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return SIMPLE_TYPES[type(value)]


def is_type(kind: str, types: Iterable[str]) -> bool:
    """Whether all values of a type are of one of the types."""
    return kind in types or (kind == "integer" and "number" in types)


def is_of(value: object, types: Iterable[str]) -> bool:
    """Whether a value is of one of the types."""
    return is_type(type_of(value), types)


def identity(value: object) -> str:
    """Return a text that equal values of JSON have, and no others: true is not 1, and 1.0 is."""
    return text(int(value) if isinstance(value, float) and value.is_integer() else value)


def common(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the values that are among the others."""
    known = {identity(each) for each in others}
    return [value for value in values if identity(value) in known]


def structure(value: Any) -> Schema:
    """Return a schema of one value: what else a schema could say of it, in place of `const`."""
    match value:
        case str():
            return {"minLength": len(value), "maxLength": len(value)}
        case list():
            items = [{"const": each} for each in value]
            is_unique = len({identity(each) for each in value}) == len(value)
            return {"prefixItems": items, "minItems": len(value), "maxItems": len(value), "uniqueItems": is_unique}
        case dict():
            return {"properties": {name: {"const": each} for name, each in value.items()}, "required": list(value)}
        case None | bool():
            return {}
        case _:
            return {"minimum": value, "maximum": value}


def text(value: object) -> str:
    """Return a value as JSON, sorted by key."""
    return json.dumps(value, sort_keys=True)


def short(value: object) -> str:
    """Return the start of a value as JSON."""
    shown = text(value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."


def in_words(written: Schema) -> str:
    """Return what a schema writes: `may be "paid"`, `is string or null`."""
    if "const" in written:
        return f"may be {short(written['const'])}"
    return f"is {' or '.join(types_of(written))}"


def listed(values: Sequence[Any]) -> str:
    """Return the first of some values, as in `"open", "paid", ...`."""
    return ", ".join([short(value) for value in values[:MOST_SHOWN]] + ["..."] * (len(values) > MOST_SHOWN))
