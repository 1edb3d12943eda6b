"""Every key of the settings as a value: its variable, what it takes, its default; made from `relay.config.settings`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from relay.config.sections import Section, Takes
from relay.config.settings import Settings
from relay.runtime.scrub import redacted, scrub

UNFIXED_DEFAULTS = {
    "database.url": "required",
    "broker.url": "required",
    "relay.node": "the host's name",
    "relay.max_window_bytes": "64 MiB, or less by the memory limit (docs/container.md)",
}

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of relay.toml: `relay.ordering`, or `routes`, which is a list of tables."""

    name: str
    takes: str
    default: str  # as TOML, or in words where each machine has its own
    about: str
    is_secret: bool
    table: type[Section] | None = None  # of which it is a list

    @property
    def is_list(self) -> bool:
        return self.table is not None

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))

    @property
    def variable(self) -> str:
        """Return `RELAY_<KEY>` for the section `[relay]`, and `RELAY_<SECTION>_<KEY>` for the others."""
        return "RELAY_" + self.name.removeprefix("relay.").upper().replace(".", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """Return all that are accepted: `variable`, then the older `RELAY_<SECTION>__<KEY>`, which no page mentions."""
        if len(self.path) == 1 or self.is_secret:  # the URLs never had it
            return (self.variable,)
        return self.variable, "RELAY_" + "__".join(self.path).upper()

    @property
    def flag(self) -> str:
        return "--" + re.sub("[._]", "-", self.name)


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key, in the order of the models."""
    return tuple(_walk(Settings))


@cache
def table_keys(table: type[Section]) -> tuple[Key, ...]:
    """Return the keys of one table of a list."""
    return tuple(_key(name, field) for name, field in _fields(table))


def as_toml(value: object) -> str:
    """Write a setting's value as relay.toml would have it."""
    plain = as_json(value)
    if isinstance(plain, dict):
        pairs = ", ".join(f"{_toml_key(name)} = {as_toml(each)}" for name, each in plain.items() if each is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(plain, list):
        return "[" + ", ".join(as_toml(each) for each in plain) + "]"
    return json.dumps(plain, ensure_ascii=False)  # a string, number or truth value of JSON is one of TOML


def as_json(value: object) -> object:
    """Return a setting's value as JSON would have it."""
    match value:
        case SecretStr():
            return scrub(redacted(value.get_secret_value()))
        case Enum():
            return value.value
        case Section():
            return {name: as_json(getattr(value, attribute)) for name, attribute in _attributes(type(value))}
        case tuple() | list():
            return [as_json(each) for each in value]
        case _:
            return value


def value_of(settings: Settings, key: Key) -> Any:
    """Read the value of `key`."""
    value: Any = settings
    for step in key.path:
        value = getattr(value, dict(_attributes(type(value)))[step])
    return value


def _walk(model: type[Section], prefix: str = "") -> Iterator[Key]:
    for name, field in _fields(model):
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield _key(prefix + name, field)


def _key(name: str, field: FieldInfo) -> Key:
    table = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else None
    default = None if name in UNFIXED_DEFAULTS else field.get_default(call_default_factory=True)
    if isinstance(default, SecretStr):
        default = default.get_secret_value()  # one that everyone may know
    return Key(
        name=name,
        takes="tables with the keys " + ", ".join(each for each, _ in _fields(table)) if table else _words(field),
        default=_default(name, field, default),
        about=(field.description or "").replace("\n", " "),
        is_secret=field.annotation is SecretStr,
        table=table,
    )


def _default(name: str, field: FieldInfo, default: object) -> str:
    if field.is_required():
        return "required"
    return UNFIXED_DEFAULTS.get(name) or ("none" if default is None else as_toml(default))


def _words(field: FieldInfo) -> str:
    annotation, metadata = _without_none(field)
    words = next((each.words for each in metadata if isinstance(each, Takes)), None)
    if words:
        return words
    if annotation is bool:
        return "true or false"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    if annotation is int:
        low = next((each.ge for each in metadata if isinstance(each, Ge)), None)
        high = next((each.le for each in metadata if isinstance(each, Le)), None)
        return f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"
    raise TypeError(f"{field}: say what it takes with relay.config.sections.Takes")


def _without_none(field: FieldInfo) -> tuple[Any, list[Any]]:
    """Return the type of a value that is there, and what its annotation says next to the type."""
    annotation, metadata = field.annotation, list(field.metadata)
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = (each for each in get_args(annotation) if each is not NoneType)
        annotation, *more = get_args(inner) if get_origin(inner) is Annotated else (inner,)
        metadata += more
    return annotation, metadata


def _toml_key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _fields(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    return ((field.alias or name, field) for name, field in model.model_fields.items())


def _attributes(model: type[Section]) -> Iterator[tuple[str, str]]:
    return ((field.alias or name, name) for name, field in model.model_fields.items())
