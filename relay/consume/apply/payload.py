"""The payload that a handler asks for by its annotation, and the body decoded into it.

async def project(message: Message[Invoice], connection: ...) -> None
async def project(messages: Sequence[Message[Invoice]], connection: ...) -> None  # batch=True
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from relay.consume.message import Message
from relay.errors import ConfigurationError, InvalidPayloadError

Decode = Callable[[Message], Message[Any]]

FAULTS_TOLD = 3


def read_decode(function: Callable[..., Any], name: str, *, takes_batch: bool) -> Decode | None:
    """Give what decodes the messages of this handler; None when it takes their bodies as they are.

    Raises:
        ConfigurationError: the annotation cannot be read, or is of something that nothing can be decoded into.
    """
    parameter = next(iter(inspect.signature(function).parameters.values()), None)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        payload = _payload_type(_resolved(function, parameter.annotation), takes_batch=takes_batch)
        if payload is bytes:
            return None
        adapter = TypeAdapter(payload)
        adapter.rebuild()  # raises where a model waits for a name that is nowhere
    except (NameError, TypeError, AttributeError, SyntaxError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "Sequence[Message[Payload]]" if takes_batch else "Message[Payload]"
        raise ConfigurationError(
            f"handler {name}: {parameter} does not tell how messages are decoded ({reason}); annotate it as {wanted},"
            " where Payload is a pydantic model, a dataclass or the like that can be imported at run time"
        ) from None
    return lambda message: _decode(adapter, message)


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Look up the names in one annotation: those of the others may be there for the type checker alone."""
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
        return bytes
    if get_origin(annotation) is not Message:
        raise TypeError("it is called with a Message")
    return get_args(annotation)[0]


def _decode(adapter: TypeAdapter[Any], message: Message) -> Message[Any]:
    try:
        payload = adapter.validate_json(message.body)
    except ValidationError as error:
        # Places and kinds; the words of pydantic, and of validators, repeat values of the payload.
        places = [(each["loc"], each["type"]) for each in error.errors(include_url=False, include_input=False)]
        faults = [f"{'.'.join(map(str, loc)) or 'body'}: {kind}" for loc, kind in places]
        raise InvalidPayloadError(message.type, message.message_id, _told(faults)) from None
    return replace(message, payload=payload)


def _told(faults: list[str]) -> str:
    more = len(faults) - FAULTS_TOLD
    return ", ".join([*faults[:FAULTS_TOLD], *([f"and {more} more"] if more > 0 else [])])
