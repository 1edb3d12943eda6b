"""A verdict is kept: where it says that a new class reads old messages, pydantic and JSON Schema read each of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema_rs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, TypeAdapter, create_model

from relay.operate.events.check import compare
from relay.operate.events.contract import contract_of
from relay.outbox import event
from relay.outbox.declared import declaration_of


@dataclass(frozen=True)
class Kind:
    """An annotation, and values of it as Python has them."""

    annotation: Any
    values: st.SearchStrategy[Any]


class Left(BaseModel):
    kind: Literal["left"] = "left"
    size: int


class Right(BaseModel):
    kind: Literal["right"] = "right"


SIZES = st.integers(-5, 30)
TEXTS = st.text("ab", max_size=8)
LEFTS = st.builds(lambda size: {"kind": "left", "size": size}, SIZES)
SIMPLE = [
    Kind(int, SIZES),
    Kind(Annotated[int, Field(ge=0)], st.integers(0, 30)),
    Kind(Annotated[int, Field(gt=-1, lt=10)], st.integers(0, 9)),
    Kind(Annotated[int, Field(multiple_of=2)], SIZES.map(lambda size: size * 2)),
    Kind(float, st.floats(-5, 30)),
    Kind(Annotated[float, Field(gt=0)], st.floats(0, 30, exclude_min=True)),
    Kind(bool, st.booleans()),
    Kind(str, TEXTS),
    Kind(Annotated[str, Field(max_length=4)], st.text("ab", max_size=4)),
    Kind(Annotated[str, Field(min_length=1)], st.text("ab", min_size=1, max_size=8)),
    Kind(Annotated[str, Field(pattern="^a*$")], st.text("a", max_size=8)),
    Kind(Decimal, st.decimals(-5, 30, places=2)),
    Kind(Annotated[Decimal, Field(ge=0)], st.decimals(0, 30, places=2)),
    Kind(Annotated[Decimal, PlainSerializer(float, return_type=float)], st.decimals(-5, 30, places=2)),
    Kind(Annotated[int, PlainSerializer(str, return_type=str)], SIZES),
    Kind(Annotated[date, PlainSerializer(str, return_type=str)], st.dates()),
    Kind(Annotated[int, AfterValidator(abs)], SIZES),
    Kind(UUID, st.uuids()),
    Kind(date, st.dates()),
    Kind(datetime, st.datetimes()),
    Kind(Literal["a"], st.just("a")),
    Kind(Literal["a", "b"], st.sampled_from("ab")),
    Kind(Literal[1, "a", None], st.sampled_from([1, "a", None])),
    Kind(Any, st.sampled_from([1, "a", None, [], {}])),
    Kind(Left, LEFTS),
    Kind(Annotated[Left | Right, Field(discriminator="kind")], LEFTS | st.just({"kind": "right"})),
    Kind(Left | Right | None, LEFTS | st.none()),
]


def several(kind: Kind) -> Iterator[Kind]:
    """Collections and unions of a kind."""
    yield Kind(kind.annotation | None, kind.values | st.none())
    yield Kind(kind.annotation | bool, kind.values | st.booleans())
    yield Kind(list[kind.annotation], st.lists(kind.values, max_size=3))  # type: ignore[name-defined]
    yield Kind(Annotated[list[kind.annotation], Field(min_length=1)], st.lists(kind.values, min_size=1, max_size=3))  # type: ignore[name-defined]
    yield Kind(dict[str, kind.annotation], st.dictionaries(TEXTS, kind.values, max_size=2))  # type: ignore[name-defined]
    yield Kind(tuple[kind.annotation, int], st.tuples(kind.values, SIZES))  # type: ignore[name-defined]


KINDS = st.recursive(
    st.sampled_from(SIMPLE),
    lambda kinds: kinds.flatmap(lambda kind: st.sampled_from(list(several(kind)))),
    max_leaves=3,
)
CONFIGS = st.sampled_from([ConfigDict(), ConfigDict(extra="forbid"), ConfigDict(extra="allow")])


@st.composite
def classes(draw: st.DrawFn) -> tuple[dict[str, tuple[Kind, bool]], ConfigDict]:
    """Fields of a class, each with whether it has a default, and what the class does with other properties."""
    names = draw(st.sets(st.sampled_from("abc"), min_size=1))
    return {name: (draw(KINDS), draw(st.booleans())) for name in sorted(names)}, draw(CONFIGS)


@st.composite
def changes(draw: st.DrawFn) -> tuple[type[BaseModel], type[BaseModel], dict[str, Any]]:
    """An old class, a new one that shares some of its fields, and fields of an instance of the old one."""
    old, old_config = draw(classes())
    new, new_config = draw(classes())
    shared = {name: old[name] for name in old if draw(st.integers(0, 2))}
    fields = {name: draw(kind.values) for name, (kind, _) in old.items()}
    others = {"other": draw(TEXTS)} if old_config.get("extra") == "allow" else {}
    return made(old, old_config), made({**new, **shared}, new_config), fields | others


def made(fields: dict[str, tuple[Kind, bool]], config: ConfigDict) -> type[BaseModel]:
    """A declared model; defaults are not checked, so that one default is as good as another."""
    given = {name: (kind.annotation, None if has_default else ...) for name, (kind, has_default) in fields.items()}
    declare = event("Changed", key=("customer", None))
    model: type[BaseModel] = create_model("Changed", __config__=config, **given)  # type: ignore[call-overload]
    return declare(model)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(changes())
def test_a_new_class_that_is_said_to_read_old_messages_does(
    change: tuple[type[BaseModel], type[BaseModel], dict[str, Any]],
) -> None:
    before, after, fields = change
    declared, newer = declaration_of(before), declaration_of(after)
    assert declared is not None
    assert newer is not None
    old, new = contract_of(declared), contract_of(newer)

    text = declared.encode(TypeAdapter(before).validate_python(fields))

    written = json.loads(text)
    assert jsonschema_rs.is_valid(old.written, written)
    if not compare(old, new).backward:
        assert jsonschema_rs.is_valid(new.read, written)
        TypeAdapter(after).validate_json(text)


def test_such_changes_are_drawn() -> None:
    """The property above would hold if no change were ever said to be fine."""
    verdicts: list[bool] = []

    @settings(deadline=None, max_examples=100, database=None, suppress_health_check=list(HealthCheck))
    @given(changes())
    def draw(change: tuple[type[BaseModel], type[BaseModel], dict[str, Any]]) -> None:
        old, new = (contract_of(declaration) for kind in change[:2] if (declaration := declaration_of(kind)))
        verdicts.append(not compare(old, new).backward)

    draw()

    assert 10 < sum(verdicts) < len(verdicts) - 10
