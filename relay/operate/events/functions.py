"""The names of functions, by which an export knows them again."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from types import CodeType
from typing import Any

SIMPLE = (str, int, float, bool, bytes, type(None))
DEEPEST = 10  # functions within each other


def name_of(function: object, depth: int = DEEPEST) -> str:
    """Return its name. A partial also has its arguments; a lambda or a function in a function what it is made of."""
    if isinstance(function, partial):
        given = [*function.args, *sorted(function.keywords.items())]
        return f"{name_of(function.func, depth)}({_known(given, depth)})"
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    code = getattr(function, "__code__", None)
    if "<" not in name or not isinstance(code, CodeType):
        return name
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    made_of = f"{code.co_code.hex()} {code.co_names} {_known([*code.co_consts, *cells], depth)}"
    return f"{name} {sha256(made_of.encode()).hexdigest()[:12]}"


def _known(values: Iterable[Any], depth: int) -> str:
    """Return what is the same in each process: no address of an object."""
    return ", ".join(_value(each, depth - 1) for each in values)


def _value(value: object, depth: int) -> str:
    if isinstance(value, SIMPLE):
        return repr(value)
    if depth == 0:
        return "..."
    if isinstance(value, tuple | list):
        return f"({_known(value, depth)})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({_known((getattr(value, each.name) for each in fields(value)), depth)})"
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {_known(value.co_consts, depth)}"
    return name_of(value, depth) if isinstance(value, Callable) else type(value).__qualname__  # type: ignore[arg-type]
