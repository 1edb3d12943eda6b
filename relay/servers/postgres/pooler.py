"""Whether a pooler, such as PgBouncer, lends our session to its other clients, and when.

A lent session loses our locks, settings and prepared statements, and hands our settings to other clients.
"""

from enum import Enum, auto

import psycopg

BACKEND = "SELECT pg_backend_pid()"
LOOKS = 5  # one would do in an idle pool; a busy one hands processes out in any order
LOOK_TIMEOUT = 5.0  # seconds for the second connection and all looks

LENT_OUT = (
    "leads to a pooler that lends sessions out between transactions. Locks, settings and prepared statements need one"
    " session"
)
NAME_SERVER = "name the server itself, or a pool with pool_mode = session"


class Lends(Enum):
    """When a pooler gives our session to another client."""

    NEVER = auto()
    BETWEEN_TRANSACTIONS = auto()
    BETWEEN_STATEMENTS = auto()


# The second connection of each function opens transactions meanwhile. If a pooler lends sessions out, the second one
# gets the first one's server process for a transaction, and the first one gets another process. Each look begins with a
# transaction of the first one: poolers give away the process next that came back last.


def lends(connection: psycopg.Connection, other: psycopg.Connection) -> Lends:
    """Return when the pooler in front of these two connections lends the first one out."""

    def process() -> int:
        with connection.transaction():  # also a connection that is not in autocommit mode is idle behind it
            return backend(connection)

    try:
        for _ in range(LOOKS):
            ours = process()
            with other.transaction():
                is_lent = backend(other) == ours or process() != ours
            if is_lent:
                process()  # fails if our connection was lost: then the pooler gave its session away for that
                return Lends.BETWEEN_TRANSACTIONS
    except psycopg.errors.ProtocolViolation:  # a pool that lends a session for one statement allows no transaction
        return Lends.BETWEEN_STATEMENTS
    return Lends.NEVER


async def lends_async(connection: psycopg.AsyncConnection, other: psycopg.AsyncConnection) -> Lends:
    """Return the same of asyncio connections."""

    async def process() -> int:
        async with connection.transaction():
            return await backend_async(connection)

    try:
        for _ in range(LOOKS):
            ours = await process()
            async with other.transaction():
                is_lent = await backend_async(other) == ours or await process() != ours
            if is_lent:
                await process()
                return Lends.BETWEEN_TRANSACTIONS
    except psycopg.errors.ProtocolViolation:
        return Lends.BETWEEN_STATEMENTS
    return Lends.NEVER


def backend(connection: psycopg.Connection) -> int:
    """Return the server process that runs this statement.

    Behind a pooler it differs from `connection.info.backend_pid`: poolers give their clients invented ids.
    """
    # Not prepared: a pooler may run the next statement on another server process, which does not have it.
    (pid,) = connection.execute(BACKEND, prepare=False).fetchone() or (0,)
    return int(pid)


async def backend_async(connection: psycopg.AsyncConnection) -> int:
    """Return the same of an asyncio connection."""
    (pid,) = await (await connection.execute(BACKEND, prepare=False)).fetchone() or (0,)
    return int(pid)
