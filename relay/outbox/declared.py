"""Events that are declared once, for those who write them and for those who handle them.

@event("InvoiceIssued", version=2, key=("customer", "customer_id"))
class InvoiceIssued(BaseModel):
    customer_id: int
    amount: Decimal

add(session, InvoiceIssued(customer_id=17, amount=Decimal("9.90")))

@on(InvoiceIssued)
def project(message: Message[InvoiceIssued], connection: Connection) -> None: ...
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from inspect import iscoroutinefunction, signature
from typing import Any, ClassVar, NotRequired, Protocol, Required, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID, uuid4

from relay.errors import ConfigurationError, importing
from relay.outbox.errors import FieldError, HeaderError
from relay.outbox.events import Event, JsonModel
from relay.outbox.paths import path_of_unwritable

MARK = "__outbox_event__"
VERSION = "x-event-version"

# What a field may be, and an aggregate id may not. Other classes are looked at when an event is written.
NO_IDS = (bool, float, complex, Decimal, bytes, list, tuple, Set, Mapping, date, time, timedelta)

T = TypeVar("T")
Upcast = TypeVar("Upcast", bound=Callable[[Any], Any])


class DataclassInstance(Protocol):
    """The part of dataclasses that is used here."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Declared = JsonModel | DataclassInstance | Mapping[str, object]  # an instance of a class with `@event`


class UnfitPayloadError(ValueError):
    """A payload that its declaration does not take; `path` is the value's place."""

    def __init__(self, problem: str, path: str) -> None:
        super().__init__(problem)
        self.path = path


@dataclass(eq=False)
class Declaration:
    """What `@event` says of a class.

    Attributes:
        version: the text of the header `x-event-version`; None: without one.
        key_field: the field that is the aggregate id; None: the events have no order.
        kind: the class; for a TypedDict, the one that stands for it.
        fields: their names.
        older: what `upcast` makes into this class, with its function.
    """

    event_type: str
    version: str | None
    aggregate_type: str
    key_field: str | None
    kind: type
    fields: Set[str]
    older: dict["Declaration", Callable[[Any], Any]] = field(default_factory=dict)

    def key_of(self, value: Any) -> Any:
        """Return the aggregate id; raises LookupError or AttributeError when the field is missing."""
        if self.key_field is None:
            return None
        return value[self.key_field] if isinstance(value, dict) else getattr(value, self.key_field)

    def encode(self, value: Any) -> str:
        """Return the payload as JSON by pydantic's rules, and check that the handlers will be able to read it.

        Raises:
            UnfitPayloadError: JSON has no such value, or the class does not take it.
        """
        from pydantic import ValidationError  # noqa: PLC0415
        from pydantic_core import PydanticSerializationError, to_json  # noqa: PLC0415

        if isinstance(value, dict) and (more := value.keys() - self.fields):
            raise UnfitPayloadError("is not in its declaration", f"payload.{min(more, key=str)}")
        try:
            text = self.adapter.dump_json(value, by_alias=True, warnings=False)
        except PydanticSerializationError as error:
            path, found = path_of_unwritable(value, "payload", to_json) or ("payload", value)
            if found is value or isinstance(found, str | int | float | dict | list):
                raise UnfitPayloadError("cannot be written as JSON", path) from error
            raise UnfitPayloadError(f"is of type {type(found).__name__}, which JSON does not have", path) from None
        try:
            self.adapter.validate_json(text)
        except ValidationError as error:
            raise UnfitPayloadError(*_unfit(error)) from None
        return str(text, "utf-8")

    @cached_property
    def adapter(self) -> Any:
        """Return pydantic's TypeAdapter; raises ConfigurationError when it cannot read the class."""
        from pydantic import TypeAdapter  # noqa: PLC0415
        from pydantic.errors import PydanticUserError  # noqa: PLC0415

        try:
            adapter: Any = TypeAdapter(self.kind)
            adapter.rebuild()  # raises when the class refers to a name that is not defined
        except (NameError, TypeError, PydanticUserError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(f"@event({self.event_type!r}): pydantic cannot read the class: {reason}") from None
        return adapter


@dataclass(frozen=True)
class DeclaredPayload:
    """The payload of a declared event; it is encoded when the row is made."""

    declaration: Declaration
    value: Any

    def model_dump_json(self) -> str:
        return self.declaration.encode(self.value)

    def model_dump(self) -> Any:
        return self.declaration.adapter.dump_python(self.value, by_alias=True, warnings=False)


def event(
    event_type: str, *, version: int | str | None = None, key: tuple[str, str | None]
) -> Callable[[type[T]], type[T]]:
    """Declare that instances of a class are events: `add` writes them, and `@on` takes the class.

    The class is a pydantic model, a dataclass or a `TypedDict`. For a dataclass it stands above `@dataclass`. Its
    payload is JSON by pydantic's rules: Decimal, UUID, dates and times become text, a set becomes a list.

    Args:
        version: goes out as the header `x-event-version`.
        key: the `aggregate_type`, and the name of the field with the `aggregate_id`. None: the events have no order.
    Raises:
        ConfigurationError: the class cannot be declared so.
        MissingExtraError: pydantic is missing.
    """
    with importing("events"):
        import pydantic  # noqa: F401, PLC0415

    if not isinstance(event_type, str) or not event_type:
        raise ConfigurationError('@event takes an event type: @event("InvoiceIssued", key=("customer", "customer_id"))')
    if version is not None and (not isinstance(version, int | str) or isinstance(version, bool) or version == ""):
        raise ConfigurationError(f"@event({event_type!r}): version is an int or a text, not {version!r}")
    aggregate_type, key_field = _pair(event_type, key)

    def declare(kind: type[T]) -> type[T]:
        names = _fields(event_type, kind)
        if key_field is not None and key_field not in names:
            known = ", ".join(sorted(names))
            raise ConfigurationError(
                f"@event({event_type!r}): {kind.__name__} has no field {key_field!r}; it has {known}"
            )
        if key_field is not None:
            _require_id(event_type, kind, key_field)
        text = None if version is None else str(version)
        declared: Any = _dict_of(kind) if issubclass(kind, dict) else kind
        setattr(declared, MARK, Declaration(event_type, text, aggregate_type, key_field, declared, names))
        return declared  # type: ignore[no-any-return]

    return declare


def upcast(function: Upcast) -> Upcast:
    """Make handlers of a newer version take an older one: the function makes the newer event of the older one.

    Its annotations name the two declared classes: `def newer(old: InvoiceIssued1) -> InvoiceIssued`. A newer version
    than the next one is reached by several functions. A handler of the older version goes first.

    Raises:
        ConfigurationError: the annotations are no two versions of one event type, or there is such a function already.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        hints = get_type_hints(function)
        first = next(iter(signature(function).parameters), "")
    except (NameError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"@upcast: the annotations of {name} cannot be read: {error}") from None
    if iscoroutinefunction(function):
        raise ConfigurationError(f"@upcast: {name} is an `async def`; make it a plain function")
    old, new = declaration_of(hints.get(first)), declaration_of(hints.get("return"))
    if old is None or new is None or old.event_type != new.event_type or old.version == new.version:
        raise ConfigurationError(
            f"@upcast: {name} takes an event, and returns a newer version of it. Annotate both with classes that"
            " @event declares with one event type and two versions"
        )
    if _is_older(new, old):
        raise ConfigurationError(
            f"@upcast: {name} takes version {old.version}, and returns the older version {new.version}; write it the"
            " other way round"
        )
    other = new.older.setdefault(old, function)
    if _place(other) != _place(function):
        raise ConfigurationError(f"@upcast: {name} does what {_place(other)} does: one of both is enough")
    new.older[old] = function
    return function


def _is_older(one: Declaration, other: Declaration) -> bool:
    """Whether both versions are numbers, and the first is less; other text has no order."""
    first, second = one.version or "", other.version or ""
    return first.isdecimal() and second.isdecimal() and int(first) < int(second)


def _place(function: Callable[..., Any]) -> str:
    """Return the name by which a function is known again that a notebook defines a second time."""
    return f"{function.__module__}.{function.__qualname__}"


def declaration_of(kind: object) -> Declaration | None:
    """Return what `@event` says of this class; None for any other class, also for a subclass of a declared one."""
    return vars(kind).get(MARK) if isinstance(kind, type) else None


def is_declared(given: object) -> bool:
    """Whether it is an instance of a declared class."""
    return declaration_of(type(given)) is not None


def event_of(
    declared: Declared,
    *,
    headers: Mapping[str, Any] | None = None,
    message_id: UUID | None = None,
    exchange: str | None = None,
    routing_key: str | None = None,
    available_at: datetime | None = None,
) -> Event:
    """Return an instance of a declared class as an `Event`, with fields that the class does not have.

    Raises:
        TypeError: its class is not declared.
        FieldError: it has no aggregate id.
        HeaderError: a header says another version.
    """
    declaration = declaration_of(type(declared))
    if declaration is None:
        raise TypeError(_not_an_event(declared))
    made = Event(
        aggregate_type=declaration.aggregate_type,
        aggregate_id=None,
        event_type=declaration.event_type,
        payload=DeclaredPayload(declaration, declared),
        headers=headers,
        message_id=message_id or uuid4(),
        exchange=exchange,
        routing_key=routing_key,
        available_at=available_at,
    )
    try:
        made = replace(made, aggregate_id=declaration.key_of(declared))
    except (LookupError, AttributeError):
        raise FieldError(made, "aggregate_id", f"is the field {declaration.key_field!r}, which is missing") from None
    if declaration.version is None:
        return made
    if not isinstance(headers, Mapping | None):
        raise HeaderError(made, "headers", f"is of type {type(headers).__name__}; it takes a dict")
    if headers and VERSION in headers:
        raise HeaderError(made, f"headers.{VERSION}", f"is {declaration.version} by its declaration")
    return replace(made, headers={**(headers or {}), VERSION: declaration.version})


def _pair(event_type: str, key: object) -> tuple[str, str | None]:
    match key:
        case (str() as aggregate_type, str() | None as key_field) if aggregate_type:
            return aggregate_type, key_field
        case _:
            raise ConfigurationError(
                f"@event({event_type!r}) takes as key the aggregate type and the field with the aggregate id:"
                ' key=("customer", "customer_id"), or key=("customer", None) for events without order'
            )


def _fields(event_type: str, kind: type) -> set[str]:
    """Return the names of the fields of a class."""
    from typing_extensions import is_typeddict  # noqa: PLC0415 - pydantic brings it

    if isinstance(names := getattr(kind, "model_fields", None), dict):
        return set(names)
    if is_dataclass(kind):
        return {each.name for each in fields(kind)}
    if is_typeddict(kind):
        return set(kind.__annotations__)
    raise ConfigurationError(
        f"@event({event_type!r}): {getattr(kind, '__qualname__', kind)} is no pydantic model, dataclass or TypedDict;"
        " @event stands above @dataclass"
    )


def _require_id(event_type: str, kind: type, name: str) -> None:
    """Check that the field may be an aggregate id, as far as its annotation is a plain class.

    A validator, in `Annotated`, may make text of anything.
    """
    try:
        hint = get_type_hints(kind, include_extras=True)[name]
    except (NameError, TypeError, AttributeError, SyntaxError, KeyError):
        return  # pydantic says what it cannot read, at the first write
    while get_origin(hint) in (Required, NotRequired):
        (hint,) = get_args(hint)
    found = get_origin(hint) or hint
    if isinstance(found, type) and issubclass(found, NO_IDS):
        raise ConfigurationError(
            f"@event({event_type!r}): the field {name!r} of {kind.__name__} is of type {found.__name__};"
            " an aggregate id is a str, an int or a UUID"
        )


def _dict_of(kind: type) -> type:
    """Return a class of dicts that stands for a TypedDict, whose instances would not know their class."""

    def schema(cls: type, _: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema  # noqa: PLC0415

        return core_schema.no_info_after_validator_function(cls, handler(kind))

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (dict,), {**names, "__get_pydantic_core_schema__": classmethod(schema)})


def _unfit(error: Any) -> tuple[str, str]:
    """Return the problem and its path. The words of pydantic and of validators repeat values of the payload."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    (where, kind), more = (faults[0]["loc"], faults[0]["type"]), len(faults) - 1
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return f"does not fit its declaration: {kind}" + (f", and {more} more" if more else ""), f"payload{path}"


def _not_an_event(given: object) -> str:
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    match given:
        case type():
            return f"the class {given.__qualname__} is no event: make one, as in Event(aggregate_type, ...)"
        case dict():
            return "a dict is no event: make one of it, as in Event(**fields)"
        case list() | tuple() | set() | Iterator():
            return (
                f"a {type(given).__name__} is no event: write add(connection, *events) or add_many(connection, events)"
            )
        case _ if hasattr(given, MARK):
            return f"{kind} is no event, only its base class is: put @event above it, too"
        case _ if is_dataclass(given) or hasattr(type(given), "model_dump_json"):
            return f"{kind} is no event: put @event(<event type>, key=...) above its class, or make an Event of it"
        case _:
            return f"{kind} is no event: write add(connection, event), the connection first"
