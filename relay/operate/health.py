"""Whether one relay is alive, and whether it can deliver: what `relay healthcheck` asks every few seconds.

A separate module, since the whole status takes longer to import than to read.
"""

from enum import StrEnum

from psycopg.sql import SQL, Composed

from relay.errors import NotReadyError
from relay.servers.postgres.tables import Tables

NODE_STALE_AFTER = 10.0  # seconds without a heartbeat, by the database's clock
NODE_LOST_AFTER = 1.5  # the same without a session: a relay that connects again needs a moment


class OutboxState(StrEnum):
    """How the outbox is doing as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # something needs a look; what can be delivered is
    STALLED = "stalled"  # rows wait and nothing goes out


# A relay's session has the advisory lock of the relay's name. The server frees it as soon as the relay is killed.
# The locks are read once, not for each relay.
IS_ALIVE = SQL("""clock_timestamp() - heartbeat_at <= interval '1 second' * CASE WHEN hashtext(name)::oid IN (
               SELECT lock.objid FROM pg_locks AS lock
               WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
                   AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                   AND lock.classid = hashtext({node_lock})::oid
           ) THEN {stale_after} ELSE {lost_after} END""")

READ_NODE = SQL("""
    SELECT state, reasons, extract(epoch FROM clock_timestamp() - heartbeat_at)::float8
    FROM {schema}.node
    WHERE name = %(name)s
""")


def is_alive(schema: str) -> Composed:
    """Return the condition that holds for the row of a relay in `node` that is alive."""
    return IS_ALIVE.format(node_lock=f"{schema}.node", stale_after=NODE_STALE_AFTER, lost_after=NODE_LOST_AFTER)


def check_health(tables: Tables, name: str, *, ready: bool) -> None:
    """Do nothing if the relay `name` is alive (and, with `ready`, can deliver).

    Raises:
        NotReadyError: says what is wrong. Parked rows are no reason: they need an operator, not a restart.
    """
    row = tables.execute(READ_NODE, {"name": name}).fetchone()
    if row is None:
        raise NotReadyError(
            f"no relay named {name} has ever written a heartbeat: start `relay run`, or check relay.node"
        )
    state, reasons, age = row
    if age > NODE_STALE_AFTER:
        raise NotReadyError(f"the last heartbeat of relay {name} is {age:.0f} s old: see its log, or restart it")
    if ready and state != OutboxState.OK:
        raise NotReadyError(f"relay {name} is {state}: {'; '.join(reasons) or 'it gives no reason'}")
