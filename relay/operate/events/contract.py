"""An export: a JSON document with the schemas of declared events, which can be committed and compared with later."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relay.errors import ConfigurationError
from relay.operate.events import shape
from relay.operate.events.schemas import schema_of
from relay.operate.events.shape import Schema, ShapeError
from relay.outbox.declared import Declaration

FORMAT = 1
MOST_BYTES = 16 * 1024 * 1024
TEXT_FIELDS = {"event_type": False, "version": True, "aggregate_type": False, "aggregate_id": True}  # may it be null?


@dataclass(frozen=True, slots=True)
class Contract:
    """What one version of an event promises.

    Attributes:
        aggregate_id: the field with the aggregate id; None: the events have no order.
        written: the schema of what is written.
        read: the schema of what a handler reads.
    """

    event_type: str
    version: str | None
    aggregate_type: str
    aggregate_id: str | None
    written: Schema
    read: Schema

    @property
    def name(self) -> tuple[str, str | None]:
        return self.event_type, self.version

    def __str__(self) -> str:
        return self.event_type if self.version is None else f"{self.event_type} version {self.version}"


def contract_of(declaration: Declaration) -> Contract:
    """Return the contract of a declared class.

    Raises:
        ConfigurationError: its JSON Schema cannot be made.
    """
    made = Contract(
        declaration.event_type,
        declaration.version,
        declaration.aggregate_type,
        declaration.key_field,
        schema_of(declaration, "serialization"),
        schema_of(declaration, "validation"),
    )
    try:
        return _contract(json.loads(json.dumps(asdict(made), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:  # of what `json_schema_extra` says
        raise ConfigurationError(f"@event({made.event_type!r}): its JSON Schema is not one: {error}") from None


def document(contracts: Iterable[Contract]) -> dict[str, Any]:
    """Return the export of some contracts; the same ones always give the same document."""
    in_order = sorted(contracts, key=lambda each: (each.event_type, each.version or ""))
    return {"relay_events": FORMAT, "events": [asdict(each) for each in in_order]}


def as_text(exported: dict[str, Any]) -> str:
    """Return a document as it is committed: ASCII, sorted by key."""
    return json.dumps(exported, indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_contracts(path: Path) -> list[Contract]:
    """Return the contracts of an export.

    Raises:
        ConfigurationError: it cannot be read, or is no such export; the words name the place.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"file {path} cannot be read: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise ConfigurationError(f"file {path} has more than {MOST_BYTES} bytes: it is no export of events")
    try:
        given = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        return _contracts(given)
    except RecursionError:
        raise ConfigurationError(f"file {path} is nested too deep: it is no export of events") from None
    except ValueError as error:
        raise ConfigurationError(f"file {path} is no export of events: {error}") from None


def _contracts(given: Any) -> list[Contract]:
    if not isinstance(given, dict) or "relay_events" not in given:
        raise ShapeError("`relay events export`, without --format, writes one")
    if given["relay_events"] != FORMAT:
        raise ShapeError(f"relay_events is not {FORMAT}; export it again with this release")
    if not isinstance(events := given.get("events"), list):
        raise ShapeError("it has no list `events`")
    contracts = []
    for position, each in enumerate(events):
        try:
            contracts.append(_contract(each))
        except ShapeError as error:
            raise ShapeError(f"events[{position}]{error}") from None
    counts = Counter(each.name for each in contracts)
    if repeated := [each for each in contracts if counts[each.name] > 1]:
        raise ShapeError(f"it has {repeated[0]} twice")
    return contracts


def _contract(given: Any) -> Contract:
    if not isinstance(given, dict):
        raise ShapeError(" is no object")
    for field, may_be_null in TEXT_FIELDS.items():
        value = given.get(field)
        if not (isinstance(value, str) or (value is None and may_be_null)):
            raise ShapeError(f".{field} is no text")
    for field in ("written", "read"):
        if not isinstance(given.get(field), dict):
            raise ShapeError(f".{field} is no schema")
        try:
            shape.check(given[field])
        except ShapeError as error:
            raise ShapeError(f".{field} at {error}") from None
    fields: dict[str, Any] = {field: given.get(field) for field in (*TEXT_FIELDS, "written", "read")}
    return Contract(**fields)


def _refuse(constant: str) -> float:
    raise ShapeError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if abs(number) != float("inf") else _refuse(text[:20])
