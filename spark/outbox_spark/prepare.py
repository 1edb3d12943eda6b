"""What the driver does before any task runs: read options, tables, columns and ledger, and refuse what cannot be."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from uuid import UUID, uuid4

import psycopg
from psycopg.sql import SQL, Identifier, Literal
from pyspark.sql.types import StructType

from outbox_spark.errors import OptionError, OutboxWriteError, one_line
from outbox_spark.fit import plan_write
from outbox_spark.ledger import Batch, begin_pieces, read, refuse_begun_in_pieces
from outbox_spark.options import BatchOptions, WriteOptions, read_options
from outbox_spark.plan import Pieces, Plan, Room, Save, Staging
from outbox_spark.session import connect, conninfo
from outbox_spark.staging import drop_aged, drop_attempts, drop_leftovers, make_pattern, name_staging
from outbox_spark.tables import describe, require_outbox, require_staging

# COPY tells how many rows it was sent, not how many a trigger let pass.
COUNT_INSERTED = SQL("""
    SELECT coalesce(sum(pg_stat_get_xact_tuples_inserted(part)), 0)::bigint
    FROM (SELECT {table}::regclass::oid UNION SELECT relid FROM pg_partition_tree({table}::regclass)) AS every (part)
""")

COUNT_PENDING = SQL(
    "SELECT count(*) FROM (SELECT FROM {schema}.message_state WHERE state = 'pending' LIMIT {limit}) AS pending"
)

log = logging.getLogger("outbox_spark")


def prepare(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> tuple[Save, Batch | None]:
    """Give what executors and commit need, and the committed batch of that name when there is one.

    Raises:
        OptionError, TableError, ColumnError: with every fault that was found, by name.
        BatchError: it was begun in pieces, or in others.
    """
    options = read_options(given)
    token = uuid4()
    with _prepared(options, schema, overwrite=overwrite) as (connection, now, plan):
        staging = name_staging(options.staging_schema, now=now, batch_hash=options.batch_hash, token=token)
        recognised, pieces = _begin(connection, options, plan, staging, token, made_by=options.made_by(schema))
    return Save(token, _info(options), options, plan, staging, pieces, room_of(options)), recognised


def prepare_stream(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Save:
    """Give what the executors and commits of a stream need, but for the version that each micro-batch has.

    Raises:
        OptionError, TableError, ColumnError: with every fault that was found, by name.
    """
    options = read_options(given, is_stream=True)
    token = uuid4()
    with _prepared(options, schema, overwrite=overwrite) as (_, now, plan):
        staging = name_staging(options.staging_schema, now=now, batch_hash=options.batch_hash, token=token, plan=plan)
    return Save(token, _info(options), options, plan, staging, room=room_of(options))


@contextmanager
def _prepared(
    options: WriteOptions, schema: StructType, *, overwrite: bool
) -> Iterator[tuple[psycopg.Connection, datetime, Plan]]:
    """Check what is written into what."""
    if overwrite:
        raise OptionError("mode overwrite is refused: an outbox only takes events in; use mode('append')")
    with connect(_info(options)) as connection:
        now = require_outbox(connection, options)
        plan = plan_write(schema, describe(connection, options.dbtable), options)
        clean_before(connection, options, now)
        yield connection, now, plan


def clean_before(connection: psycopg.Connection, options: BatchOptions, now: datetime) -> None:
    """Drop the staging tables that are too old to be anybody's."""
    for name in drop_aged(connection, options.staging_schema, now=now, max_age=options.staging_max_age):
        log.warning("outbox: dropped %s.%s, which a dead batch had left", options.staging_schema, name)


def _info(options: WriteOptions) -> str:
    return conninfo(options.url, options.user, options.password)


def _begin(
    connection: psycopg.Connection, options: WriteOptions, plan: Plan, staging: Staging, token: UUID, *, made_by: str
) -> tuple[Batch | None, Pieces | None]:
    schema, app_id, version, number = options.outbox_schema, options.app_id, options.version, options.pieces
    recognised, pieces = None, None
    if number is None:
        recognised = read(connection, schema, app_id, version)
        if recognised is None:
            refuse_begun_in_pieces(connection, schema, app_id, version)
    else:
        begun = begin_pieces(connection, schema, app_id=app_id, version=version, number=number, token=token)
        if isinstance(begun, Batch):
            recognised = begun
        else:
            # Of one piece all is written or nothing: a rerun has none to compare with.
            pieces = _pieces(options, plan, number, made_by, directly=begun == token or number == 1)
    if recognised is None and not (pieces and pieces.directly):
        require_staging(connection, options)
        make_pattern(connection, staging, plan)
    return recognised, pieces


def _pieces(options: WriteOptions, plan: Plan, number: int, made_by: str, *, directly: bool) -> Pieces:
    assert plan.table is not None, "a save() has a table"  # noqa: S101
    return Pieces(
        number,
        directly,
        made_by,
        quoted_ledger=Identifier(options.outbox_schema, "batch").as_string(),
        quoted_batch=SQL("{}, {}").format(Literal(options.app_id), Literal(options.version)).as_string(),
        count_inserted=COUNT_INSERTED.format(table=Literal(Identifier(*plan.table).as_string())).as_string(),
    )


def room_of(options: BatchOptions) -> Room | None:
    """Give what executors and commit ask before they write, when the number of pending rows is bounded."""
    if options.max_pending is None:
        return None
    count = COUNT_PENDING.format(schema=Identifier(options.outbox_schema), limit=options.max_pending + 1)
    return Room(options.max_pending, options.max_pending_wait, count.as_string())


def say_recognised(batch: Batch) -> None:
    """Warn, in the driver's log, that a batch is not written again."""
    log.warning("outbox: %s is in the ledger already: nothing is written", batch)


def clean_after(save: Save) -> None:
    """Drop what other attempts at the committed batch have staged. A failure is logged: the batch is written."""
    try:
        with connect(save.info) as connection:
            drop_attempts(connection, save.staging, patience="500ms")
            drop_leftovers(connection, save.staging.schema, batch_hash=save.options.batch_hash)
    except (OutboxWriteError, psycopg.Error) as error:
        log.warning("outbox: staging tables of the committed batch are left to go by age: %s", one_line(error))
