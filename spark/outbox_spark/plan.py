"""What the driver decides and the executors are told: plain data, for it is pickled, and without psycopg."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from outbox_spark.asked import BatchOptions

DELETE_FLAG = "outbox delete"  # the staging table's column that says which rows are deleted
MadeEvent = Mapping[str, Any]
MakeEvents = Callable[[dict[str, Any]], MadeEvent | Iterable[MadeEvent] | None]


def of_outbox(column: str) -> str:
    """Name the staging table's column for a column of outbox.message; the rest are the business table's own."""
    return f"outbox {column}"  # the blank keeps it apart from any column that a table is likely to have


@dataclass(frozen=True, slots=True)
class BusinessColumn:
    """A column of the business table that the DataFrame fills."""

    name: str
    index: int  # in the DataFrame
    type: str  # that it is staged as, in SQL: numeric(12,2)
    kind: str  # the name of that type alone: numeric
    not_null: bool
    max_characters: int | None
    max_digits: int | None  # of a timestamp, after the point of its seconds
    cast: str | None = None  # what the driver's INSERT makes of the staged text, in SQL: inet
    check: str | None = None  # a constraint of the staging table: PostgreSQL reads the text, and keeps all of it


@dataclass(frozen=True, slots=True)
class Maker:
    """The Python function that makes events of a row."""

    function: MakeEvents  # gets the row as a dict
    fields: tuple[str, ...]  # of an event, as text; the plan's places are places in these


@dataclass(frozen=True, slots=True)
class Upsert:
    """How rows of the table that are there already are found, and what becomes of them."""

    keys: tuple[str, ...]
    only_changed: bool = False  # a row that does not differ stays
    if_absent: bool = False  # every row that is there stays
    delete: int | None = None  # the place of the column that says which rows are deleted

    @property
    def may_pass_over(self) -> bool:
        """Whether rows may be staged that change nothing in the table: these make no events."""
        return self.only_changed or self.if_absent or self.delete is not None


@dataclass(frozen=True, slots=True)
class DeleteEvents:
    """How the event of a deleted row differs: by its type, and by its payload where that is not a column."""

    place: int  # of the column that says which rows are deleted
    event_type: str
    other_event_type: str  # of a row that is written
    payload: tuple[int, ...]  # the columns of the object


@dataclass(frozen=True, slots=True)
class EventPlan:
    """How a DataFrame's rows become events. The numbers are places in the DataFrame, or in what `maker` makes of it."""

    texts: dict[str, int]  # columns of outbox.message that differ from row to row
    same: dict[str, str]  # those that are the same in all of them
    payload: tuple[int, ...]  # the columns of the object, or the one that is the payload
    payload_is_whole: bool
    headers: int | None = None
    available_at: int | None = None
    message_id: int | None = None
    sequence: int | None = None  # what the message id is made of
    sequence_is_unique: bool = True  # the business table's own index sees to it
    number: int = 0  # of several DataFrames of events in one batch
    id_tells_batch: bool = True  # False: the same event in another batch has the same id
    maker: Maker | None = None
    deletes: DeleteEvents | None = None
    payload_is_bytes: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of outbox.message that the executors make."""
        event_type = () if self.deletes is None else ("event_type",)
        headers = () if self.headers is None else ("headers",)
        available_at = () if self.available_at is None else ("available_at",)
        return ("message_id", *self.texts, *event_type, self.payload_column, *headers, *available_at)

    @property
    def payload_column(self) -> str:
        return "payload_bytes" if self.payload_is_bytes else "payload"

    @property
    def may_repeat_ids(self) -> bool:
        return self.message_id is not None or not self.sequence_is_unique

    def after(self, columns: int) -> "EventPlan":
        """Return the plan for a DataFrame that has so many more columns in front."""
        return replace(
            self,
            texts={name: place + columns for name, place in self.texts.items()},
            payload=tuple(place + columns for place in self.payload),
            headers=None if self.headers is None else self.headers + columns,
            available_at=None if self.available_at is None else self.available_at + columns,
            message_id=None if self.message_id is None else self.message_id + columns,
            sequence=None if self.sequence is None else self.sequence + columns,
        )


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Where rows go that no table takes, and how many of a DataFrame may go there."""

    table: tuple[str, str]
    most: int
    columns: int  # of the DataFrame; those behind were added for its events


@dataclass(frozen=True, slots=True)
class Plan:
    """How a DataFrame's rows become staging rows."""

    table: tuple[str, str] | None = None  # schema and name of the business table
    columns: tuple[BusinessColumn, ...] = ()
    upsert: Upsert | None = None  # None: every row is inserted
    event: EventPlan | None = None
    quarantine: Quarantine | None = None  # None: a bad row fails the batch

    @property
    def passes_over(self) -> bool:
        """Whether rows may be staged that change nothing."""
        return self.upsert is not None and self.upsert.may_pass_over

    def __str__(self) -> str:
        return " and ".join([*([".".join(self.table)] if self.table else []), *(["the outbox"] if self.event else [])])


@dataclass(frozen=True, slots=True)
class Staging:
    """Where the attempts of one `save()` stage their rows."""

    schema: str
    quoted_schema: str
    prefix: str  # of all its tables, and the name of their pattern: small letters, digits and underscores
    columns: str  # of a table: their definitions, or LIKE the pattern

    def table_of(self, attempt: int) -> str:
        return f"{self.prefix}_{attempt}"

    def create(self, attempt: int) -> str:
        """Return the statement that makes an attempt's table; where there is a pattern, it fails when that is gone.

        Unlogged: after a crash of the database it is empty, which the commit notices by its count.
        """
        table = f"{self.quoted_schema}.{self.table_of(attempt)}"
        return f"CREATE UNLOGGED TABLE {table} ({self.columns}) WITH (autovacuum_enabled = false)"


def made_at(table: str) -> int:
    """Return when the `save()` of a staging table began, by the database's clock, in seconds since 1970."""
    return int(table.split("_")[1])


@dataclass(frozen=True, slots=True)
class Pieces:
    """A batch whose partitions are separate transactions, and what their tasks say to the ledger."""

    number: int
    directly: bool  # by the tasks; else they stage what is missing, and the driver writes it when all is compared
    made_by: str  # the options and types that decide what a row of the DataFrame becomes
    quoted_ledger: str
    quoted_batch: str  # its app_id and version
    count_inserted: str  # tells how many rows the transaction has put into the business table

    def enter(self, partition: int, token: UUID) -> str:
        """Return the statement that returns a row if the piece was not in yet; it waits for a twin that is at it."""
        return (
            f"INSERT INTO {self.quoted_ledger} (app_id, version, partition, partitions, token, row_counts) "
            f"VALUES ({self.quoted_batch}, {partition}, {self.number}, '{token}', '{{}}') "
            "ON CONFLICT (app_id, version, partition) DO NOTHING RETURNING partition"
        )

    def note_rows(self, staged: "Staged") -> str:
        return (
            f"UPDATE {self.quoted_ledger} SET row_counts = '{json.dumps(staged.row_counts)}' "
            f"{self._where(staged.partition)}"
        )

    def find(self, partition: int) -> str:
        return f"SELECT partition FROM {self.quoted_ledger} {self._where(partition)}"

    def _where(self, partition: int) -> str:
        return f"WHERE (app_id, version, partition) = ({self.quoted_batch}, {partition})"


@dataclass(frozen=True, slots=True)
class Room:
    """How many rows may be pending for more to be written."""

    most: int
    wait: int  # seconds
    count: str  # the statement that tells how many are, one more than `most` at most


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that no table takes."""

    position: int  # in its partition, from 0
    reason: str
    row_json: str


@dataclass(frozen=True, slots=True)
class Save:
    """One `save()`."""

    token: UUID
    info: str  # libpq's connection string; it may hold the password
    options: BatchOptions
    plan: Plan
    staging: Staging
    pieces: Pieces | None = None  # None: all partitions in one transaction, by staging tables
    room: Room | None = None  # None: any number
    query: str | None = None  # of a stream: the id of its query, which its checkpoint keeps

    def of_micro_batch(self, version: int, query: str | None) -> "Save":
        """Return the write of one micro-batch of a stream."""
        return replace(self, options=replace(self.options, version=version), query=query)


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task attempt has staged, or written."""

    partition: int
    table: str | None  # None: no rows, or they are where they belong
    rows: int
    checksum: str | None = None  # of a piece
    is_left_out: bool = (
        False  # the staging tables of its save() were dropped meanwhile: has another driver been faster?
    )

    refused: str | None = None  # a value that no table takes; every attempt would find it again
    bad: tuple[BadRow, ...] = ()  # rows that are taken out

    @classmethod
    def of_json(cls, text: str) -> "Staged":
        """Return what `json.dumps(asdict(...))` was made of."""
        values = json.loads(text)
        return cls(**{**values, "bad": tuple(BadRow(**bad) for bad in values["bad"])})

    @property
    def row_counts(self) -> dict[str, int | str | None]:
        """What the ledger notes of a piece."""
        return {"rows": self.rows, "checksum": self.checksum}
