"""The options of a write, in the words of Spark's JDBC source and of Delta."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from hashlib import sha256
from typing import NoReturn
from uuid import uuid4

from pyspark.sql.types import StructType

from outbox_spark.errors import OptionError

ROWS_PER_INGEST = 50_000
PENDING_WAIT = 600  # seconds
STAGING_MAX_AGE = 86_400.0  # seconds; longer than any batch may take

# As the relay's settings take it, and a bare number of seconds (tests/test_durations.py compares the two).
DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|d|seconds?|minutes?|hours?|days?)?", re.ASCII)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

REQUIRED = ("url", "dbtable", "aggregateType", "aggregateIdColumn", "eventType")
OPTIONAL = (
    "user",
    "password",
    "payloadColumns",
    "payloadColumn",
    "headersColumn",
    "sequenceColumn",
    "exchange",
    "routingKey",
    "contentType",
    "txnAppId",
    "txnVersion",
    "atomic",
    "singleTask",
    "numPartitions",
    "maxPending",
    "maxPendingWait",
    "batchsize",
    "outboxSchema",
    "stagingSchema",
    "stagingMaxAge",
)
MAX_VERSION = 2**63 - 1
NO_VERSION = -1  # of a stream, whose every micro-batch has one
OF_STREAMS = {"checkpointlocation", "queryname"}  # Spark's own, which it hands on
MAX_PARTITIONS = 2**24 - 1  # three bytes of a message id


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Which batch is written where, and how.

    `app_id` and `version` name the batch in the ledger. Without them each `save()` is a batch of its own,
    which nothing recognises again, as in Delta.
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
        """Tell which option names which column."""
        named = {
            "aggregateIdColumn": self.aggregate_id_column,
            "payloadColumn": self.payload_column,
            "headersColumn": self.headers_column,
            "sequenceColumn": self.sequence_column,
        }
        return {option: column for option, column in named.items() if column is not None}


def read_options(given: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
    """Read the options as Spark hands them over: in lower case, values as text.

    Raises:
        OptionError: with every fault of them at once.
    """
    given = {key.lower(): value for key, value in given.items() if not (is_stream and key.lower() in OF_STREAMS)}
    faults = unknown_options(given, (*REQUIRED, *OPTIONAL))
    faults += [f"option {name} is missing" for name in REQUIRED if not given.get(name.lower())]

    def text(name: str) -> str | None:
        return given.get(name.lower()) or None

    def short(name: str) -> str | None:
        value = text(name)
        if value is not None and len(value.encode()) > 255:
            faults.append(f"option {name} is longer than 255 bytes")
        return value

    def number(name: str, default: int, low: int, high: int) -> int:
        value = text(name)
        if value is None:
            return default
        # isdecimal also takes other scripts' digits, which int() reads as well; nothing is lost.
        if not value.isdecimal() or not low <= int(value) <= high:
            faults.append(f"option {name} takes a whole number from {low} to {high}, not {value!r}")
            return default
        return int(value)

    def seconds(name: str, default: int, low: int, high: int) -> int:
        value = text(name)
        if value is None:
            return default
        if (found := _seconds(value)) is None or not low <= found <= high:
            faults.append(f"option {name} takes whole seconds from {low} to {high}, or as in '2h', not {value!r}")
            return default
        return found

    if not str(text("url") or "postgresql://").startswith(("postgresql://", "postgres://")):
        faults.append("option url takes a libpq URL: postgresql://user@host:5432/database")
    num_partitions = number("numPartitions", 0, 1, MAX_PARTITIONS) or None
    atomic, single_task = (text("atomic") or "batch").lower(), (text("singleTask") or "false").lower()
    faults += _cannot_be_atomic(atomic, single_task, num_partitions)
    if is_stream:
        faults += _cannot_be_of_stream(given, atomic, single_task)
    elif (text("txnAppId") is None) != (text("txnVersion") is None):
        faults.append("options txnAppId and txnVersion name a batch together: give both or neither")
    if text("payloadColumns") and text("payloadColumn"):
        faults.append("options payloadColumns and payloadColumn exclude each other")
    outbox_schema = text("outboxSchema") or "outbox"
    options = WriteOptions(
        url=text("url") or "",
        user=text("user"),
        password=text("password"),
        dbtable=text("dbtable") or "",
        aggregate_type=short("aggregateType") or "",
        aggregate_id_column=text("aggregateIdColumn") or "",
        event_type=short("eventType") or "",
        payload_columns=tuple(name.strip() for name in (text("payloadColumns") or "").split(",") if name.strip()),
        payload_column=text("payloadColumn"),
        headers_column=text("headersColumn"),
        sequence_column=text("sequenceColumn"),
        # '' is a value for these two: the default exchange, and no key.
        exchange=given.get("exchange"),
        routing_key=given.get("routingkey"),
        content_type=short("contentType"),
        app_id=text("txnAppId") or f"save-{uuid4()}",
        version=NO_VERSION if is_stream else number("txnVersion", 0, 0, MAX_VERSION),
        pieces=1 if single_task == "true" else num_partitions if atomic == "partition" else None,
        num_partitions=num_partitions,
        max_pending=number("maxPending", 0, 1, MAX_VERSION) or None,
        max_pending_wait=seconds("maxPendingWait", PENDING_WAIT, 1, 86_400),
        batchsize=number("batchsize", ROWS_PER_INGEST, 1, 10_000_000),
        outbox_schema=outbox_schema,
        staging_schema=text("stagingSchema") or outbox_schema,
        staging_max_age=seconds("stagingMaxAge", int(STAGING_MAX_AGE), 60, 10**9),
    )
    for name, value in (("exchange", options.exchange), ("routingKey", options.routing_key)):
        if value is not None and len(value.encode()) > 255:
            faults.append(f"option {name} is longer than 255 bytes")
    if faults:
        _refuse(faults)
    return options


def _seconds(text: str) -> int | None:
    """Return the whole seconds of a length of time; None when it is none."""
    if not (found := DURATION.fullmatch(text)):
        return None
    number = Decimal(found[1]) * UNITS[(found[2] or "s")[0]]
    return int(number) if number == int(number) else None


def unknown_options(given: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Tell of each option, in lower case, that is none of these, and which one may be meant."""
    known = {name.lower(): name for name in names}
    faults = []
    for name in sorted(given.keys() - known.keys()):
        close = get_close_matches(name, known, n=1)
        remedy = f"; did you mean {known[close[0]]}?" if close else f"; known are {', '.join(known.values())}"
        faults.append(f"option {name!r} is unknown{remedy}")
    return faults


def _cannot_be_atomic(atomic: str, single_task: str, num_partitions: int | None) -> list[str]:
    faults = []
    if atomic not in {"batch", "partition"}:
        faults.append(f"option atomic takes 'batch' or 'partition', not {atomic!r}")
    if single_task not in {"true", "false"}:
        faults.append(f"option singleTask takes true or false, not {single_task!r}")
    if single_task == "true":
        if num_partitions not in {None, 1}:
            faults.append(f"option singleTask takes a DataFrame of one partition; numPartitions says {num_partitions}")
    elif atomic == "partition" and num_partitions is None:
        faults.append(
            "option atomic=partition takes numPartitions, the number of the DataFrame's partitions: "
            "frame.repartition(n, ...) gives it that many, and a rerun has to have as many"
        )
    return faults


def _cannot_be_of_stream(given: Mapping[str, str], atomic: str, single_task: str) -> list[str]:
    faults = []
    if not given.get("txnappid"):
        faults.append("option txnAppId is missing: it names the stream, for as long as its checkpoint lasts")
    if given.get("txnversion"):
        faults.append("option txnVersion is the micro-batch's own number in a stream, and cannot be given")
    if atomic != "batch" or single_task != "false":
        faults.append("a stream takes only atomic=batch; inside foreachBatch all is possible")
    return faults


def _refuse(faults: list[str]) -> NoReturn:
    raise OptionError("; ".join(faults))
