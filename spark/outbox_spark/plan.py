"""What the driver decides and the executors are told: plain data, for it is pickled, and without psycopg."""

from dataclasses import dataclass
from uuid import UUID

from outbox_spark.options import WriteOptions

# The staging table's columns for the event; the rest are the business table's own.
MESSAGE_ID = "outbox message_id"  # a blank keeps them apart from any column that a table is likely to have
AGGREGATE_ID = "outbox aggregate_id"
PAYLOAD = "outbox payload"
HEADERS = "outbox headers"


@dataclass(frozen=True, slots=True)
class BusinessColumn:
    """A column of the business table that the DataFrame fills."""

    name: str
    index: int  # in the DataFrame
    type: str  # as SQL writes it: numeric(12,2)
    kind: str  # the name of the type alone: numeric
    not_null: bool
    max_characters: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a DataFrame's rows become staging rows."""

    table: tuple[str, str]  # schema and name of the business table
    columns: tuple[BusinessColumn, ...]
    aggregate_id: int  # these are indices in the DataFrame
    sequence: int | None
    sequence_is_unique: bool  # the business table's own index sees to it
    payload: tuple[int, ...]  # the columns of the object, or the one column that is ready JSON
    payload_is_ready: bool
    headers: int | None


@dataclass(frozen=True, slots=True)
class Staging:
    """Where the attempts of one `save()` stage their rows."""

    schema: str
    quoted_schema: str
    prefix: str  # of all its tables, and the name of their pattern: small letters, digits and underscores

    def table_of(self, attempt: int) -> str:
        return f"{self.prefix}_{attempt}"

    def create(self, attempt: int) -> str:
        """Give the statement that makes an attempt's table; it fails when the pattern is gone.

        Unlogged: after a crash of the database it is empty, which the commit notices by its count.
        """
        table, pattern = (f"{self.quoted_schema}.{name}" for name in (self.table_of(attempt), self.prefix))
        return f"CREATE UNLOGGED TABLE {table} (LIKE {pattern}) WITH (autovacuum_enabled = false)"


@dataclass(frozen=True, slots=True)
class Save:
    """One `save()`."""

    token: UUID
    info: str  # libpq's connection string; it may hold the password
    options: WriteOptions
    plan: Plan
    staging: Staging


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task attempt has staged."""

    partition: int
    table: str | None  # None: no rows
    rows: int
