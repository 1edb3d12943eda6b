"""Whether a handler's annotation fits the connection or session that the inbox gives it."""

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Union, get_origin

from relay.consume.apply.decoding import resolved
from relay.errors import ConfigurationError

SAYS_NO_CLASS = (Annotated, Any, Union, UnionType)  # some of them are classes, as the release of Python has it


def require_place(function: Callable[..., Any], name: str, given: type) -> None:
    """Check that the second parameter is for what the handler gets, as far as its annotation is a plain class.

    Raises:
        ConfigurationError: the annotation is another class. A `psycopg.Connection` in an `async def` would even seem to
            work: its statements are never awaited, and so never run.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2 or parameters[1].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return
    kind = _class_of(function, parameters[1].annotation)
    if kind is not None and not _may_be(given, kind):
        what = f"{given.__module__}.{given.__qualname__}"
        raise ConfigurationError(
            f"handler {name}: {parameters[1]} is not what it gets, which is a {what}: annotate it so, or give the"
            " inbox what this handler takes (docs/consumer.md#connections-and-sessions)"
        )


def _class_of(function: Callable[..., Any], annotation: Any) -> type | None:
    """Return the class that the annotation names; None where it says more, or nothing that is known here."""
    if annotation is inspect.Parameter.empty:
        return None
    try:
        annotation = resolved(function, annotation)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return None
    kind = get_origin(annotation) or annotation
    is_plain = isinstance(kind, type) and kind not in SAYS_NO_CLASS and not getattr(kind, "_is_protocol", False)
    return kind if is_plain else None


def _may_be(given: type, kind: type) -> bool:
    try:
        return issubclass(given, kind) or issubclass(kind, given)
    except TypeError:  # as of a TypedDict
        return True
