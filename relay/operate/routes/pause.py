"""Routes that an operator has paused: their rows wait in the table, in order, until they are resumed.

A paused route is a row of `quarantine` whose columns `paused_*` are filled; its rows wait in quarantine, and are not
probed. What is in flight when the pause comes is still sent. The relays are notified, and obey within a second or two.
"""

from psycopg.sql import SQL

from relay.engine.session.session import ROUTES_CHANGED
from relay.errors import UsageError
from relay.operate.audit import note
from relay.operate.routes.quarantine import RouteStatus, list_routes, read_route, ring
from relay.servers.postgres.tables import Tables

MAX_NAME_BYTES = 255

# A fault keeps its reason: the route is in quarantine by it, too.
PAUSE_ROUTE = SQL("""
    INSERT INTO {schema}.quarantine AS route (exchange, routing_key, reason, paused_at, paused_by, paused_why)
    VALUES (
        %(exchange)s, %(routing_key)s, 'paused by ' || %(by)s::text || ': ' || %(why)s::text, now(), %(by)s, %(why)s
    )
    ON CONFLICT (exchange, routing_key) DO UPDATE
    SET paused_at = excluded.paused_at, paused_by = excluded.paused_by, paused_why = excluded.paused_why
    WHERE route.paused_at IS NULL
    RETURNING id
""")
RESUME_ROUTE = SQL("""
    UPDATE {schema}.quarantine
    SET paused_at = NULL, paused_by = NULL, paused_why = NULL, probes = 0, reason = CASE
        WHEN reason = 'paused by ' || paused_by || ': ' || paused_why THEN 'was paused; resumed by ' || %(by)s::text
        ELSE reason END
    WHERE id = %(route)s AND paused_at IS NOT NULL
""")


def pause_route(tables: Tables, exchange: str, routing_key: str, *, by: str, why: str) -> RouteStatus:
    """Let the rows for an address wait from now on; return the route.

    Raises:
        UsageError: AMQP knows no such address, or it is paused already.
    """
    if max(len(exchange.encode()), len(routing_key.encode())) > MAX_NAME_BYTES:
        raise UsageError(f"an exchange or routing key is longer than the {MAX_NAME_BYTES} bytes that AMQP allows")
    values = {"exchange": exchange, "routing_key": routing_key, "by": by, "why": why}
    with tables.transaction():
        entered = tables.execute(PAUSE_ROUTE, values).fetchone()
        if entered is None:
            address = (exchange, routing_key)
            (there,) = [each for each in list_routes(tables) if (each.exchange, each.routing_key) == address]
            raise UsageError(f"route {there.id} is paused already, by {there.paused_by}: {there.paused_why}")
        route = read_route(tables, entered[0])
        note(tables, "quarantine pause", route.address, by=by, why=why)
        ring(tables, ROUTES_CHANGED)
    return route


def resume_route(tables: Tables, route: int, *, by: str, why: str | None) -> RouteStatus:
    """Let the relays try a paused route now, and let its rows go when it works; return the route.

    Raises:
        NotFoundError: the route is not in quarantine.
        UsageError: it is not paused.
    """
    with tables.transaction():
        found = read_route(tables, route)
        if not tables.execute(RESUME_ROUTE, {"route": route, "by": by}).rowcount:
            raise UsageError(f"route {route} is not paused: the relays try it by themselves")
        note(tables, "quarantine resume", found.address, by=by, why=why)
        ring(tables, ROUTES_CHANGED)
        return read_route(tables, route)
