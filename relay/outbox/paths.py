"""Where in a payload the value is that JSON does not have."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from math import isfinite
from reprlib import repr as shortened

MAX_PATH_DEPTH = 256  # orjson's limit is 254; a payload that contains itself would have no end


def path_of_unwritable(
    value: object, path: str, dumps: Callable[[object], bytes], depth: int = MAX_PATH_DEPTH
) -> tuple[str, object] | None:
    """Return the path of the innermost value that `dumps` refuses, and the value; None if it is nested too deeply."""
    if not depth:
        return None
    for inner_path, inner in _inner(value, path):
        try:
            dumps(inner)
        except (TypeError, ValueError):  # orjson's and pydantic's
            return path_of_unwritable(inner, inner_path, dumps, depth - 1)
    return path, value


def path_of_lost_number(value: object, path: str) -> str | None:
    """Return the path of the first float that JSON would have as null; None: there is no such float."""
    if isinstance(value, float):
        return None if isfinite(value) else path
    found = (path_of_lost_number(inner, inner_path) for inner_path, inner in _inner(value, path))
    return next(filter(None, found), None)


def _inner(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the values inside a value, each with its path."""
    match value:
        case dict():
            yield from ((f"{path}.{_name(name)}", inner) for name, inner in value.items())
        case list() | tuple() | set() | frozenset() | deque():
            yield from ((f"{path}[{position}]", inner) for position, inner in enumerate(value))
        case _ if is_dataclass(value):
            yield from ((f"{path}.{each.name}", getattr(value, each.name)) for each in fields(value))
        case _ if isinstance(names := getattr(type(value), "model_fields", None), dict):  # a pydantic model
            yield from ((f"{path}.{name}", getattr(value, name)) for name in names)


def _name(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() else shortened(key)
