"""Park rows behind the parked row of their key, and find the keys that have one.

If `key_policy` is "hold", the relay parks the later rows of a parked row's key behind that row, outside the hot
partition. They follow in order when an operator retries or discards the parked row. The table decides; the gate
remembers the keys.
"""

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from psycopg.sql import SQL

from relay.engine.read.gate import ParkedKeys
from relay.engine.read.tail import Tail
from relay.engine.row import Key, Row, fetch_rows, give_bytes, pieces
from relay.engine.session.session import LaneSession, Retry, array_text, places, retried
from relay.engine.settle.put_away import ClosedError, PutAway
from relay.engine.settle.quarantine_table import key_from, parameters_of
from relay.logger import get_logger

log = get_logger(__name__)

ROWS_PER_LOAD = 20_000  # of parked ones

# In pieces, as there may be millions: between two of them the session marks what was sent.
LOAD_PARKED = SQL("""
    SELECT lane, id, aggregate_type, aggregate_id, {key_role}
    FROM {schema}.message
    WHERE state = 'parked' AND held_behind IS NULL AND aggregate_id IS NOT NULL
        AND id > %(after)s AND lane = ANY (%(lanes)s::smallint[])
    ORDER BY id
    LIMIT %(rows)s
""")

FIND_PARKED = SQL("""
    SELECT wanted.kind, wanted.key, wanted.role
    FROM unnest(%(kinds)s::text[], %(keys)s::text[], %(roles)s::text[]) AS wanted (kind, key, role)
    CROSS JOIN LATERAL (
        SELECT
        FROM {schema}.message AS head
        WHERE head.state = 'parked' AND head.held_behind IS NULL
            AND head.aggregate_type = wanted.kind AND head.aggregate_id = wanted.key
            AND ({any_role} OR head.written_as = wanted.role)
        LIMIT 1
    ) AS head
""")

PARK_BEHIND = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'parked', parked_at = now(), (held_behind, last_error) = (
        SELECT min(head.id), 'waits behind message ' || min(head.id)
        FROM {schema}.message AS head
        WHERE head.state = 'parked' AND head.held_behind IS NULL
            AND head.aggregate_type = row.aggregate_type AND head.aggregate_id = row.aggregate_id
            AND ({any_role} OR head.written_as = row.written_as)
    )
    WHERE state = 'pending' AND ctid = ANY (ARRAY(
        SELECT given.place
        FROM {given}
        CROSS JOIN LATERAL (
            SELECT
            FROM {schema}.message AS head
            WHERE head.state = 'parked' AND head.held_behind IS NULL
                AND head.aggregate_type = given.aggregate_type AND head.aggregate_id = given.aggregate_id
                AND ({any_role} OR head.written_as = given.written_as)
            LIMIT 1
        ) AS head
    ))
    RETURNING row.id
""")


class Parking:
    """The rows' way behind the parked row of their key, for the lanes of one session.

    Attributes:
        keys: the keys that have a parked row.
        door: the way of rows into the partition of parked rows, which the marker uses too; its `run` must run.
    """

    def __init__(self, session: LaneSession, tail: Tail, keys: ParkedKeys, retry: Retry) -> None:
        self._session = session
        self._tail = tail
        self.keys = keys
        self._retry = retry
        self.door = PutAway(session, tail, retry)

    async def load(self, lanes: Collection[int]) -> None:
        """Read from the table which keys of these lanes, which are not read yet, have a parked row."""
        hashes: dict[int, array[int]] = {lane: array("q") for lane in lanes}
        after = 0
        while rows := await self._read_parked(lanes, after):
            for lane, _, *key in rows:
                hashes[lane].append(hash(tuple(key)))
            after = rows[-1][1]
        for lane, found in hashes.items():
            self.keys.replace(lane, found)
            await asyncio.sleep(0)  # a million take a while

    async def park_behind(self, rows: Sequence[Row]) -> None:
        """Park rows behind the parked one of their key.

        If the key has no parked row now, an operator has released it. The relay then reads its rows again, in order
        with the rows that the operator put back. A row that has gone from the table does not release its key.
        """
        for piece in pieces(rows, (row.cost for row in rows)):
            await self._park_behind(piece)

    async def _park_behind(self, rows: Sequence[Row]) -> None:
        try:
            parked = await self._write_parked_behind(rows)
        except ClosedError:
            self.door.put_back(rows)
            return
        self._tail.forget([row for row in rows if row.id in parked])
        if left := [row for row in rows if row.id not in parked]:
            still_parked = await self._find_keys({row.key for row in left if row.key is not None})
            for row in left:
                if row.key not in still_parked:
                    self.keys.remove(row)
            self._tail.read_again(left)
        if parked:
            log.warning("messages.held", rows=len(parked))

    @retried
    async def _read_parked(self, lanes: Collection[int], after: int) -> list[tuple[Any, ...]]:
        values = {"lanes": array_text(lanes), "after": after, "rows": ROWS_PER_LOAD}
        async with self._session.use():
            cursor = self._session.cursor()
            give_bytes(cursor)
            await cursor.execute(self._session.sql(LOAD_PARKED), values)
            return await fetch_rows(cursor)

    @retried
    async def _find_keys(self, keys: Collection[Key]) -> set[Key]:
        """Return which of these keys have a parked row."""
        async with self._session.use() as connection:
            cursor = await connection.execute(self._session.sql(FIND_PARKED), parameters_of(keys))
            return {key_from(*found) for found in await cursor.fetchall()}

    @retried
    async def _write_parked_behind(self, rows: Sequence[Row]) -> set[int]:
        async with self.door.transaction() as connection:
            await self._session.take_park_lock(connection)
            cursor = await connection.execute(self._session.sql(PARK_BEHIND), places(rows))
            return {row[0] for row in await cursor.fetchall()}
