"""Compare rows with what a test wants, and say what is different."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import orjson

from relay.outbox.declared import VERSION, declaration_of
from relay.outbox.row import key_text
from relay.testing.written import Written, decoded, short

MOST_SHOWN = 5  # rows in a message of an assertion
MOST_DIFFERENCES = 5  # of a row

Id = str | int | UUID | None
Key = tuple[str, Id] | str | int | UUID
Predicate = Callable[[Any], object]


@dataclass(frozen=True)
class Expected:
    """What a row must be. None leaves it open.

    Attributes:
        event_type: a name, or a class that `relay.outbox.event` declares, with the version that it declares.
        key: `aggregate_type` and `aggregate_id`, or `aggregate_id` alone.
        payload: what the payload has, maybe among other things: a dict has at least these keys, a list as many items.
            Or a function that is given the payload, and returns whether it is right. Text and bytes are taken as `add`
            takes them.
    """

    event_type: str | type | None
    key: Key | None = None
    payload: Any = None
    version: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        dumps: Callable[[Any], bytes] = orjson.dumps
        if isinstance(self.event_type, type):
            if (declaration := declaration_of(self.event_type)) is None:
                raise TypeError(f"the class {self.event_type.__name__} is not declared: put @event above it")
            object.__setattr__(self, "event_type", declaration.event_type)
            object.__setattr__(self, "version", declaration.version)
            from pydantic_core import to_json  # noqa: PLC0415 - the declaration needed it, too

            dumps = to_json
        elif not isinstance(self.event_type, str | None):
            raise TypeError(_no_type(self.event_type))
        if isinstance(self.payload, type):
            raise TypeError(f"payload is the class {self.payload.__name__}: give an object of it, or a function")
        # An id may be a number, as for `add`.
        if isinstance(self.key, tuple):
            object.__setattr__(self, "key", (self.key[0], key_text(self.key[1])))
        else:
            object.__setattr__(self, "key", key_text(self.key))
        if not (callable(self.payload) or isinstance(self.payload, str | bytes)):
            object.__setattr__(self, "payload", _as_written(self.payload, dumps))

    def __str__(self) -> str:
        parts = [] if self.key is None else [f"key {self.key!r}"]
        if self.payload is not None:
            named = _name(self.payload) if callable(self.payload) else f"payload {short(self.payload)}"
            parts.append(named)
        kind = "event" if self.event_type is None else str(self.event_type)
        kind += "" if self.version is None else f" of version {self.version}"
        return f"{kind} with {' and '.join(parts)}" if parts else kind

    def differences(self, row: Written) -> list[str]:
        """Return what of the row is not as it must be. A function is asked only of rows that are right else."""
        found = []
        if not self._has_type(row):
            found.append(f"event_type is {row.event_type!r}, not {self.event_type!r}")
        if self.version is not None and (version := row.headers.get(VERSION)) != self.version:
            found.append(f"headers.{VERSION} is {version!r}, not {self.version!r}")
        if not self._has_key(row):
            found.append(f"key is {row.key!r}, not {self.key!r}")
        if self.payload is not None and not (found and callable(self.payload)):
            found += self._of_payload(row)
        return found

    def distance(self, row: Written) -> tuple[bool, bool, int]:
        """Return how far a row is from this: one of another type is farther than one of another key."""
        return (not self._has_type(row), not self._has_key(row), len(self.differences(row)))

    def _has_type(self, row: Written) -> bool:
        return self.event_type is None or row.event_type == self.event_type

    def _has_key(self, row: Written) -> bool:
        return self.key is None or self.key == (row.key if isinstance(self.key, tuple) else row.key[1])

    def _of_payload(self, row: Written) -> Iterator[str]:
        payload, wanted = row.payload(), self.payload
        if callable(wanted):
            try:
                is_right = wanted(payload)
            except Exception as error:  # it may expect what other rows have
                yield f"{_name(wanted)} raised {error!r}"
                return
            if not is_right:
                yield f"{_name(wanted)} does not hold"
            return
        if isinstance(wanted, str | bytes):  # JSON, or the bytes themselves: as `add` takes them
            wanted = wanted.encode() if isinstance(wanted, str) else wanted
            try:
                wanted = wanted if isinstance(payload, bytes) else decoded(wanted.decode())
            except ValueError:
                yield f"payload is JSON, and {short(wanted)} is not"
                return
        yield from _unlike(payload, wanted, "payload")


def no_such_row(wanted: Expected, rows: Sequence[Written]) -> str:
    """Return the message of an assertion: no row is as wanted; and which rows come nearest."""
    if not rows:
        return f"no {wanted} was written: the outbox is empty"
    return f"no {wanted} was written. The outbox has, the nearest first:\n{_nearest(wanted, rows)}"


def other_count(wanted: Expected, count: int, rows: Sequence[Written], found: Sequence[Written]) -> str:
    """Return the message of an assertion: another number of rows is so; and which rows come nearest, if some lack."""
    problem = f"{wanted} was written {len(found)} times, not {count}"
    if not rows:
        return f"{problem}: the outbox is empty"
    others = [row for row in rows if wanted.differences(row)] if len(found) < count else []
    listed = ([_listed(found)] if found else []) + ([_nearest(wanted, others)] if others else [])
    return "\n".join([f"{problem}:", *listed])


def rows_there(wanted: Expected, found: Sequence[Written]) -> str:
    """Return the message of an assertion: these rows are there, and should not be."""
    return f"{wanted} was written:\n{_listed(found)}"


def uncommitted(event_types: Sequence[str]) -> str:
    """Return the message of an assertion: rows of these types are of a transaction that goes on."""
    rows, named = (
        "1 row is" if len(event_types) == 1 else f"{len(event_types)} rows are",
        list(dict.fromkeys(event_types)),
    )
    shown = ", ".join(named[:MOST_SHOWN]) + (", ..." if len(named) > MOST_SHOWN else "")
    return (
        f"{rows} of a transaction that is not committed ({shown}): commit before drain. In a test whose transaction is"
        " never committed, deliver them as they are: harness.deliver(*outbox.all())"
    )


def _nearest(wanted: Expected, rows: Sequence[Written]) -> str:
    lines = []
    for row in sorted(rows, key=wanted.distance)[:MOST_SHOWN]:
        differences = wanted.differences(row)
        lines.append(f"  {row}")
        lines += [f"    {each}" for each in differences[:MOST_DIFFERENCES]]
        lines += [f"    and {len(differences) - MOST_DIFFERENCES} more"] if len(differences) > MOST_DIFFERENCES else []
    return "\n".join(lines + _rest(rows))


def _listed(rows: Sequence[Written]) -> str:
    return "\n".join([f"  {row}" for row in rows[:MOST_SHOWN]] + _rest(rows))


def _rest(rows: Sequence[Written]) -> list[str]:
    return [f"  and {len(rows) - MOST_SHOWN} more"] if len(rows) > MOST_SHOWN else []


def _unlike(found: Any, wanted: Any, path: str) -> Iterator[str]:
    """Yield where `found` lacks something of `wanted`, or has it otherwise."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            if name in found:
                yield from _unlike(found[name], value, f"{path}.{name}")
            else:
                yield f"{path}.{name} is missing"
    elif isinstance(wanted, list) and isinstance(found, list):
        if len(found) != len(wanted):
            yield f"{path} has {len(found)} items, not {len(wanted)}"
        for position, (inner, value) in enumerate(zip(found, wanted, strict=False)):
            yield from _unlike(inner, value, f"{path}[{position}]")
    # In Python True is 1; in JSON it is no number.
    elif found != wanted or (
        isinstance(wanted, int | float) and isinstance(found, bool) is not isinstance(wanted, bool)
    ):
        yield f"{path} is {short(found)}, not {short(wanted)}"


def _as_written(payload: Any, dumps: Callable[[Any], bytes]) -> Any:
    """Return a payload as `add` writes it: a UUID becomes text. What cannot be written stays as it is, to match."""
    if (declaration := declaration_of(type(payload))) is not None:
        return decoded(declaration.encode(payload))
    if isinstance(payload, dict):
        return {name: _as_written(value, dumps) for name, value in payload.items()}
    if isinstance(payload, list | tuple):
        return [_as_written(value, dumps) for value in payload]
    if callable(dump := getattr(payload, "model_dump_json", None)):
        return decoded(dump())
    try:
        return decoded(dumps(payload).decode())
    except (TypeError, ValueError):  # as pytest.approx(0.3), unittest.mock.ANY or a Decimal
        return payload


def _no_type(given: object) -> str:
    kind = type(given).__name__
    if declaration_of(type(given)) is not None:
        return f"event_type is an object of {kind}: give the class, and key= or payload= for values"
    return f"event_type is an object of {kind}: give a name or a declared class, and key= or payload= for values"


def _name(predicate: Predicate) -> str:
    return str(getattr(predicate, "__name__", predicate))
