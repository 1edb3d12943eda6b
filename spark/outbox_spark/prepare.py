"""What the driver does before any task runs: read options, tables, columns and ledger, and refuse what cannot be.

It makes the staging tables, too: one for each task attempt that brings rows, filled in one transaction.

A name is `staging_<made at, seconds>_<hash of the batch>_<token of the save>_<attempt id>`. So the commit takes exactly
the tables that the winning attempts told it, whatever else lies around. A batch that is committed leaves nothing of its
earlier, killed attempts. What no rerun ever cleans goes by age.

The same name without an attempt is the pattern of a `save()`, an empty table that its attempts copy. Spark does not
wait for the tasks that it kills: dropping the pattern first waits for those that load, and the rest find it gone.
So do the tasks of a slower driver at the same batch, whose commit then finds the batch in the ledger.
A stream has no pattern, as nothing there could drop it: its next commit drops what its killed attempts leave.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from uuid import UUID, uuid4

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal
from pyspark.sql.types import StructType

from outbox_spark.asked import BatchOptions, WriteOptions, write_options
from outbox_spark.connection import connect, conninfo
from outbox_spark.errors import OptionError, OutboxWriteError, one_line
from outbox_spark.ledger import Batch, begin_pieces, count_repeat, read, refuse_begun_in_pieces
from outbox_spark.plan import DELETE_FLAG, Pieces, Plan, Room, Save, Staging, of_outbox
from outbox_spark.result import Result, refuse_recognised, say
from outbox_spark.tables import (
    describe,
    plan_write,
    require_noting,
    require_outbox,
    require_quarantine,
    require_staging,
)

# COPY tells how many rows it was sent, not how many a trigger let pass.
COUNT_INSERTED = SQL("""
    SELECT coalesce(sum(pg_stat_get_xact_tuples_inserted(part)), 0)::bigint
    FROM (SELECT {table}::regclass::oid UNION SELECT relid FROM pg_partition_tree({table}::regclass)) AS every (part)
""")

COUNT_PENDING = SQL(
    "SELECT count(*) FROM (SELECT FROM {schema}.message_state WHERE state = 'pending' LIMIT {limit}) AS pending"
)

log = logging.getLogger("outbox_spark")

STAGING_NAME = re.compile(r"^staging_(?P<made_at>[0-9]{10})_(?P<batch>[0-9a-f]{12})_(?P<token>[0-9a-f]{10})(_[0-9]+)?$")

# Longer than Spark takes to kill the Python worker of a task (spark.python.task.killTimeout, 2 s).
KILLED_WITHIN = "10s"

LIST_STAGING = SQL(r"""
    SELECT class.relname::text FROM pg_class AS class
    WHERE class.relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND class.relkind = 'r'
        AND class.relname LIKE 'staging\_%%' AND pg_has_role(class.relowner, 'MEMBER')
""")


def prepare(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> tuple[Save, Batch | None]:
    """Return what executors and commit need, and the committed batch of that name when there is one.

    Raises:
        OptionError, TableError, ColumnError: with every fault that was found, by name.
        BatchError: it was begun in pieces, or in others; or it is committed, where that is a fault.
    """
    options = write_options(given)
    token = uuid4()
    with _prepared(options, schema, overwrite=overwrite) as (connection, now, plan):
        staging = name_staging(options.staging_schema, now=now, batch_hash=options.batch_hash, token=token)
        recognised, pieces = _begin(
            connection, options, plan, staging=staging, token=token, made_by=options.made_by(schema)
        )
        if recognised is not None:
            recognise(connection, options, recognised)
    return Save(token, _info(options), options, plan, staging, pieces, room_of(options)), recognised


def prepare_stream(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Save:
    """Return what the executors and commits of a stream need, but for the version that each micro-batch has.

    Raises:
        OptionError, TableError, ColumnError: with every fault that was found, by name.
    """
    options = write_options(given, is_stream=True)
    token = uuid4()
    with _prepared(options, schema, overwrite=overwrite) as (_, now, plan):
        staging = name_staging(options.staging_schema, now=now, batch_hash=options.batch_hash, token=token, plan=plan)
    return Save(token, _info(options), options, plan, staging, room=room_of(options))


def recognise(connection: psycopg.Connection, options: BatchOptions, found: Batch) -> None:
    """Count that a committed batch came again, and say so.

    Raises:
        BatchError: the options say that this is a fault.
    """
    count_repeat(connection, options.outbox_schema, app_id=options.app_id, version=options.version)
    result = Result.recognised(found)
    refuse_recognised(result, options.on_recognised)
    say(result)


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
        if plan.passes_over:
            require_noting(connection, options)
        plan = replace(plan, quarantine=require_quarantine(connection, options.rows, columns=len(schema)))
        clean_before(connection, options, now)
        yield connection, now, plan


def clean_before(connection: psycopg.Connection, options: BatchOptions, now: datetime) -> None:
    """Drop the staging tables that are too old to be anybody's."""
    for name in drop_aged(connection, options.staging_schema, now=now, max_age=options.staging_max_age):
        log.warning("outbox: dropped %s.%s, which a dead batch had left", options.staging_schema, name)


def _info(options: WriteOptions) -> str:
    return conninfo(options.url, options.user, options.password)


def _begin(
    connection: psycopg.Connection, options: WriteOptions, plan: Plan, *, staging: Staging, token: UUID, made_by: str
) -> tuple[Batch | None, Pieces | None]:
    schema, app_id, version, number = options.outbox_schema, options.app_id, options.version, options.pieces
    recognised, pieces = None, None
    if number is None:
        recognised = read(connection, schema, app_id, version)
        if recognised is None:
            refuse_begun_in_pieces(connection, schema, app_id, version)
    else:
        table = ".".join(plan.table or ())
        begun = begin_pieces(
            connection, schema, app_id=app_id, version=version, number=number, token=token, table=table
        )
        if isinstance(begun, Batch):
            recognised = begun
        else:
            # Of one piece all is written or nothing: a rerun has nothing to compare with.
            pieces = _pieces(options, plan, number, made_by, directly=begun.token == token or number == 1)
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
    """Return what executors and commit ask before they write, when the number of pending rows is bounded."""
    if options.max_pending is None:
        return None
    count = COUNT_PENDING.format(schema=Identifier(options.outbox_schema), limit=options.max_pending + 1)
    return Room(options.max_pending, options.max_pending_wait, count.as_string())


def clean_after(save: Save) -> None:
    """Drop what other attempts at the committed batch have staged. A failure is logged: the batch is written."""
    try:
        with connect(save.info) as connection:
            drop_attempts(connection, save.staging, lock_timeout="500ms")
            drop_leftovers(connection, save.staging.schema, batch_hash=save.options.batch_hash)
    except (OutboxWriteError, psycopg.Error) as error:
        log.warning("outbox: staging tables of the committed batch are left to go by age: %s", one_line(error))


def name_staging(schema: str, *, now: datetime, batch_hash: str, token: UUID, plan: Plan | None = None) -> Staging:
    """Return the names of one `save()`.

    Args:
        plan: of a stream, whose tables follow no pattern.
    """
    quoted_schema = Identifier(schema).as_string()
    prefix = f"staging_{int(now.timestamp()):010d}_{batch_hash}_{token.hex[:10]}"
    columns = f"LIKE {quoted_schema}.{prefix} INCLUDING CONSTRAINTS" if plan is None else _columns(plan).as_string()
    return Staging(schema, quoted_schema, prefix, columns)


def make_pattern(connection: psycopg.Connection, staging: Staging, plan: Plan) -> None:
    """Make the table that the attempts copy."""
    pattern = Identifier(staging.schema, staging.prefix)
    connection.execute(SQL("CREATE UNLOGGED TABLE {} ({})").format(pattern, _columns(plan)))


def _columns(plan: Plan) -> Composed:
    # The types are as format_type() wrote them, hence SQL that needs no quoting.
    columns: list[Composable] = [
        SQL("{} {}").format(Identifier(column.name), SQL(column.type)) for column in plan.columns
    ]
    columns += [SQL(column.check) for column in plan.columns if column.check is not None]
    if plan.upsert is not None and plan.upsert.delete is not None:
        columns.append(SQL("{} boolean NOT NULL").format(Identifier(DELETE_FLAG)))
    if plan.event is not None:
        types = {
            "message_id": "uuid NOT NULL",
            "payload": "json NOT NULL",
            "payload_bytes": "bytea NOT NULL",
            "headers": "jsonb",
            "available_at": "timestamptz",
        }
        columns += [
            SQL("{} {}").format(Identifier(of_outbox(name)), SQL(types.get(name, "text")))
            for name in plan.event.columns
        ]
    return SQL(", ").join(columns)


def drop_leftovers(connection: psycopg.Connection, schema: str, *, batch_hash: str) -> list[str]:
    """Drop every staging table of a committed batch; return their names."""
    return _drop(connection, schema, lambda name: name["batch"] == batch_hash)


def drop_attempts(connection: psycopg.Connection, staging: Staging, *, lock_timeout: str) -> list[str]:
    """Drop the staging tables of one `save()`; return their names.

    Args:
        lock_timeout: how long to wait for attempts that still load; those that take longer go by age.
    """
    _drop_table(connection, staging.schema, staging.prefix, lock_timeout=lock_timeout)
    return _drop(connection, staging.schema, lambda name: name[0].startswith(staging.prefix))


def drop_tables(connection: psycopg.Connection, schema: str, tables: Iterable[str]) -> None:
    """Drop these staging tables, but leave those that another session locks: they go by age."""
    for table in tables:
        _drop_table(connection, schema, table, lock_timeout="500ms")


def drop_aged(connection: psycopg.Connection, schema: str, *, now: datetime, max_age: float) -> list[str]:
    """Drop the staging tables made longer ago than `max_age` seconds, of any batch; return their names."""
    return _drop(connection, schema, lambda name: int(name["made_at"]) < now.timestamp() - max_age)


def _drop(connection: psycopg.Connection, schema: str, is_dead: Callable[[re.Match[str]], bool]) -> list[str]:
    dropped = []
    for (relation,) in connection.execute(LIST_STAGING, {"schema": schema}).fetchall():
        name = STAGING_NAME.match(relation)
        if name is None or not is_dead(name):
            continue
        if _drop_table(connection, schema, relation, lock_timeout="500ms"):
            dropped.append(relation)
    return dropped


def _drop_table(connection: psycopg.Connection, schema: str, table: str, *, lock_timeout: str) -> bool:
    """Drop a table if it is there; False when another session locks it for longer than `lock_timeout`."""
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [lock_timeout])
            connection.execute(SQL("DROP TABLE IF EXISTS {}").format(Identifier(schema, table)))
    except psycopg.errors.LockNotAvailable:
        return False
    return True
