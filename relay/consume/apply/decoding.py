"""How the body of a message becomes the payload that a handler gets."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from relay.consume.message import Message
from relay.errors import ConfigurationError, InvalidPayloadError
from relay.outbox.declared import Declaration, declaration_of

Decode = Callable[[Message], Message[Any]]
Step = tuple[Callable[[Any], Any], type]  # what `upcast` was given, and the class that it makes

FAULTS_NAMED = 3
UNSAID = object()  # the annotation does not say what the payload is


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a handler takes; `declaration`: of the class that `@on` was given instead of an event type."""

    event_type: str
    version: str | None
    declaration: Declaration | None = None

    @classmethod
    def of(cls, declared: type) -> Self:
        declaration = declaration_of(declared)
        assert declaration is not None, "`on` has checked it"  # noqa: S101
        return cls(declaration.event_type, declaration.version, declaration)


def read_decode(
    function: Callable[..., Any], name: str, subscription: Subscription, *, takes_batch: bool
) -> Decode | None:
    """Return the function that decodes the messages of this handler; None when it takes the bodies as they are.

    Raises:
        ConfigurationError: the annotation cannot be read, names a type that no body can be decoded into, or another
            class than `@on`.
    """
    parameter = next(iter(inspect.signature(function).parameters.values()), None)
    try:
        payload: Any = UNSAID
        if parameter is not None and parameter.annotation is not inspect.Parameter.empty:
            payload = _payload_type(resolved(function, parameter.annotation), takes_batch=takes_batch)
        if subscription.declaration is None:
            if payload in (UNSAID, bytes):
                return None
            adapter = TypeAdapter(payload)
            adapter.rebuild()  # raises when a model refers to a name that is not defined
            return partial(_decode, adapter, ())
    except (NameError, TypeError, AttributeError, SyntaxError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "Sequence[Message[Payload]]" if takes_batch else "Message[Payload]"
        raise ConfigurationError(
            f"handler {name}: {parameter} does not say how to decode messages ({reason}). Annotate it as {wanted},"
            " where Payload is a pydantic model, a dataclass or a similar class that can be imported at run time"
        ) from None
    if payload is not UNSAID and subscription.declaration not in map(declaration_of, _members(payload)):
        declared = subscription.declaration.kind.__name__
        raise ConfigurationError(f"handler {name}: {parameter} is not for {declared}, which @on names: annotate it so")
    return partial(_decode, subscription.declaration.adapter, ())


def decodes_of_older(declaration: Declaration) -> Iterator[tuple[str | None, Decode]]:
    """Yield the versions that `upcast` leads to this one, each with the function that decodes its messages."""
    ways: list[tuple[Declaration, tuple[Step, ...]]] = [(declaration, ())]
    seen = {declaration.version}
    for newer, steps in ways:  # grows meanwhile
        for old, function in newer.older.items():
            if old.version not in seen:
                seen.add(old.version)
                longer = ((function, newer.kind), *steps)
                ways.append((old, longer))
                yield old.version, partial(_decode, old.adapter, longer)


def resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Look up the names in this one annotation. Other annotations may name types that only the type checker imports."""
    holder = SimpleNamespace(__annotations__={"message": annotation})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(holder, names, include_extras=True)["message"]


def _payload_type(annotation: Any, *, takes_batch: bool) -> Any:
    if takes_batch and annotation is not Any:
        origin = get_origin(annotation) or annotation
        if not (isinstance(origin, type) and issubclass(list, origin)):
            raise TypeError("with batch=True it is called with a list")
        (annotation,) = get_args(annotation) or (Any,)
    if annotation in (Any, Message):
        return UNSAID
    if get_origin(annotation) is not Message:
        raise TypeError("it is called with a Message")
    return get_args(annotation)[0]


def _members(payload: Any) -> Sequence[Any]:
    """Return the members of a union, or the type itself."""
    return get_args(payload) if get_origin(payload) in (Union, UnionType) else [payload]


def _decode(adapter: TypeAdapter[Any], steps: Sequence[Step], message: Message) -> Message[Any]:
    """Decode the body; `steps` make it the version that the handler takes."""
    try:
        payload = adapter.validate_json(message.body)
    except ValidationError as error:
        # Only places and kinds: the messages of pydantic and of validators repeat values of the payload.
        places = [(each["loc"], each["type"]) for each in error.errors(include_url=False, include_input=False)]
        faults = [f"{'.'.join(map(str, loc)) or 'body'}: {kind}" for loc, kind in places]
        raise InvalidPayloadError(message.type, message.message_id, _in_words(faults)) from None
    for function, kind in steps:
        payload = function(payload)
        if not isinstance(payload, kind):
            returned = f"returned {type(payload).__name__}, not {kind.__name__}"
            raise TypeError(f"@upcast: {getattr(function, '__qualname__', function)} {returned}")
    return replace(message, payload=payload)


def _in_words(faults: list[str]) -> str:
    more = len(faults) - FAULTS_NAMED
    return ", ".join([*faults[:FAULTS_NAMED], *([f"and {more} more"] if more > 0 else [])])
