"""Whether one relay is alive, and whether it can deliver: what `relay healthcheck` asks every few seconds.

A separate module, since the whole status takes longer to import than to read.
"""

from enum import StrEnum

from psycopg.sql import SQL

from relay.errors import NotReadyError
from relay.servers.postgres.tables import Tables

NODE_STALE_AFTER = 10.0  # seconds without a heartbeat, by the database's clock


class OutboxState(StrEnum):
    """How the outbox is doing as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # something needs a look; what can be delivered is
    STALLED = "stalled"  # rows wait and nothing goes out


READ_NODE = SQL("""
    SELECT state, reasons, extract(epoch FROM clock_timestamp() - heartbeat_at)::float8
    FROM {schema}.node
    WHERE name = %(name)s
""")


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
