"""The quarantine in the database: its routes, the rows that wait for them, and the rows' way in and out."""

import time
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from psycopg.sql import SQL

from relay.engine.row import Address, Key, Place, Row
from relay.engine.session.session import LaneSession, Retry, array_text, places, retried
from relay.engine.settle.put_away import PutAway

LOAD = SQL("SELECT id, exchange, routing_key, reason, probes, paused_at IS NOT NULL FROM {schema}.quarantine")

# The update locks the routes' rows: no other node can delete one before the rows that wait for it are written. All
# nodes lock them in one order. One statement for all: with one each, 30,000 routes took 550 s, and other rows waited.
ENTER = SQL("""
    INSERT INTO {schema}.quarantine (exchange, routing_key, reason)
    SELECT exchange, routing_key, reason
    FROM unnest(%(exchanges)s::text[], %(routing_keys)s::text[], %(reasons)s::text[])
        AS entered (exchange, routing_key, reason)
    ORDER BY exchange, routing_key
    ON CONFLICT (exchange, routing_key) DO UPDATE SET reason = excluded.reason
    RETURNING exchange, routing_key, id, reason, probes, paused_at IS NOT NULL
""")

# A join: a subquery for each row looks through all of them, 90 ms instead of 20 for 500 rows.
SET_ASIDE = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'quarantined', quarantine = aside.route, last_error = aside.reason
    FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[], %(routes)s::bigint[], %(reasons)s::text[])
        AS aside (lane, id, route, reason)
    WHERE row.state = 'pending' AND row.ctid = ANY (ARRAY(SELECT given.place FROM {given}))
        AND row.lane = aside.lane AND row.id = aside.id
""")

# It changes nothing, so a session that keeps rows from being set aside does not keep rows of other keys waiting.
FIND_BEHIND = SQL("""
    SELECT given.id
    FROM {given}
    CROSS JOIN LATERAL (
        SELECT
        FROM {schema}.message AS ahead
        WHERE ahead.state = 'quarantined' AND ahead.aggregate_type = given.aggregate_type
            AND ahead.aggregate_id = given.aggregate_id AND ({any_role} OR ahead.written_as = given.written_as)
            AND ahead.id < given.id
        LIMIT 1
    ) AS ahead
""")

SET_ASIDE_BEHIND = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'quarantined', (quarantine, held_behind, last_error) = (
        SELECT ahead.quarantine, ahead.id, 'waits behind message ' || ahead.id
        FROM {schema}.message AS ahead
        WHERE ahead.state = 'quarantined' AND ahead.aggregate_type = row.aggregate_type
            AND ahead.aggregate_id = row.aggregate_id AND ({any_role} OR ahead.written_as = row.written_as)
            AND ahead.id < row.id
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
                AND ahead.aggregate_id = given.aggregate_id AND ({any_role} OR ahead.written_as = given.written_as)
                AND ahead.id < given.id
            LIMIT 1
        ) AS ahead
    ))
    RETURNING row.id
""")

NOTE_PROBE = SQL("""
    UPDATE {schema}.quarantine SET probes = least(probes + 1, 999999), probed_at = now()
    WHERE id = %(route)s AND paused_at IS NULL
""")
KEY_OF_PENDING = SQL("""
    SELECT aggregate_type, aggregate_id, {key_role} FROM {schema}.message_pending WHERE lane = %(lane)s AND id = %(id)s
""")
# A row that may go out at once: the first row of its key. Neither a parked row nor a row that backs off (`but`) holds
# the key. A row that was at fault itself becomes a probe `again` only when no other row waits.
# The first and the last such row take turns: the first ones may be repeats, which a deduplicating exchange returns.
# `quarantine` stays: a pending row that has a value there is a probe under way
# (relay/operate/routes/quarantine.py reads it).
TAKE_PROBE = SQL("""
    UPDATE {schema}.message SET state = 'pending', available_at = now(), held_behind = NULL, last_error = NULL
    WHERE state = 'quarantined' AND ctid = (
        SELECT row.ctid
        FROM {schema}.message AS row
        WHERE row.state = 'quarantined' AND row.quarantine = %(route)s AND row.lane = ANY (%(lanes)s::smallint[])
            AND (row.attempts = 0 OR %(again)s)
            AND NOT EXISTS (
                SELECT
                FROM unnest(%(kinds)s::text[], %(keys)s::text[], %(roles)s::text[]) AS but (kind, key, role)
                WHERE but.kind = row.aggregate_type AND but.key = row.aggregate_id
                    AND ({any_role} OR but.role = row.written_as)
            )
            AND (NOT %(holding)s OR NOT EXISTS (
                SELECT
                FROM {schema}.message AS head
                WHERE head.state = 'parked' AND head.held_behind IS NULL
                    AND head.aggregate_type = row.aggregate_type AND head.aggregate_id = row.aggregate_id
                    AND ({any_role} OR head.written_as = row.written_as)
            ) AND NOT EXISTS (
                SELECT
                FROM {schema}.message AS ahead
                WHERE ahead.state = 'quarantined' AND ahead.aggregate_type = row.aggregate_type
                    AND ahead.aggregate_id = row.aggregate_id AND ({any_role} OR ahead.written_as = row.written_as)
                    AND ahead.id < row.id
            ))
        ORDER BY row.id {direction}
        LIMIT 1
    )
    RETURNING lane, id
""")
NOTE_FAILURE = SQL("""
    UPDATE {schema}.message SET attempts = %(attempts)s WHERE state = 'pending' AND lane = %(lane)s AND id = %(id)s
""")
LET_GO = SQL("""
    UPDATE {schema}.message
    SET state = 'pending', available_at = now(), quarantine = NULL, held_behind = NULL, last_error = NULL
    WHERE state = 'quarantined' AND ctid = ANY (ARRAY(
        SELECT row.ctid
        FROM unnest(%(routes)s::bigint[]) AS route (id)
        CROSS JOIN LATERAL (
            SELECT ctid
            FROM {schema}.message
            WHERE state = 'quarantined' AND quarantine = route.id AND lane = ANY (%(lanes)s::smallint[])
            ORDER BY id
            LIMIT %(each)s
        ) AS row
    ))
    RETURNING lane, id
""")
# In the order of `ENTER`, or two nodes would wait for each other.
LOCK = SQL("""
    SELECT id, paused_at IS NOT NULL
    FROM {schema}.quarantine
    WHERE id = ANY (%(routes)s::bigint[])
    ORDER BY exchange, routing_key
    FOR UPDATE
""")
LEAVE = SQL("""
    DELETE FROM {schema}.quarantine AS route
    WHERE id = ANY (%(routes)s::bigint[])
        AND NOT EXISTS (SELECT FROM {schema}.message WHERE state = 'quarantined' AND quarantine = route.id)
    RETURNING id
""")


class QuarantineEntry(NamedTuple):
    """A row of the table `quarantine`."""

    id: int
    reason: str
    probes: int
    is_paused: bool


class Left(Enum):
    """What is left of a route after `let_go`."""

    ROWS = auto()  # perhaps in this session's lanes
    OTHER_LANES = auto()  # rows of other nodes' lanes, or of paused ones
    NOTHING = auto()  # the route is not in quarantine any more
    PAUSE = auto()  # an operator has paused the route: no row was let go


class QuarantineTable:
    """The statements, which run on the session that holds the lanes of the rows.

    Statements that may find no row to change run in `use`, not in `write`.
    """

    def __init__(self, session: LaneSession, retry: Retry, put_away: PutAway) -> None:
        self._session = session
        self._retry = retry
        self._put_away = put_away

    @retried
    async def routes(self) -> list[tuple[Address, QuarantineEntry]]:
        """Return the routes in quarantine."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(LOAD))
            return [
                (Address(exchange.encode(), routing_key.encode()), QuarantineEntry(id_, *rest))
                for id_, exchange, routing_key, *rest in await cursor.fetchall()
            ]

    @retried
    async def set_aside(
        self, rows: Collection[Row], addresses: Sequence[Address], reasons: Mapping[Address, str]
    ) -> dict[Address, QuarantineEntry]:
        """Let rows wait for their routes, which are added where they are new; return the routes.

        Args:
            addresses: one for each row.
        Raises:
            ClosedError: no row can be set aside for now.
        """
        entered = {
            "exchanges": [address.exchange.decode() for address in reasons],
            "routing_keys": [address.routing_key.decode() for address in reasons],
            "reasons": list(reasons.values()),
        }
        began = time.monotonic()
        async with self._put_away.transaction() as connection:
            cursor = await connection.execute(self._session.sql(ENTER), entered)
            entries = {
                Address(exchange.encode(), routing_key.encode()): QuarantineEntry(*rest)
                for exchange, routing_key, *rest in await cursor.fetchall()
            }
            aside = {
                "routes": [entries[address].id for address in addresses],
                "reasons": [reasons[address] for address in addresses],
            }
            await connection.execute(self._session.sql(SET_ASIDE), places(rows) | aside)
        self._session.note_written(began)
        return entries

    @retried
    async def find_behind(self, rows: Collection[Row]) -> set[int]:
        """Return the ids of the rows whose key has an earlier row in quarantine."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(FIND_BEHIND), places(rows))
            return {id_ for (id_,) in await cursor.fetchall()}

    @retried
    async def set_aside_behind(self, rows: Collection[Row]) -> set[int]:
        """Set aside the rows whose key has an earlier row in quarantine; return their ids.

        Raises:
            ClosedError: no row can be set aside for now.
        """
        async with self._put_away.transaction() as connection:
            cursor = await connection.execute(self._session.sql(SET_ASIDE_BEHIND), places(rows))
            return {id_ for (id_,) in await cursor.fetchall()}

    @retried
    async def is_on_its_way(self, row: Place, *, but: Collection[Key]) -> bool:
        """Whether a row is still pending and its key is not among these keys."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(KEY_OF_PENDING), {"lane": row[0], "id": row[1]})
            found = await cursor.fetchone()
        return found is not None and (found[1] is None or key_from(*found) not in but)

    @retried
    async def take_probe(self, route: int, *, but: Collection[Key], holding: bool, last: bool) -> Place | None:
        """Make one row that waits for a route pending, and return its place; None if no row may go.

        Args:
            but: keys whose rows may not go.
            holding: whether a parked or quarantined row holds its key.
            last: whether to take the last such row instead of the first.
        Raises:
            ClosedError: no row can leave the quarantine for now.
        """
        statement = self._session.sql(TAKE_PROBE, direction=SQL("DESC" if last else "ASC"))
        async with self._put_away.transaction() as connection:
            values = {
                "route": route,
                "lanes": self._lanes(),
                "holding": holding,
                **parameters_of(but),
            }
            noted = await connection.execute(self._session.sql(NOTE_PROBE), {"route": route})
            if not noted.rowcount:  # it was paused, or has left the quarantine, in this moment
                return None
            for again in (False, True):
                cursor = await connection.execute(statement, {**values, "again": again})
                if (probe := await cursor.fetchone()) is not None:
                    return probe
        return None

    @retried
    async def note_failure(self, row: Row) -> None:
        """Write the number of attempts of a row that is itself at fault."""
        async with self._session.use() as connection:
            values = {"lane": row.lane, "id": row.id, "attempts": row.attempts}
            await connection.execute(self._session.sql(NOTE_FAILURE), values)

    @retried
    async def let_go(self, routes: Sequence[int], rows: int) -> tuple[list[Place], dict[int, Left]]:
        """Make rows of these routes pending, the first of each; return them, and what is left of each route.

        Args:
            rows: how many in all; one of each route in any case.

        Raises:
            ClosedError: no row can leave the quarantine for now.
        """
        async with self._put_away.transaction() as connection:
            cursor = await connection.execute(self._session.sql(LOCK), {"routes": array_text(routes)})
            is_paused = dict(await cursor.fetchall())
            going = [route for route in routes if not is_paused.get(route)]
            values = {"routes": array_text(going), "lanes": self._lanes(), "each": max(1, rows // len(routes))}
            cursor = await connection.execute(self._session.sql(LET_GO), values)
            gone = await cursor.fetchall()
            cursor = await connection.execute(self._session.sql(LEAVE), {"routes": array_text(going)})
            over = {id_ for (id_,) in await cursor.fetchall()}
        kept = Left.ROWS if gone else Left.OTHER_LANES
        # A route that is not in the table has left the quarantine, once it has no more rows.
        over |= set() if gone else set(going).difference(is_paused)
        left = {route: Left.NOTHING if route in over else kept for route in going}
        return gone, left | dict.fromkeys(set(routes).difference(going), Left.PAUSE)

    def _lanes(self) -> str:
        return array_text(self._session.lanes.held)


def key_from(kind: str, id_: str, role: str | None) -> Key:
    """Return a key that a statement returned."""
    return kind.encode(), id_.encode(), None if role is None else role.encode()


def parameters_of(keys: Collection[Key]) -> dict[str, list[str | None]]:
    """Return keys as the parameters of a statement."""
    return {
        "kinds": [kind.decode() for kind, _, _ in keys],
        "keys": [id_.decode() for _, id_, _ in keys],
        "roles": [None if role is None else role.decode() for _, _, role in keys],
    }


def names(address: Address) -> dict[str, str]:
    """Return an address as text, for a statement or a log line."""
    return {"exchange": address.exchange.decode(), "routing_key": address.routing_key.decode()}
