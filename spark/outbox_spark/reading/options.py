"""The options of a read, in the words of Spark's JDBC source and of Delta."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from outbox_spark.errors import OptionError
from outbox_spark.options import unknown_options

SENT = "sent"
STATES = (SENT, "pending", "parked", "quarantined", "discarded")
OPTIONS = (
    "url",
    "user",
    "password",
    "state",
    "startingDay",
    "endingDay",
    "startingId",
    "endingId",
    "aggregateType",
    "aggregateId",
    "eventType",
    "numPartitions",
    "payloadSchema",
    "mode",
    "failOnDataLoss",
    "outboxSchema",
)
MODES = ("PERMISSIVE", "FAILFAST")  # of from_json()
MOST_PARTITIONS = 100_000
MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What one read was told; bounds are inclusive, and None is no bound."""

    url: str
    user: str | None
    password: str | None
    state: str
    starting_day: date | None
    ending_day: date | None
    starting_id: int | None
    ending_id: int | None
    aggregate_type: str | None
    aggregate_id: str | None
    event_type: str | None
    partitions: int | None  # None: by size
    fails_fast: bool  # when a field of a payload does not fit
    fail_on_data_loss: bool  # of a stream
    outbox_schema: str


def read_options(given: Mapping[str, str], *, of_stream: bool = False) -> ReadOptions:
    """Read the options as Spark hands them over: in lower case, values as text.

    Args:
        of_stream: refuse what only a batch can have.
    Raises:
        OptionError: with every fault of them at once.
    """
    given = {key.lower(): value for key, value in given.items() if value != ""}
    faults = unknown_options(given, OPTIONS)

    def number(name: str, low: int, high: int) -> int | None:
        value = given.get(name.lower())
        if value is None:
            return None
        if not value.isdecimal() or not low <= int(value) <= high:
            faults.append(f"option {name} takes a whole number from {low} to {high}, not {value!r}")
            return None
        return int(value)

    def day(name: str) -> date | None:
        value = given.get(name.lower())
        try:
            return None if value is None else date.fromisoformat(value)
        except ValueError:
            faults.append(f"option {name} takes a day such as 2026-11-21, not {value!r}")
            return None

    if (fails := given.get("failondataloss", "true").lower()) not in {"true", "false"}:
        faults.append(f"option failOnDataLoss takes true or false, not {fails!r}")
    if (mode := given.get("mode", MODES[0]).upper()) not in MODES:
        faults.append(f"option mode takes {' or '.join(map(repr, MODES))}, not {given['mode']!r}")
    if "url" not in given:
        faults.append("option url is missing")
    elif not given["url"].startswith(("postgresql://", "postgres://")):
        faults.append("option url takes a libpq URL: postgresql://user@host:5432/database")
    options = ReadOptions(
        url=given.get("url", ""),
        user=given.get("user"),
        password=given.get("password"),
        state=given.get("state", SENT),
        starting_day=day("startingDay"),
        ending_day=day("endingDay"),
        starting_id=number("startingId", 0, MAX_ID),
        ending_id=number("endingId", 0, MAX_ID),
        aggregate_type=given.get("aggregatetype"),
        aggregate_id=given.get("aggregateid"),
        event_type=given.get("eventtype"),
        partitions=number("numPartitions", 1, MOST_PARTITIONS),
        fails_fast=mode == "FAILFAST",
        fail_on_data_loss=fails == "true",
        outbox_schema=given.get("outboxschema", "outbox"),
    )
    faults += _contradictions(options)
    if of_stream:
        faults += [
            f"option {name} is not for a stream, which reads rows as they are sent, from startingDay on"
            for name, has_bound in (("state", options.state != SENT), ("endingDay", options.ending_day is not None))
            if has_bound
        ]
    elif "failondataloss" in given:
        faults.append("option failOnDataLoss is for a stream: spark.readStream")
    if faults:
        raise OptionError("; ".join(faults))
    return options


def _contradictions(options: ReadOptions) -> list[str]:
    faults = []
    if options.state not in STATES:
        faults.append(f"option state takes one of {', '.join(STATES)}; not {options.state!r}")
    elif options.state != SENT:
        faults += [
            f"option {name} is for sent rows; rows that are {options.state} are read by one task"
            for name, value in (
                ("startingDay", options.starting_day),
                ("endingDay", options.ending_day),
                ("numPartitions", options.partitions),
            )
            if value is not None
        ]
    if options.starting_day and options.ending_day and options.starting_day > options.ending_day:
        faults.append(f"startingDay {options.starting_day} is after endingDay {options.ending_day}")
    if options.starting_id is not None and options.ending_id is not None and options.starting_id > options.ending_id:
        faults.append(f"startingId {options.starting_id} is above endingId {options.ending_id}")
    return faults
