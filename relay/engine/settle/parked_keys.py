"""Keys that wait behind a parked row (`key_policy = "hold"`).

Their later rows are parked behind it, out of the hot partition. They follow in order when an operator retries or
discards the parked row. The table decides; the keys in memory only save the question for all other keys.
"""

from collections.abc import Sequence

from psycopg.sql import SQL

from relay.engine.read.tail import Tail
from relay.engine.row import Key, Row, pieces
from relay.engine.session.database_retry import DatabaseRetry, retried
from relay.engine.session.session import LaneSession, places
from relay.logger import get_logger

log = get_logger(__name__)

LOAD = SQL("""
    SELECT DISTINCT aggregate_type, aggregate_id
    FROM {schema}.message
    WHERE state = 'parked' AND held_behind IS NULL AND aggregate_id IS NOT NULL
""")

PARK_BEHIND = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'parked', parked_at = now(), (held_behind, last_error) = (
        SELECT min(head.id), 'waits behind message ' || min(head.id)
        FROM {schema}.message AS head
        WHERE head.state = 'parked' AND head.held_behind IS NULL
            AND head.aggregate_type = row.aggregate_type AND head.aggregate_id = row.aggregate_id
    )
    WHERE state = 'pending' AND ctid = ANY (ARRAY(
        SELECT given.place
        FROM {given}
        CROSS JOIN LATERAL (
            SELECT
            FROM {schema}.message AS head
            WHERE head.state = 'parked' AND head.held_behind IS NULL
                AND head.aggregate_type = given.aggregate_type AND head.aggregate_id = given.aggregate_id
            LIMIT 1
        ) AS head
    ))
    RETURNING row.id
""")


class ParkedKeys:
    """The keys whose rows are parked as they come."""

    def __init__(self, session: LaneSession, tail: Tail, retry: DatabaseRetry) -> None:
        self._session = session
        self._tail = tail
        self._retry = retry
        self._keys: set[Key] = set()

    async def load(self) -> None:
        """Learn from the table which keys have a parked row."""
        self._keys |= await self._read_keys()

    def add(self, key: Key) -> None:
        self._keys.add(key)

    def holds_any(self, rows: Sequence[Row]) -> bool:
        return bool(self._keys) and any(row.key in self._keys for row in rows)

    async def hold_rows(self, window: list[Row]) -> list[Row]:
        """Park the rows of held keys, and return the others."""
        if not self._keys:
            return window
        free: list[Row] = []
        held: list[Row] = []
        for row in window:
            (held if row.key in self._keys else free).append(row)
        await self.park_behind(held)
        return free

    async def park_behind(self, rows: Sequence[Row]) -> None:
        """Park rows behind the parked one of their key.

        If no row of the key is parked any more, an operator has released the key: its rows are read again, in order
        with those that the operator put back. Or the row itself has gone, and its key stays held.
        """
        for piece in pieces(rows, (row.cost for row in rows)):
            await self._park_behind(piece)

    async def _park_behind(self, rows: Sequence[Row]) -> None:
        parked = await self._write_parked(rows)
        self._tail.forget(rows)
        if left := [row for row in rows if row.id not in parked]:
            self._keys -= {row.key for row in left if row.key is not None} - await self._read_keys()
            for row in left:
                self._tail.reread_from(row.lane)
        if parked:
            log.warning("messages.held", rows=len(parked))

    @retried
    async def _read_keys(self) -> set[Key]:
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(LOAD))
            return {(kind.encode(), id_.encode()) for kind, id_ in await cursor.fetchall()}

    @retried
    async def _write_parked(self, rows: Sequence[Row]) -> set[int]:
        async with self._session.use() as connection, connection.transaction():
            await self._session.take_park_lock(connection)
            cursor = await connection.execute(self._session.sql(PARK_BEHIND), places(rows))
            return {row[0] for row in await cursor.fetchall()}
