"""The quarantine in the table: its routes, the rows that wait for them, and their way in and out."""

from collections.abc import Collection

from psycopg.sql import SQL

from relay.engine.routes import Address
from relay.engine.row import Row
from relay.engine.session import LaneSession, array_text, places

Place = tuple[int, int]  # lane and id of a row

LOAD = SQL("SELECT id, exchange, routing_key, reason, probes FROM {schema}.quarantine")

# The update locks the route's row: it cannot be deleted before the rows that wait for it are there.
ENTER = SQL("""
    INSERT INTO {schema}.quarantine (exchange, routing_key, reason)
    VALUES (%(exchange)s, %(routing_key)s, %(reason)s)
    ON CONFLICT (exchange, routing_key) DO UPDATE SET reason = excluded.reason
    RETURNING id, probes
""")

SET_ASIDE = SQL("""
    UPDATE {schema}.message SET state = 'quarantined', quarantine = %(route)s, last_error = %(reason)s
    WHERE state = 'pending' AND ctid = ANY (ARRAY(SELECT given.place FROM {given}))
""")

SET_ASIDE_BEHIND = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'quarantined', (quarantine, last_error) = (
        SELECT ahead.quarantine, 'waits behind message ' || ahead.id
        FROM {schema}.message AS ahead
        WHERE ahead.state = 'quarantined' AND ahead.aggregate_type = row.aggregate_type
            AND ahead.aggregate_id = row.aggregate_id AND ahead.id < row.id
        ORDER BY ahead.id
        LIMIT 1
    )
    WHERE state = 'pending' AND ctid = ANY (ARRAY(
        SELECT given.place
        FROM {given}
        CROSS JOIN LATERAL (
            SELECT
            FROM {schema}.message AS ahead
            WHERE ahead.state = 'quarantined' AND ahead.aggregate_type = given.aggregate_type
                AND ahead.aggregate_id = given.aggregate_id AND ahead.id < given.id
            LIMIT 1
        ) AS ahead
    ))
    RETURNING row.id
""")

NOTE_PROBE = SQL("UPDATE {schema}.quarantine SET probes = probes + 1, probed_at = now() WHERE id = %(route)s")
IS_PENDING = SQL("SELECT EXISTS (SELECT FROM {schema}.message_pending WHERE lane = %(lane)s AND id = %(id)s)")
LET_GO = SQL("""
    UPDATE {schema}.message SET state = 'pending', quarantine = NULL, last_error = NULL
    WHERE state = 'quarantined' AND ctid = ANY (ARRAY(
        SELECT ctid
        FROM {schema}.message
        WHERE state = 'quarantined' AND quarantine = %(route)s AND lane = ANY (%(lanes)s::smallint[])
        ORDER BY id
        LIMIT %(rows)s
    ))
    RETURNING lane, id
""")
LOCK = SQL("SELECT FROM {schema}.quarantine WHERE id = %(route)s FOR UPDATE")
LEAVE = SQL("""
    DELETE FROM {schema}.quarantine
    WHERE id = %(route)s
        AND NOT EXISTS (SELECT FROM {schema}.message WHERE state = 'quarantined' AND quarantine = %(route)s)
""")


class QuarantineTable:
    """The statements, on the session of the lanes whose rows they move."""

    def __init__(self, session: LaneSession) -> None:
        self._session = session

    async def routes(self) -> list[tuple[Address, int, str, int]]:
        """Give the routes in quarantine: address, id, reason and how often each was tried."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(LOAD))
            return [
                (Address(exchange.encode(), routing_key.encode()), id_, reason, probes)
                for id_, exchange, routing_key, reason, probes in await cursor.fetchall()
            ]

    async def set_aside(self, address: Address, rows: Collection[Row], reason: str) -> tuple[int, int]:
        """Let rows wait for a route, which is entered if it is new; give its id and how often it was tried."""
        entered = {**names(address), "reason": reason}
        async with self._session.write() as connection, connection.transaction():
            cursor = await connection.execute(self._session.sql(ENTER), entered)
            id_, probes = await cursor.fetchone() or (0, 0)
            await connection.execute(self._session.sql(SET_ASIDE), {**places(rows), "route": id_, "reason": reason})
        return id_, probes

    async def set_aside_behind(self, rows: Collection[Row]) -> set[int]:
        """Let those rows wait of whose key an earlier one waits; give their ids."""
        async with self._session.write() as connection:
            cursor = await connection.execute(self._session.sql(SET_ASIDE_BEHIND), places(rows))
            return {id_ for (id_,) in await cursor.fetchall()}

    async def is_pending(self, row: Place) -> bool:
        """Tell whether a row is still to be sent."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(IS_PENDING), {"lane": row[0], "id": row[1]})
            return await cursor.fetchone() == (True,)

    async def take_probe(self, route: int) -> Place | None:
        """Make the first row that waits for a route pending; None when there is none."""
        async with self._session.write() as connection, connection.transaction():
            await connection.execute(self._session.sql(NOTE_PROBE), {"route": route})
            cursor = await connection.execute(self._session.sql(LET_GO), self._first(route, 1))
            return await cursor.fetchone()

    async def let_go(self, route: int, rows: int) -> tuple[list[Place], bool]:
        """Make so many rows pending, in order; give them, and whether they were the last: then the route is gone."""
        async with self._session.write() as connection, connection.transaction():
            await connection.execute(self._session.sql(LOCK), {"route": route})
            cursor = await connection.execute(self._session.sql(LET_GO), self._first(route, rows))
            gone = await cursor.fetchall()
            is_last = len(gone) < rows
            if is_last:
                await connection.execute(self._session.sql(LEAVE), {"route": route})
        return gone, is_last

    def _first(self, route: int, rows: int) -> dict[str, int | str]:
        return {"route": route, "lanes": array_text(self._session.lanes), "rows": rows}


def names(address: Address) -> dict[str, str]:
    """Give an address as text, for a statement or a log line."""
    return {"exchange": address.exchange.decode(), "routing_key": address.routing_key.decode()}
