"""Write archived rows into the outbox again, as pending rows that the relay sends with all it promises.

stage ──> audit ──> new rows ──> commit      one transaction: all of the replay is there, or nothing

Message ids and the times of writing stay what they were: by both an inbox knows what it has applied. Two headers are
added, those of `relay replay`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import reduce
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_spark.archiving.archive import columns, read_noted
from outbox_spark.archiving.ledger import archived_days, closed_days, hold_day
from outbox_spark.errors import ReadError

CARRIED = (
    "id",
    "message_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "exchange",
    "routing_key",
    "headers",
    "content_type",
    "payload",
    "payload_bytes",
    "created_at",
    "trace_context",
)

STAGE = SQL("""
    CREATE TEMPORARY TABLE replayed (
        id bigint, message_id uuid, aggregate_type text, aggregate_id text, event_type text, exchange text,
        routing_key text, headers jsonb, content_type text, payload json, payload_bytes bytea, created_at bigint,
        trace_context jsonb
    ) ON COMMIT DROP
""")
COPY_STAGED = SQL("COPY replayed FROM STDIN")

# `done`, for the relay has nothing to do but to send pending rows: `relay jobs resume` is not for this one.
AUDIT = SQL("""
    INSERT INTO {schema}.job (kind, source, made_by, filter, to_exchange, routing_key, state, selected, done)
    VALUES ('replay', 'sent', %(made_by)s, %(filter)s, %(to_exchange)s, %(routing_key)s, 'done', %(rows)s, %(rows)s)
    RETURNING id
""")

# Staged before, so that the ids are taken late and in one go: the relay waits for those that are not yet visible.
# In the order of the old ids, which is that of the keys.
WRITE = SQL("""
    INSERT INTO {schema}.message (message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers,
        content_type, payload, payload_bytes, created_at, available_at, writer, trace_context)
    SELECT message_id, aggregate_type, aggregate_id, event_type, coalesce({to_exchange}, exchange),
        coalesce({routing_key}, routing_key), coalesce(headers, '{{}}') || {replay_headers}, content_type, payload,
        payload_bytes, timestamptz 'epoch' + created_at * interval '1 microsecond',
        now() + make_interval(secs => row_number() OVER (ORDER BY id) / {rate}::float8), {writer}, trace_context
    FROM replayed
    ORDER BY id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows, where to, and how fast; None: any, where they went at first, as fast as the relay sends."""

    days: Sequence[date]
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    to_exchange: str | None = None
    routing_key: str | None = None
    rate: float | None = None  # rows a second

    def as_json(self) -> dict[str, Any]:
        """Return the filter in the words of `relay replay`."""
        given = {name: getattr(self, name) for name in ("aggregate_type", "aggregate_id", "event_type")}
        midnights = [datetime.combine(day, time(), UTC) for day in (min(self.days), max(self.days))]
        return {
            **{name: value for name, value in given.items() if value is not None},
            "since": midnights[0].isoformat(),
            "until": (midnights[1] + timedelta(days=1)).isoformat(),
            "days": [str(day) for day in self.days],
        }


def rows_of(
    spark: SparkSession, connection: psycopg.Connection, wanted: Wanted, *, url: str, outbox_schema: str
) -> DataFrame:
    """Return the rows: of an archived day from the archive, of another one from the table.

    Spark reads them later, so retention keeps the days of the table until the session of the connection ends.

    Raises:
        ReadError: a day is in neither, or its archive has lost rows.
    """
    archived = archived_days(connection, outbox_schema)
    for day in wanted.days:
        if day not in archived:
            hold_day(connection, outbox_schema, day)
    kept = closed_days(connection, outbox_schema)
    if missing := [str(day) for day in wanted.days if day not in archived and day not in kept]:
        raise ReadError(f"{', '.join(missing)}: neither archived nor kept by the table, or not over yet")

    def of_table(day: date) -> DataFrame:
        options = {"url": url, "outboxSchema": outbox_schema, "startingDay": str(day), "endingDay": str(day)}
        return spark.read.format("outbox").options(**options).load(schema=columns())

    days = [read_noted(spark, archived[day]) if day in archived else of_table(day) for day in wanted.days]
    rows = reduce(DataFrame.unionByName, days)
    for name in ("aggregate_type", "aggregate_id", "event_type"):
        if (value := getattr(wanted, name)) is not None:
            rows = rows.where(rows[name] == value)
    return rows


def write_again(
    connection: psycopg.Connection, rows: DataFrame, wanted: Wanted, *, made_by: str, outbox_schema: str
) -> tuple[int, int]:
    """Write the rows as pending ones; give the number of the replay, and of the rows."""
    # Microseconds: Spark gives the driver a time without its zone.
    staged = rows.withColumn("created_at", f.unix_micros("created_at")).select(*CARRIED)
    with connection.transaction():
        connection.execute(STAGE)
        count = 0
        with connection.cursor() as cursor, cursor.copy(COPY_STAGED) as copy:
            for row in staged.toLocalIterator(prefetchPartitions=True):
                copy.write_row(row)
                count += 1
        values = {
            "made_by": made_by,
            "filter": Jsonb(wanted.as_json()),
            "to_exchange": wanted.to_exchange,
            "routing_key": wanted.routing_key,
            "rows": count,
        }
        ((replay,),) = connection.execute(AUDIT.format(schema=Identifier(outbox_schema)), values).fetchall()
        headers = {"x-replay-id": replay, "x-replayed-at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        connection.execute(
            WRITE.format(
                schema=Identifier(outbox_schema),
                to_exchange=SQL("{}::text").format(Literal(wanted.to_exchange)),
                routing_key=SQL("{}::text").format(Literal(wanted.routing_key)),
                replay_headers=Literal(Jsonb(headers)),
                rate=Literal(wanted.rate),
                writer=Literal(f"replay {replay}"),
            )
        )
    return replay, count
