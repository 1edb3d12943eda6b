"""What a write or a read asks for: the values of its options, and what they cannot be together."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from difflib import get_close_matches
from hashlib import sha256
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from outbox_spark.errors import OptionError
from outbox_spark.options import (
    FAILFAST,
    OPTIONS,
    PYTHON,
    QUARANTINE,
    READS,
    SENT,
    SKIP,
    STAGING_MAX_AGE,
    WRITES,
    Option,
    Use,
    options_of,
)

NO_VERSION = -1  # of a stream, whose every micro-batch has one
OF_STREAMS = {"checkpointlocation", "queryname"}  # Spark's own, which it hands on


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """How much an `OutboxBatch` writes at a time, and when it waits; None: the default of the option.

    Args:
        num_partitions: so many tasks connect at a time, at most.
        batchsize: rows that an executor sends at a time.
        max_pending: the transaction waits while more rows than these are pending, up to `max_pending_wait` seconds.
        rate: events a second that become due, from the commit on; those that have an `available_at` keep it.
    """

    num_partitions: int | None = None
    batchsize: int | None = None
    max_pending: int | None = None
    max_pending_wait: int | None = None
    rate: int | None = None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Which batch is written where, and how.

    `app_id` and `version` name the batch in the ledger. Without them each `save()` is a separate batch, which nothing
    recognises again, as in Delta.
    """

    url: str
    user: str | None
    password: str | None
    app_id: str
    version: int
    pieces: int | None  # each of them its own transaction; None: all in one
    num_partitions: int | None
    batchsize: int
    max_pending: int | None
    max_pending_wait: int
    rate: int | None  # events a second; None: all at once
    outbox_schema: str
    staging_schema: str
    staging_max_age: float
    on_recognised: str  # "skip" or "fail"

    @property
    def most_partitions(self) -> int | None:
        """How many partitions the DataFrame may have; None when it may have any number."""
        return self.pieces or self.num_partitions

    @property
    def batch_hash(self) -> str:
        """Twelve hex digits that every attempt at this batch shares, for the names of its staging tables."""
        return sha256(f"{self.outbox_schema}\0{self.app_id}\0{self.version}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How rows go into a table in which some of them are already, and where those go that it cannot take."""

    keys: tuple[str, ...]  # empty: every row is inserted
    only_changed: bool
    if_absent: bool
    delete_column: str | None
    bad_rows_table: str | None  # None: a bad row fails the batch
    max_bad_rows: int


@dataclass(frozen=True, slots=True)
class WriteOptions(BatchOptions):
    """What one `save()` was told."""

    dbtable: str
    rows: RowOptions
    delete_event_type: str | None
    aggregate_type: str
    aggregate_id_column: str
    event_type: str
    payload_columns: tuple[str, ...]  # empty: every column of the business table
    payload_column: str | None
    headers_column: str | None
    available_at_column: str | None
    sequence_column: str | None
    exchange: str | None
    routing_key: str | None
    content_type: str | None

    def made_by(self, schema: StructType) -> str:
        """Return what decides which rows and events the DataFrame becomes: the options, and its types.

        The types, because the same digits are 1234 as decimal(12,0) and 12.34 as decimal(12,2).
        """
        named = self.named_columns()
        texts = (self.dbtable, self.aggregate_type, self.event_type, self.exchange, self.routing_key, self.content_type)
        return json.dumps([texts, self.payload_columns, named, schema.simpleString()])

    def named_columns(self) -> dict[str, str]:
        """Return the column that each option names."""
        named = {
            "aggregateIdColumn": self.aggregate_id_column,
            "payloadColumn": self.payload_column,
            "headersColumn": self.headers_column,
            "availableAtColumn": self.available_at_column,
            "sequenceColumn": self.sequence_column,
        }
        return {option: column for option, column in named.items() if column is not None}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What one read was told; bounds are inclusive, and `None` is no bound."""

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
    num_partitions: int | None  # None: by size
    fails_fast: bool  # when a field of a payload does not fit
    fail_on_data_loss: bool  # the last three are of a stream
    max_rows: int | None  # of a micro-batch
    max_time: int | None  # seconds of sending in a micro-batch
    outbox_schema: str

    @property
    def limits(self) -> list[str]:
        """The options that limit a micro-batch."""
        limits = {"maxRowsPerTrigger": self.max_rows, "maxTimePerTrigger": self.max_time}
        return [name for name, limit in limits.items() if limit is not None]


def write_options(given: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
    """Return the options of a write, which Spark hands over in any case and as text.

    Raises:
        OptionError: with every fault at once.
    """
    use = Use.WRITE_STREAM if is_stream else Use.WRITE
    own = {name: value for name, value in given.items() if not (is_stream and name.lower() in OF_STREAMS)}
    values, faults = _values(use, own)
    atomic, single_task, partitions = values.pop("atomic"), values.pop("single_task"), values["num_partitions"]
    faults += _cannot_be_atomic(atomic, partitions, is_single_task=single_task)
    if is_stream and (atomic != "batch" or single_task):
        faults.append("a stream takes only atomic=batch; inside foreachBatch all is possible")
    if not is_stream and (values["app_id"] is None) != (values["version"] is None):
        faults.append("options txnAppId and txnVersion name a batch together: give both or neither")
    elif not is_stream and atomic == "partition" and not single_task and values["app_id"] is None:
        faults.append(
            "option atomic=partition takes txnAppId and txnVersion: when a partition fails, others are written, and "
            "only a batch with a name goes on from there"
        )
    values["rows"], mistakes = _row_options(values, use)
    faults += mistakes
    if (values["rows"].delete_column is None) != (values["delete_event_type"] is None):
        faults.append("options deleteColumn and deleteEventType belong together: give both or neither")
    if values["rows"].keys and (single_task or atomic == "partition"):
        faults.append(
            "option upsertKeys takes atomic=batch without singleTask: other tasks copy their rows straight into the "
            "table, where a COPY only inserts"
        )
    if values["rows"].bad_rows_table is not None and (single_task or atomic == "partition"):
        faults.append("option badRows=quarantine takes atomic=batch without singleTask: it takes rows out of staging")
    if values["rate"] is not None and (single_task or atomic == "partition"):
        faults.append(
            "option rate takes atomic=batch without singleTask: of other tasks, no one knows when the events of the "
            "others are due. maxPending makes them wait for each other"
        )
    if values["rate"] is not None and values["available_at_column"] is not None:
        faults.append("options rate and availableAtColumn exclude each other: both say when an event is due")
    if values["payload_columns"] and values["payload_column"]:
        faults.append("options payloadColumns and payloadColumn exclude each other")
    _raise(faults)
    values["app_id"] = values["app_id"] or f"save-{uuid4()}"
    values.setdefault("on_recognised", SKIP)
    values["version"] = NO_VERSION if is_stream else values["version"] or 0
    values["staging_schema"] = values["staging_schema"] or values["outbox_schema"]
    return WriteOptions(**values, pieces=1 if single_task else partitions if atomic == "partition" else None)


def read_options(given: Mapping[str, str], *, is_stream: bool = False) -> ReadOptions:
    """Return the options of a read, which Spark hands over in any case and as text.

    Raises:
        OptionError: with every fault at once.
    """
    values, faults = _values(Use.READ_STREAM if is_stream else Use.READ, given)
    values.pop("payload_schema")  # the schema that Spark hands over has it
    values["fails_fast"] = values.pop("mode") == FAILFAST
    others = {"ending_day": None, "fail_on_data_loss": True, "max_rows": None, "max_time": None}
    options = ReadOptions(**{**others, **values})
    faults += _contradictions(options)
    if is_stream and options.state != SENT:
        faults.append("option state is not for a stream, which reads rows as they are sent, from startingDay on")
    _raise(faults)
    return options


def batch_options(limits: WriteLimits, **given: Any) -> BatchOptions:
    """Return the options of an `OutboxBatch`.

    Raises:
        OptionError: with every fault at once.
    """
    values, faults = _values(Use.BATCH, given | asdict(limits))
    _raise(faults)
    values["staging_schema"] = values["staging_schema"] or values["outbox_schema"]
    return BatchOptions(**values, pieces=None, staging_max_age=STAGING_MAX_AGE)


def row_options(**given: Any) -> RowOptions:
    """Return the options of `OutboxBatch.rows()`.

    Raises:
        OptionError: with every fault at once.
    """
    values, faults = _values(Use.ROWS, given)
    options, mistakes = _row_options(values, Use.ROWS)
    _raise(faults + mistakes)
    return options


def check_foreach(**given: Any) -> None:
    """Raise OptionError when `foreach_batch` cannot take these."""
    _, faults = _values(Use.FOREACH, given)
    _raise(faults)


def check_version(version: int) -> None:
    """Raise OptionError when no batch can have this version."""
    try:
        options_of(Use.BATCH)["txnVersion"].convert(version)
    except ValueError as error:
        raise OptionError(f"version {error}") from None


def as_given_to_spark(use: Use, given: Mapping[str, Any]) -> dict[str, str]:
    """Return options that are named by their parameters as Spark hands them over: by its names, and as text.

    Raises:
        OptionError: an option is unknown.
    """
    names = {option.parameter: option.name for option in options_of(use).values()}
    if unknown := sorted(given.keys() - names.keys()):
        known = ", ".join(names)
        raise OptionError("; ".join(f"option {name!r} is unknown; known are {known}" for name in unknown))
    return {names[name]: _as_text(value) for name, value in given.items() if value is not None}


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


def _values(use: Use, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the value of each option by its parameter, and what is wrong with those that are given."""
    known = options_of(use)
    if use in PYTHON:
        by_key = {option.parameter: option for option in known.values()}
        faults = []
    else:
        given = {name.lower(): value for name, value in given.items()}
        by_key = {name.lower(): option for name, option in known.items()}
        faults = _unknown(use, given, known)
    values = {}
    for key, option in by_key.items():
        label = key if use in PYTHON else f"option {option.name}"
        value = given.get(key)
        values[option.parameter] = option.default
        if value is None or (value == "" and not option.keeps_empty):
            if option.is_required:
                faults.append(f"{label} is missing{option.missing}")
            continue
        try:
            values[option.parameter] = option.convert(value)
        except ValueError as error:
            faults.append(f"{label} {error}")
    return values, faults


def _unknown(use: Use, given: Mapping[str, str], known: Mapping[str, Option]) -> list[str]:
    """Return a fault for each unknown option, with the one that may be meant."""
    names = {name.lower(): name for name in known}
    elsewhere = {option.name.lower(): option for option in OPTIONS if option.not_here and use not in option.uses}
    faults = []
    for name in sorted(given.keys() - names.keys()):
        if name in elsewhere and use in (WRITES if elsewhere[name].uses & WRITES else READS):
            if given[name]:
                faults.append(f"option {elsewhere[name].name} {elsewhere[name].not_here}")
            continue
        close = get_close_matches(name, names, n=1)
        remedy = (
            f"; did you mean {names[close[0]]}?"
            if close
            else f"; known are {', '.join(sorted(known, key=lambda name: not known[name].is_required))}"
        )
        faults.append(f"option {name!r} is unknown{remedy}")
    return faults


def _row_options(values: dict[str, Any], use: Use) -> tuple[RowOptions, list[str]]:
    """Take what decides how rows go into a table out of the values; return what of it cannot be together, too."""
    names = ("upsert_keys", "only_changed", "if_absent", "delete_column", "bad_rows_table", "max_bad_rows")
    taken = RowOptions(*(values.pop(name) for name in names))
    said = {
        option.parameter: option.parameter if use in PYTHON else f"option {name}"
        for name, option in options_of(use).items()
    }
    alone = [name for name in ("only_changed", "if_absent", "delete_column") if getattr(taken, name)]
    faults = []
    if alone and not taken.keys:
        keys = said["upsert_keys"].removeprefix("option ")
        faults = [f"{said[name]} takes {keys}, the columns that find a row" for name in alone]
    if taken.if_absent and len(alone) > 1:
        others = " and ".join(said[name] for name in alone if name != "if_absent")
        faults.append(f"{said['if_absent']} leaves every row that is there as it is, and excludes {others}")
    if (values.pop("bad_rows") == QUARANTINE) != (taken.bad_rows_table is not None):
        both = f"{said['bad_rows']}={QUARANTINE} and {said['bad_rows_table'].removeprefix('option ')}"
        faults.append(f"{both.replace('option ', 'options ')} belong together: give both or neither")
    return taken, faults


def _cannot_be_atomic(atomic: str, num_partitions: int | None, *, is_single_task: bool) -> list[str]:
    if is_single_task and num_partitions not in {None, 1}:
        return [f"option singleTask takes a DataFrame of one partition; numPartitions says {num_partitions}"]
    if not is_single_task and atomic == "partition" and num_partitions is None:
        fault = (
            "option atomic=partition takes numPartitions, the number of the DataFrame's partitions: "
            "frame.repartition(n, ...) gives it that many, and a rerun has to have as many"
        )
        return [fault]
    return []


def _contradictions(options: ReadOptions) -> list[str]:
    faults = []
    if options.state != SENT:
        faults += [
            f"option {name} is for sent rows; rows that are {options.state} are read by one task"
            for name, value in (
                ("startingDay", options.starting_day),
                ("endingDay", options.ending_day),
                ("numPartitions", options.num_partitions),
            )
            if value is not None
        ]
    if options.starting_day and options.ending_day and options.starting_day > options.ending_day:
        faults.append(f"startingDay {options.starting_day} is after endingDay {options.ending_day}")
    if options.starting_id is not None and options.ending_id is not None and options.starting_id > options.ending_id:
        faults.append(f"startingId {options.starting_id} is above endingId {options.ending_id}")
    return faults


def _raise(faults: list[str]) -> None:
    if faults:
        raise OptionError("; ".join(faults))
