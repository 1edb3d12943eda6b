"""What a session for lanes is told at its start."""

import asyncio

import psycopg
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from relay.compatibility import READ_TABLES, refuse_newer
from relay.config.settings import DatabaseSettings
from relay.database import KEEPALIVE, one_line, require_session
from relay.errors import CommitUnknownError, DatabaseUnavailableError, DeadlineError, SchemaError

# The hot statements must not depend on statistics: those of an empty table make the planner choose a sequential
# scan at the first spike (tests/engine/test_plans.py). This session runs nothing else.
PLANNER = SQL("""
    SET enable_seqscan = off;
    SET enable_bitmapscan = off;
    SET enable_hashjoin = off;
    SET enable_mergejoin = off;
    SET enable_sort = off;
    SET jit = off;
    SET max_parallel_workers_per_gather = 0
""")

# Older servers lack some of them.
SET_TIMEOUTS = SQL("""
    SELECT set_config(name, value, false)
    FROM unnest(%(names)s::text[], %(values)s::text[]) AS own (name, value)
    JOIN pg_settings USING (name)
""")

# One wide row, and libpq keeps an input buffer of its size: 16 KiB else, and a wake-up for each 16 KiB of a window.
WIDE_ROW = SQL("SELECT repeat(' ', 262144)")

ROUTES_CHANGED = "routes"  # what an operator's command notifies the nodes of; they notify each other of no word

OLDEST_REVISION = "0005"  # what this release needs; newer ones are served unless their note says otherwise

# What ends a session, or makes it useless to us.
SESSION_LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,  # such as: the server has become read-only
    DeadlineError,
    CommitUnknownError,
)


def nodes_channel(schema: str) -> str:
    """Name the channel on which nodes notify each other."""
    return f"{schema}.nodes"


async def prepare(connection: AsyncConnection, database: DatabaseSettings) -> None:
    """Make a new connection a session for lanes.

    Raises:
        DatabaseUnavailableError: it does not answer, or was ended.
        ConfigurationError: it is a pooler's, and no session.
        SchemaError: the outbox tables are missing, too old, or of a release that left this one behind.
    """
    schema = database.schema_name
    try:
        async with asyncio.timeout(database.command_timeout):
            await require_session(connection, database)
            await connection.execute(SET_TIMEOUTS, _timeouts(connection, database))
            await connection.execute(PLANNER)
            await connection.execute(WIDE_ROW)
            cursor = await connection.execute(READ_TABLES.format(schema=Identifier(schema)))
            revision, note = await cursor.fetchone() or ("", None)
            if revision < OLDEST_REVISION:
                raise SchemaError(f"the outbox tables in schema {schema!r} are too old: run `relay migrate`")
            refuse_newer(schema, revision, note)
            await connection.execute(SQL("LISTEN {}").format(Identifier(nodes_channel(schema))))
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
        raise SchemaError(f"the outbox tables are missing in schema {schema!r}: run `relay migrate`") from None
    except TimeoutError:
        raise DatabaseUnavailableError(f"no answer within {database.command_timeout:g} s") from None
    except SESSION_LOST as error:
        raise DatabaseUnavailableError(f"the database ended the session: {one_line(error)}") from error


def _timeouts(connection: AsyncConnection, database: DatabaseSettings) -> dict[str, list[str]]:
    """Give what the server is to wait for, whatever its defaults are for this role or database.

    It, too, must notice a peer that died silently: until then the lanes are held by nobody.
    """
    own = {
        "statement_timeout": f"{max(1, round(database.command_timeout * 1000))}ms",
        "lock_timeout": "3s",  # whoever waits for somebody's lock says so (relay/engine/session/database_retry.py)
        "transaction_timeout": "0",
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "30s",
    }
    ours = connection.info.get_parameters()
    for name in KEEPALIVE.keys() & ours.keys() - {"keepalives"}:
        own[f"tcp_{name.removeprefix('tcp_')}"] = ours[name]
    return {"names": list(own), "values": list(own.values())}
