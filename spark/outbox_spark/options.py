"""Every option of `format("outbox")`, `OutboxBatch` and `foreach_batch`, in one table: OPTIONS.

The words are those of Spark's JDBC source and of Delta. `docs/spark.md` shows the table; a test compares the two.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

# As the relay's settings take it, and a bare number of seconds (tests/test_durations.py compares the two).
DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|d|seconds?|minutes?|hours?|days?)?", re.ASCII)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

STAGING_MAX_AGE = 86_400  # seconds; longer than any batch may take
MAX_NUMBER = 2**63 - 1
MAX_PARTITIONS = 2**24 - 1  # three bytes of a message id
SENT = "sent"
SKIP, FAIL = "skip", "fail"
QUARANTINE = "quarantine"
FAILFAST = "FAILFAST"


class Use(Enum):
    """Which call takes an option; the first four by its name, the others by the name of its parameter."""

    WRITE = "df.write"
    WRITE_STREAM = "df.writeStream"
    READ = "spark.read"
    READ_STREAM = "spark.readStream"
    BATCH = "OutboxBatch"
    ROWS = "OutboxBatch.rows()"
    FOREACH = "foreach_batch()"


WRITES = frozenset({Use.WRITE, Use.WRITE_STREAM})
READS = frozenset({Use.READ, Use.READ_STREAM})
NAMED = frozenset({Use.BATCH, Use.FOREACH})
PYTHON = NAMED | {Use.ROWS}
EVERY = WRITES | READS | NAMED
BATCHES = WRITES | {Use.BATCH}
TABLES = WRITES | {Use.ROWS}

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


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _day(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"takes a day such as 2026-11-21, not {value!r}") from None


def _flag(value: str | bool) -> bool:
    if (text := str(value).lower()) not in {"true", "false"}:
        raise ValueError(f"takes true or false, not {value!r}")
    return text == "true"


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
        "a column with JSON as text, or bytes with their `contentType`, sent byte for byte; or a struct, map or array",
    ),
    Option(
        "headersColumn",
        "headers_column",
        WRITES,
        "a column with a map of texts, or a JSON object as text",
        default_is="no headers",
    ),
    Option(
        "availableAtColumn",
        "available_at_column",
        WRITES,
        "a column of timestamps: not sent before; later rows of its key pass it meanwhile",
        default_is="sent at once",
    ),
    Option(
        "sequenceColumn",
        "sequence_column",
        WRITES,
        "a column, unique for a key, for the message ids",
        default_is="by place in the batch",
    ),
    Option(
        "upsertKeys",
        "upsert_keys",
        TABLES,
        "columns with a unique index, with commas: a row that is there with these is updated",
        _names,
        default=(),
        default_is="every row is inserted",
    ),
    Option(
        "onlyChanged",
        "only_changed",
        TABLES,
        "`true`, with `upsertKeys`: a row that does not differ stays, and makes no event",
        _flag,
        default=False,
        default_is="`false`",
    ),
    Option(
        "ifAbsent",
        "if_absent",
        TABLES,
        "`true`, with `upsertKeys`: a row that is there stays, and makes no event",
        _flag,
        default=False,
        default_is="`false`",
    ),
    Option(
        "deleteColumn",
        "delete_column",
        TABLES,
        "a column of booleans, with `upsertKeys`: where it is true, the row is deleted",
        default_is="no row is deleted",
    ),
    Option(
        "deleteEventType",
        "delete_event_type",
        WRITES,
        "the `eventType` of a deleted row, at most 255 bytes; required with `deleteColumn`",
        _short,
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
        "at most 255 bytes; required for bytes, such as `application/avro`",
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
        "txnAppId", "app_id", NAMED, "name of the batch or stream", is_required=True, missing=": it names the batch"
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
        "onRecognised",
        "on_recognised",
        frozenset({Use.WRITE, Use.BATCH}),
        "a batch that is in the ledger already: `skip` it, or `fail`",
        _one_of(SKIP, FAIL),
        default=SKIP,
        not_here="is not for a stream: after a crash Spark repeats its last micro-batch, which must be skipped",
    ),
    Option(
        "badRows",
        "bad_rows",
        TABLES,
        "a row with a value that no table takes: `fail` the batch, or `quarantine` the row",
        _one_of(FAIL, QUARANTINE),
        default=FAIL,
    ),
    Option(
        "badRowsTable",
        "bad_rows_table",
        TABLES,
        "the table of quarantined rows, with its schema; required with `badRows=quarantine`",
    ),
    Option(
        "maxBadRows",
        "max_bad_rows",
        TABLES,
        "more quarantined rows fail the batch, 1 to 10,000",
        _whole(1, 10_000),
        default=100,
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
        "rate",
        "rate",
        BATCHES,
        "events a second: each waits for its turn by `available_at`; later rows of its key pass it meanwhile",
        _whole(1, 1_000_000),
        default_is="all are sent at once",
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
        "num_partitions",
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


def options_of(*uses: Use) -> dict[str, Option]:
    """Return the options that these take, by name; of one that differs between them the first."""
    found: dict[str, Option] = {}
    for use in uses:
        for option in OPTIONS:
            if use in option.uses:
                found.setdefault(option.name, option)
    return found
