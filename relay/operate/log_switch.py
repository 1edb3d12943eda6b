"""Send new rows to the log, or back to the pending rows: the default of one column."""

from collections.abc import Callable
from functools import partial

import psycopg
import sqlalchemy as sa
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.compatibility import release_number
from relay.config.settings import DatabaseSettings
from relay.errors import BusyError
from relay.operate.health import NODE_STALE_AFTER
from relay.operate.lock_wait import LockLimits, LockWait
from relay.operate.migrate import refusals_named, sqlalchemy_engine
from relay.retention.segments import AHEAD, ENSURE, IDS

READS_LOG = "0.1.0"  # the first release whose relays, publishers and Spark jobs read the log

IS_ON = SQL("""
    SELECT coalesce(pg_get_expr(adbin, adrelid) LIKE '%written%', false)
    FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE attrelid = {table}::regclass AND attname = 'state'
""")
# A relay that reads the log says so in the name of its session. One that was stopped a moment ago has no session.
READ_NODES = SQL("""
    SELECT name, version, EXISTS (
        SELECT FROM pg_stat_activity
        WHERE pid = backend_pid AND datname = current_database() AND backend_start <= heartbeat_at
            AND application_name <> 'outbox-relay/log'
    ) FROM {schema}.node
    WHERE heartbeat_at > clock_timestamp() - {stale_after} * interval '1 second'
    ORDER BY name
""")
# Clients of earlier releases ask the table for its pending rows. Those that read the log say so in their name.
OLD_CLIENTS = """
    SELECT DISTINCT application_name FROM pg_stat_activity
    WHERE datname = current_database() AND application_name ~ '^outbox-(publisher|spark)( |$)'
    ORDER BY 1
"""
# Of the table alone: partitions have their own defaults, which nobody uses.
SET_DEFAULT = SQL("ALTER TABLE ONLY {schema}.message ALTER COLUMN state SET DEFAULT {state}")


def is_on(connection: psycopg.Connection, schema: str) -> bool:
    """Return whether new rows go to the log."""
    row = connection.execute(IS_ON.format(table=Literal(f"{schema}.message"))).fetchone()
    return row is not None and bool(row[0])


def switch_log(
    database: DatabaseSettings,
    *,
    on: bool,
    limits: LockLimits | None = None,
    tell: Callable[[str], object] = lambda _: None,
    ahead: int = AHEAD,
    ids: int = IDS,
) -> None:
    """Send new rows to the log, or to the pending rows.

    Writers wait for a moment, once. A row of the one place goes out before later rows of its key in the other.

    Raises:
        BusyError: a relay or a client that cannot read the log is at work, or a session kept a lock for too long.
        DatabaseUnavailableError, SchemaError: as `migrate`.
    """
    schema = Identifier(database.schema_name)
    with (
        refusals_named(),
        sqlalchemy_engine(database).connect() as connection,
        LockWait(database, connection, limits or LockLimits(), tell) as waiting,
    ):
        if on:
            _refuse_old(connection, schema)
            make = partial(_step, connection, ENSURE.format(schema=schema, ahead=Literal(ahead), ids=Literal(ids)))
            waiting.run(lambda: _exhaust(make), "making segments", rest=0.5)
        waiting.run(partial(_set_default, connection, schema, on=on), "the switch")


def _set_default(connection: sa.Connection, schema: Identifier, *, on: bool) -> None:
    _step(connection, SET_DEFAULT.format(schema=schema, state=Literal("written" if on else "pending")), commit=False)
    if on:
        _refuse_old(connection, schema)  # one may have come meanwhile; from now on its writes wait
    connection.commit()


def _exhaust(step: Callable[[], object]) -> None:
    while step() is not None:
        pass


def _step(connection: sa.Connection, statement: Composed, *, commit: bool = True) -> object:
    """Execute a statement and return its value, if there is one."""
    result = connection.exec_driver_sql(statement.as_string())
    value: object = result.scalar() if result.returns_rows else None
    if commit:
        connection.commit()
    return value


def _refuse_old(connection: sa.Connection, schema: Identifier) -> None:
    nodes = connection.exec_driver_sql(READ_NODES.format(schema=schema, stale_after=NODE_STALE_AFTER).as_string())
    old = [
        f"relay {name} of release {version}"
        for name, version, is_other in nodes
        if is_other or release_number(version) < release_number(READS_LOG)
    ]
    old += [f"a session {name}" for (name,) in connection.exec_driver_sql(OLD_CLIENTS)]
    if old:
        connection.rollback()
        raise BusyError(
            f"{', '.join(old)} cannot read the log: nothing was done; replace it with release {READS_LOG} or later"
        )
