"""Every option of `format("outbox")`, `OutboxBatch` and `foreach_batch`, in one table: OPTIONS.

The words are those of Spark's JDBC source and of Delta. `docs/spark.md` shows the table; a test compares the two.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from hashlib import sha256
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from outbox_spark.errors import OptionError

# As the relay's settings take it, and a bare number of seconds (tests/test_durations.py compares the two).
DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|d|seconds?|minutes?|hours?|days?)?", re.ASCII)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

STAGING_MAX_AGE = 86_400  # seconds; longer than any batch may take
MAX_NUMBER = 2**63 - 1
NO_VERSION = -1  # of a stream, whose every micro-batch has one
OF_STREAMS = {"checkpointlocation", "queryname"}  # Spark's own, which it hands on
MAX_PARTITIONS = 2**24 - 1  # three bytes of a message id
SENT = "sent"
FAILFAST = "FAILFAST"


class Use(Enum):
    """Who takes an option; the first four by its name, the others by the name of its parameter."""

    WRITE = "df.write"
    WRITE_STREAM = "df.writeStream"
    READ = "spark.read"
    READ_STREAM = "spark.readStream"
    BATCH = "OutboxBatch"
    FOREACH = "foreach_batch()"


WRITES = frozenset({Use.WRITE, Use.WRITE_STREAM})
READS = frozenset({Use.READ, Use.READ_STREAM})
PYTHON = frozenset({Use.BATCH, Use.FOREACH})
EVERY = WRITES | READS | PYTHON
BATCHES = WRITES | {Use.BATCH}

Convert = Callable[[Any], Any]


def _text(value: str) -> str:
    return value


def _short(value: str) -> str:
    if len(value.encode()) > 255:
        raise ValueError("is longer than 255 bytes")
    return value


def _url(value: str) -> str:
    if not value.startswith(("postgresql://", "postgres://")):
        raise ValueError("takes a libpq URL: postgresql://user@host:5432/database")
    return value


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _day(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"takes a day such as 2026-11-21, not {value!r}") from None


def _flag(value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise ValueError(f"takes true or false, not {value!r}")
    return value.lower() == "true"


def _one_of(*values: str) -> Convert:
    def convert(value: str) -> str:
        for each in values:
            if each.lower() == value.lower():
                return each
        *others, last = (repr(each) for each in values)
        raise ValueError(f"takes {', '.join(others)} or {last}, not {value!r}")

    return convert


def _whole(low: int, high: int) -> Convert:
    def convert(value: str | int) -> int:
        # isdecimal also takes other scripts' digits, which int() reads as well; nothing is lost.
        is_whole = value.isdecimal() if isinstance(value, str) else type(value) is int
        if not is_whole or not low <= int(value) <= high:
            raise ValueError(f"takes a whole number from {low} to {high}, not {value!r}")
        return int(value)

    return convert


def _seconds(low: int, high: int) -> Convert:
    def convert(value: str | int) -> int:
        found = DURATION.fullmatch(str(value))
        seconds = Decimal(-1) if found is None else Decimal(found[1]) * UNITS[(found[2] or "s")[0]]
        if seconds != int(seconds) or not low <= seconds <= high:
            raise ValueError(f"takes whole seconds from {low} to {high}, or as in '2h', not {value!r}")
        return int(seconds)

    return convert


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    name: str
    parameter: str  # its name in Python
    uses: frozenset[Use]
    takes: str  # as docs/spark.md says it
    convert: Convert = _text  # raises ValueError, which says what the option takes
    default: Any = None
    default_is: str = ""  # in words, where the value does not say it
    is_required: bool = False
    missing: str = ""  # what follows from the lack of a required option
    not_here: str = ""  # why the other use on the same side takes no such option
    keeps_empty: bool = False  # '' is a value

    @property
    def shown_default(self) -> str:
        """What the documentation says of the default."""
        if self.is_required:
            return "required"
        return self.default_is or ("" if self.default is None else f"`{self.default}`")


OPTIONS = (
    Option("url", "url", EVERY, "a libpq URL", _url, is_required=True),
    Option("user", "user", EVERY, "goes before that of the URL"),
    Option("password", "password", EVERY, "goes before that of the URL"),
    Option("dbtable", "dbtable", WRITES, "the business table, with its schema", is_required=True),
    Option(
        "aggregateType",
        "aggregate_type",
        WRITES,
        "half of the ordering key, at most 255 bytes",
        _short,
        is_required=True,
    ),
    Option(
        "aggregateIdColumn",
        "aggregate_id_column",
        WRITES,
        "a column of text, whole numbers, decimals or dates, the other half; null for no order",
        is_required=True,
    ),
    Option("eventType", "event_type", WRITES, "at most 255 bytes", _short, is_required=True),
    Option(
        "payloadColumns",
        "payload_columns",
        WRITES,
        "columns of the payload, a JSON object, with commas",
        _names,
        default=(),
        default_is="every column of `dbtable`",
    ),
    Option(
        "payloadColumn",
        "payload_column",
        WRITES,
        "a column with JSON as text, sent byte for byte; or a struct, map or array",
    ),
    Option(
        "headersColumn",
        "headers_column",
        WRITES,
        "a column with a map of texts, or a JSON object as text",
        default_is="no headers",
    ),
    Option(
        "sequenceColumn",
        "sequence_column",
        WRITES,
        "a column, unique for a key, for the message ids",
        default_is="by place in the batch",
    ),
    Option(
        "exchange",
        "exchange",
        WRITES,
        "at most 255 bytes; `''` is a value",
        _short,
        default_is="the relay's routes decide",
        keeps_empty=True,
    ),
    Option(
        "routingKey",
        "routing_key",
        WRITES,
        "at most 255 bytes; `''` is a value",
        _short,
        default_is="the relay's routes decide",
        keeps_empty=True,
    ),
    Option(
        "contentType",
        "content_type",
        WRITES,
        "at most 255 bytes",
        _short,
        default_is="`application/json`",
    ),
    Option(
        "txnAppId",
        "app_id",
        frozenset({Use.WRITE}),
        "name of the batch, with `txnVersion`",
        default_is="each `save()` is a batch",
    ),
    Option(
        "txnAppId",
        "app_id",
        frozenset({Use.WRITE_STREAM}),
        "name of the stream",
        is_required=True,
        missing=": it names the stream, for as long as its checkpoint lasts",
    ),
    Option(
        "txnAppId", "app_id", PYTHON, "name of the batch or stream", is_required=True, missing=": it names the batch"
    ),
    Option(
        "txnVersion",
        "version",
        frozenset({Use.WRITE}),
        "number of the batch, with `txnAppId`",
        _whole(0, MAX_NUMBER),
        default_is="each `save()` is a batch",
        not_here="is the micro-batch's own number in a stream, and cannot be given",
    ),
    Option(
        "txnVersion", "version", frozenset({Use.BATCH}), "number of the batch", _whole(0, MAX_NUMBER), is_required=True
    ),
    Option(
        "atomic",
        "atomic",
        WRITES,
        "`batch`: all partitions in one transaction; `partition`: each in its own",
        _one_of("batch", "partition"),
        default="batch",
    ),
    Option(
        "singleTask",
        "single_task",
        WRITES,
        "`true`: one partition, written without staging",
        _flag,
        default=False,
        default_is="`false`",
    ),
    Option(
        "numPartitions",
        "num_partitions",
        BATCHES,
        "the most partitions; with `atomic=partition` their exact number, required",
        _whole(1, MAX_PARTITIONS),
        default_is="any number",
    ),
    Option(
        "maxPending",
        "max_pending",
        BATCHES,
        "waits while more rows are pending, with `atomic=partition` before each partition",
        _whole(1, MAX_NUMBER),
        default_is="any number",
    ),
    Option(
        "maxPendingWait",
        "max_pending_wait",
        BATCHES,
        "the write fails after this: seconds, or `10m`, up to a day",
        _seconds(1, 86_400),
        default=600,
    ),
    Option(
        "batchsize",
        "batchsize",
        BATCHES,
        "rows that an executor sends at a time, 1 to 10,000,000",
        _whole(1, 10_000_000),
        default=50_000,
    ),
    Option(
        "state",
        "state",
        READS,
        "`sent`, `pending`, `parked`, `quarantined`, `archived` or `discarded`",
        _one_of(SENT, "pending", "parked", "quarantined", "archived", "discarded"),
        default=SENT,
    ),
    Option(
        "startingDay",
        "starting_day",
        READS,
        "first day of sending",
        _day,
        default_is="the oldest that is kept",
    ),
    Option(
        "endingDay",
        "ending_day",
        frozenset({Use.READ}),
        "last day of sending",
        _day,
        default_is="today",
        not_here="is not for a stream, which reads rows as they are sent, from startingDay on",
    ),
    Option("startingId", "starting_id", READS, "the lowest id", _whole(0, MAX_NUMBER), default_is="all"),
    Option("endingId", "ending_id", READS, "the highest id", _whole(0, MAX_NUMBER), default_is="all"),
    Option("aggregateType", "aggregate_type", READS, "rows of this type", default_is="all"),
    Option("aggregateId", "aggregate_id", READS, "rows of this key", default_is="all"),
    Option("eventType", "event_type", READS, "rows of this event", default_is="all"),
    Option(
        "numPartitions",
        "partitions",
        READS,
        "tasks for all of it, about; sent rows only",
        _whole(1, 100_000),
        default_is="one for each 128 MiB of a day",
    ),
    Option(
        "payloadSchema",
        "payload_schema",
        READS,
        "fields of the payload and their types, as in `schema(...)`",
        default_is="the payload is text",
    ),
    Option(
        "mode",
        "mode",
        READS,
        "`PERMISSIVE`: a field that does not fit is null; `FAILFAST`: it fails the query, which names the row's id",
        _one_of("PERMISSIVE", FAILFAST),
        default="PERMISSIVE",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        frozenset({Use.READ_STREAM}),
        "whether rows that a stream can no longer read end it",
        _flag,
        default=True,
        default_is="`true`",
        not_here="is for a stream: spark.readStream",
    ),
    Option(
        "maxRowsPerTrigger",
        "max_rows",
        frozenset({Use.READ_STREAM}),
        "about the most rows of a micro-batch; rows of one moment stay together",
        _whole(1, MAX_NUMBER),
        default_is="any number",
        not_here="is for a stream: spark.readStream",
    ),
    Option(
        "maxTimePerTrigger",
        "max_time",
        frozenset({Use.READ_STREAM}),
        "the most time of sending that a micro-batch covers: seconds, or `10m`, up to a day",
        _seconds(1, 86_400),
        default_is="any time",
        not_here="is for a stream: spark.readStream",
    ),
    Option("outboxSchema", "outbox_schema", EVERY, "schema of the outbox tables", default="outbox"),
    Option(
        "stagingSchema",
        "staging_schema",
        BATCHES,
        "schema in which the staging tables are made",
        default_is="that of the outbox",
    ),
    Option(
        "stagingMaxAge",
        "staging_max_age",
        WRITES,
        "older staging tables of any batch are dropped; at least a minute",
        _seconds(60, 10**9),
        default=STAGING_MAX_AGE,
        default_is="`1d`",
    ),
)


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """How much an `OutboxBatch` writes at a time, and when it waits; None: the default of the option.

    Args:
        num_partitions: so many tasks connect at a time, at most.
        batchsize: rows that an executor sends at a time.
        max_pending: the transaction waits while more rows than these are pending, up to `max_pending_wait` seconds.
    """

    num_partitions: int | None = None
    batchsize: int | None = None
    max_pending: int | None = None
    max_pending_wait: int | None = None


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
    outbox_schema: str
    staging_schema: str
    staging_max_age: float

    @property
    def most_partitions(self) -> int | None:
        """How many partitions the DataFrame may have; None when it may have any number."""
        return self.pieces or self.num_partitions

    @property
    def batch_hash(self) -> str:
        """Twelve hex digits that every attempt at this batch shares, for the names of its staging tables."""
        return sha256(f"{self.outbox_schema}\0{self.app_id}\0{self.version}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class WriteOptions(BatchOptions):
    """What one `save()` was told."""

    dbtable: str
    aggregate_type: str
    aggregate_id_column: str
    event_type: str
    payload_columns: tuple[str, ...]  # empty: every column of the business table
    payload_column: str | None
    headers_column: str | None
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
    partitions: int | None  # None: by size
    fails_fast: bool  # when a field of a payload does not fit
    fail_on_data_loss: bool  # the last three are of a stream
    max_rows: int | None  # of a micro-batch
    max_time: int | None  # seconds of sending in a micro-batch
    outbox_schema: str


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
    if values["payload_columns"] and values["payload_column"]:
        faults.append("options payloadColumns and payloadColumn exclude each other")
    _raise(faults)
    values["app_id"] = values["app_id"] or f"save-{uuid4()}"
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


def options_of(*uses: Use) -> dict[str, Option]:
    """Return the options that these take, by name; of one that differs between them the first."""
    found: dict[str, Option] = {}
    for use in uses:
        for option in OPTIONS:
            if use in option.uses:
                found.setdefault(option.name, option)
    return found


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
                ("numPartitions", options.partitions),
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
