"""What a change of a class keeps: pairs of an old and a new class with known verdicts."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Self
from uuid import UUID

import pytest
from annotated_types import Predicate
from pydantic import (
    UUID4,
    AfterValidator,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    HttpUrl,
    PlainSerializer,
    RootModel,
    SerializeAsAny,
    StringConstraints,
    Tag,
    create_model,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from relay.operate.events.check import compare
from relay.operate.events.contract import Contract, contract_of
from relay.outbox import event
from relay.outbox.declared import declaration_of

FULL, BACKWARD, FORWARD, NONE = "FULL", "BACKWARD", "FORWARD", "NONE"
CLOSED = ConfigDict(extra="forbid")
OPEN = ConfigDict(extra="allow")


def contract(kind: type, aggregate_type: str = "customer") -> Contract:
    """The contract of a class, once it is declared."""
    declaration = declaration_of(event("Changed", version=1, key=(aggregate_type, None))(kind))
    assert declaration is not None
    return contract_of(declaration)


def model(config: ConfigDict | None = None, /, **fields: Any) -> type[BaseModel]:
    """A model of these fields, each an annotation, or an annotation and a default."""
    given = {name: each if isinstance(each, tuple) else (each, ...) for name, each in fields.items()}
    made: type[BaseModel] = create_model("Changed", __config__=config, **given)  # type: ignore[call-overload]
    return made


def field(annotation: Any) -> type[BaseModel]:
    return model(x=annotation)


def at_least(least: int, value: int) -> int:
    if value < least:
        raise ValueError("too small")
    return value


SomeText = Annotated[str, Field(min_length=1)]
Hiding: Any = int | SkipJsonSchema[None]  # type: ignore[misc]
Digits = Annotated[str, Field(pattern="^[0-9]+$")]


@dataclass
class Plain:
    x: int


@dataclass
class Looking:
    x: int

    def __post_init__(self) -> None:
        at_least(9, self.x)


class LookingModel(BaseModel):
    x: int

    def model_post_init(self, _context: Any) -> None:
        at_least(9, self.x)


class Private(BaseModel):
    x: int
    _seen: int = 0


class Untagged(BaseModel):
    other: Literal["y"]


class WithTag(BaseModel):
    kind: Literal["y"] = "y"
    other: Literal["y"]


class OtherTag(BaseModel):
    kind: Literal["z"] = "z"
    other: Literal["z"]


Tagged = Annotated[WithTag | OtherTag, Field(discriminator="kind")]


class Tree(BaseModel):
    size: int
    below: list[Self] = []


class TreeOfFloats(BaseModel):
    size: float
    below: list[Self] = []


class NamedTree(BaseModel):
    size: int
    name: str
    below: list[Self] = []


class Left(BaseModel):
    kind: Literal["left"] = "left"
    size: int


class Right(BaseModel):
    kind: Literal["right"] = "right"
    size: int


class Middle(BaseModel):
    kind: Literal["middle"] = "middle"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Shade(Enum):
    RED = "red"
    BLUE = "blue"
    GREY = "grey"


class Some(TypedDict):
    size: NotRequired[int]


class All(TypedDict):
    size: int


Sided = Annotated[Left | Right, Field(discriminator="kind")]
Three = Annotated[Left | Right | Middle, Field(discriminator="kind")]


def side_of(value: Any) -> str:
    return "left"


def positive(value: int) -> int:
    return value


def unsaid(value):  # type: ignore[no-untyped-def]
    return value


def as_text(value: Any) -> str:
    return str(value)


def as_text_or_not(value: Any) -> str | None:
    return None if value is None else str(value)


def as_dict(value: Any) -> dict[str, int]:
    return dict(value)


Called = Annotated[Annotated[Left, Tag("left")] | Annotated[Right, Tag("right")], Discriminator(side_of)]
Tall = Annotated[int, Field(ge=10)]
Short = Annotated[str, Field(max_length=5)]
Unsaid = Annotated[int, PlainSerializer(unsaid)]

PAIRS: dict[str, tuple[type, type, str]] = {
    # fields
    "nothing": (model(a=int), model(a=int), FULL),
    "an optional field more": (model(a=int), model(a=int, b=(int, 0)), FULL),
    "a required field more": (model(a=int), model(a=int, b=int), FORWARD),
    "an optional field less": (model(a=int, b=(int, 0)), model(a=int), FULL),
    "a required field less": (model(a=int, b=int), model(a=int), BACKWARD),
    "another name": (model(a=int), model(b=int), NONE),
    "another name behind the old alias": (model(a=int), model(b=(int, Field(alias="a"))), FULL),
    "an alias": (model(a=int), model(a=(int, Field(alias="b"))), NONE),
    "a default more": (model(a=int), model(a=(int, 0)), FULL),
    "a default less": (model(a=(int, 0)), model(a=int), FULL),
    "a field more, others are forbidden": (model(CLOSED, a=int), model(CLOSED, a=int, b=(int, 0)), BACKWARD),
    "a field less, others are forbidden": (model(CLOSED, a=(int, 0), b=int), model(CLOSED, a=int), NONE),
    "others are forbidden": (model(a=int), model(CLOSED, a=int), FULL),
    "others are kept": (model(CLOSED, a=int), model(OPEN, a=int), BACKWARD),
    "a field more, others were kept": (model(OPEN, a=int), model(OPEN, a=int, b=(int, 0)), FORWARD),
    "no longer written": (model(a=int, b=(int, 0)), model(a=int, b=(int, Field(0, exclude=True))), FULL),
    "a key that may be missing": (All, Some, BACKWARD),
    "a dataclass": (model(a=int), make_dataclass("Changed", [("a", int)]), FULL),
    # types
    "int to float": (field(int), field(float), BACKWARD),
    "int to str": (field(int), field(str), NONE),
    "int or nothing": (field(int), field(int | None), BACKWARD),
    "int or text": (field(int), field(int | str), BACKWARD),
    "float to Decimal": (field(float), field(Decimal), BACKWARD),
    "Decimal to text": (field(Decimal), field(str), BACKWARD),
    "date to text": (field(date), field(str), BACKWARD),
    "date to datetime": (field(date), field(datetime), NONE),
    "one UUID to any": (field(UUID4), field(UUID), BACKWARD),
    "anything": (field(int), field(Any), BACKWARD),
    "text to URL": (field(str), field(HttpUrl), FORWARD),
    "a class of one value": (field(int), field(RootModel[int]), FULL),
    "bool to int": (field(bool), field(int), NONE),
    # values
    "a value more": (field(Literal["a"]), field(Literal["a", "b"]), BACKWARD),
    "a value less": (field(Literal["a", "b"]), field(Literal["a"]), FORWARD),
    "values to text": (field(Literal["a", "b"]), field(str), BACKWARD),
    "values to short text": (field(Literal["a", "b"]), field(Short), BACKWARD),
    "long values to short text": (field(Literal["sixsix"]), field(Short), NONE),
    "an enum with a value more": (field(Colour), field(Shade), BACKWARD),
    "an enum to its values": (field(Colour), field(Literal["blue", "red"]), FULL),
    "numbers to a range": (field(Literal[10, 20]), field(Tall), BACKWARD),
    "numbers out of a range": (field(Literal[9, 20]), field(Tall), NONE),
    "truth to its values": (field(bool), field(Literal[True, False]), FULL),
    # bounds
    "a minimum": (field(int), field(Tall), FORWARD),
    "a lower minimum": (field(Tall), field(Annotated[int, Field(ge=9)]), BACKWARD),
    "the same minimum, said otherwise": (field(Tall), field(Annotated[int, Field(gt=9)]), FULL),
    "a minimum of a float": (field(Annotated[float, Field(gt=9)]), field(Annotated[float, Field(ge=9)]), BACKWARD),
    "a maximum": (field(Annotated[int, Field(le=3)]), field(Annotated[int, Field(lt=3)]), FORWARD),
    "a divisor": (field(Annotated[int, Field(multiple_of=4)]), field(Annotated[int, Field(multiple_of=2)]), BACKWARD),
    "a length": (field(Short), field(str), BACKWARD),
    "a pattern": (field(str), field(Annotated[str, StringConstraints(pattern="^a$")]), FORWARD),
    "another pattern": (
        field(Annotated[str, Field(pattern="^aa$")]),
        field(Annotated[str, Field(pattern="^a+$")]),
        NONE,
    ),
    "a minimum of a Decimal": (field(Decimal), field(Annotated[Decimal, Field(ge=0)]), FORWARD),
    "digits of a Decimal": (field(Decimal), field(Annotated[Decimal, Field(max_digits=4)]), FORWARD),
    "a first day": (field(date), field(Annotated[date, Field(ge=date(2026, 1, 1))]), FORWARD),
    "a validator": (field(int), field(Annotated[int, AfterValidator(positive)]), FORWARD),
    "the same validator": (
        field(Annotated[int, AfterValidator(positive)]),
        field(Annotated[int, AfterValidator(positive)]),
        FULL,
    ),
    "a serializer that does not say what it writes": (field(int), field(Unsaid), BACKWARD),
    "a date that a function writes": (field(date), field(Annotated[date, PlainSerializer(as_text)]), FULL),
    "a date or not": (field(date | None), field(Annotated[date | None, PlainSerializer(as_text_or_not)]), FULL),
    "a number that a function writes as text": (field(int), field(Annotated[int, PlainSerializer(as_text)]), BACKWARD),
    "a Decimal that a function writes as a number": (
        field(Annotated[Decimal, PlainSerializer(float, return_type=float)]),
        field(float),
        FULL,
    ),
    "a serializer of an object": (field(Left), field(Annotated[Left, PlainSerializer(unsaid)]), BACKWARD),
    "a serializer that says what it writes": (field(Left), field(Annotated[Left, PlainSerializer(as_dict)]), BACKWARD),
    "a path": (field(Path), field(Path), FULL),
    "a sequence of objects": (field(Sequence[Left]), field(list[Left]), FULL),
    "encoded bytes": (field(Base64Bytes), field(Base64Bytes), FULL),
    # collections
    "a list of floats": (field(list[int]), field(list[float]), BACKWARD),
    "a list with a limit": (field(list[int]), field(Annotated[list[int], Field(max_length=9)]), FORWARD),
    "a set": (field(list[int]), field(set[int]), FORWARD),
    "a pair to a list": (field(tuple[int, int]), field(list[int]), BACKWARD),
    "a pair of others to a list": (field(tuple[int, str]), field(list[int]), NONE),
    "a longer tuple": (field(tuple[int, int]), field(tuple[int, int, int]), NONE),
    "a dict of floats": (field(dict[str, int]), field(dict[str, float]), BACKWARD),
    "a class to a dict": (field(Left), field(dict[str, Any]), BACKWARD),
    "a class to a dict of int": (field(Left), field(dict[str, int]), NONE),
    "keys of some values": (field(dict[Literal["a"], int]), field(dict[Literal["a", "b"], int]), BACKWARD),
    "keys of any text": (field(dict[Literal["a"], int]), field(dict[str, int]), BACKWARD),
    "a class to a dict of its keys": (field(Middle), field(dict[Literal["kind"], str]), BACKWARD),
    "a class to a dict of other keys": (field(Middle), field(dict[Literal["size"], str]), NONE),
    "keys of numbers": (field(dict[str, int]), field(dict[int, int]), FORWARD),
    "keys of numbers, the same": (field(dict[int, int]), field(dict[int, float]), BACKWARD),
    "keys of smaller numbers": (field(dict[int, int]), field(dict[Annotated[int, Field(lt=9)], int]), NONE),
    "a class to a dict of numbers": (field(Left), field(dict[int, Any]), NONE),
    "a list to a deque": (field(list[int]), field(deque[int]), FULL),
    # what no keyword says
    "a limit of a union": (
        field(Annotated[int | float, Field(ge=0)]),
        field(Annotated[int | float, Field(ge=9)]),
        NONE,
    ),
    "the same limit of a union": (
        field(Annotated[int | float, Field(ge=0)]),
        field(Annotated[int | float, Field(ge=0)]),
        FULL,
    ),
    "a limit of a fraction": (field(Fraction), field(Annotated[Fraction, Field(ge=9)]), FORWARD),
    "another argument": (
        field(Annotated[int, AfterValidator(partial(at_least, 0))]),
        field(Annotated[int, AfterValidator(partial(at_least, 9))]),
        NONE,
    ),
    "another predicate": (
        field(Annotated[str, Predicate(str.islower)]),
        field(Annotated[str, Predicate(str.isupper)]),
        NONE,
    ),
    "another lambda": (
        field(Annotated[int, Predicate(lambda size: size > 0)]),
        field(Annotated[int, Predicate(lambda size: size > 9)]),
        NONE,
    ),
    "blanks that do not count": (
        field(SomeText),
        field(Annotated[SomeText, StringConstraints(strip_whitespace=True)]),
        FORWARD,
    ),
    "blanks that do not count, by the class": (
        field(SomeText),
        model(ConfigDict(str_strip_whitespace=True), x=SomeText),
        FORWARD,
    ),
    "a dataclass that looks at itself": (Plain, Looking, FORWARD),
    "a model that looks at itself": (field(int), LookingModel, FORWARD),
    "private attributes": (field(int), Private, FULL),
    "what a subclass adds": (field(SerializeAsAny[Left]), field(Left), FORWARD),
    "None that the schema hides": (field(Hiding), field(int), FORWARD),
    "None that both hide": (field(Hiding), field(Hiding), FULL),
    "no number as text": (model(ConfigDict(ser_json_inf_nan="strings"), x=float), field(FiniteFloat), FORWARD),
    "a Decimal that may be NaN": (field(Annotated[Decimal, Field(allow_inf_nan=True)]), field(Decimal), FORWARD),
    "bytes in base64": (
        field(bytes),
        model(ConfigDict(val_json_bytes="base64", ser_json_bytes="base64"), x=bytes),
        NONE,
    ),
    "text to a complex number": (field(str), field(complex), FORWARD),
    "another engine of patterns": (field(Digits), model(ConfigDict(regex_engine="python-re"), x=Digits), FORWARD),
    "a tag that was not there": (field(Untagged), field(Tagged), NONE),
    "a mode of schemas": (
        field(Decimal),
        model(ConfigDict(json_schema_mode_override="serialization"), x=Annotated[int, PlainSerializer(str)]),
        NONE,
    ),
    # unions and recursion
    "an alternative more": (field(Sided), field(Three), BACKWARD),
    "one of two": (field(Left), field(Sided), BACKWARD),
    "one of three, by no property": (field(Left), field(Left | Right | None), BACKWARD),
    "one of two, found by a function": (field(Left), field(Called), NONE),
    "the same trees": (Tree, Tree, FULL),
    "trees of floats": (Tree, TreeOfFloats, BACKWARD),
    "trees with names": (Tree, NamedTree, FORWARD),
    "a tree to lists": (field(Tree), field(dict[str, Any]), BACKWARD),
}


@pytest.mark.parametrize("change", PAIRS)
def test_a_change_keeps_what_is_known(change: str) -> None:
    old, new, verdict = PAIRS[change]

    found = compare(contract(old), contract(new))

    assert found.verdict == verdict, found.reasons


def test_another_key_is_another_order() -> None:
    def keyed(field: str) -> Contract:
        declaration = declaration_of(event("Changed", key=("customer", field))(model(a=int, b=int)))
        assert declaration is not None
        return contract_of(declaration)

    found = compare(keyed("a"), keyed("b"))

    assert found.verdict == BACKWARD
    assert found.forward == ("the aggregate id is b, not a: other messages come in order",)
