"""Write the outcome of each row into the table: sent, postponed, or parked.

The relay marks a row after its confirm. If the relay crashes in between, the row stays pending and goes out again with
the same message_id.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import assert_never

import psycopg
from psycopg.sql import SQL

from relay.config.settings import RelaySettings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.tail import Tail
from relay.engine.row import Blame, Fault, Row, pieces
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession, Retry, places, retried
from relay.engine.settle.parking import Parking
from relay.engine.settle.put_away import ClosedError, PutAway
from relay.engine.settle.quarantine import Quarantine
from relay.logger import get_logger
from relay.observe.histogram import Histogram
from relay.runtime.backoff import backoff

log = get_logger(__name__)

# DELETE and INSERT in one statement, not UPDATE ... SET state = 'sent': an update would move each row to its partition,
# which takes PostgreSQL twice the time (docs/decisions/0002-mark-by-delete-and-insert.md).
# The count is a new row in `published`, not an UPDATE of the node's row. Under an old snapshot, each UPDATE would
# walk over the row's versions that earlier marks left. Then 0.15 ms became 1 ms after 40,000 marks.
# The new row costs 0.02 of the 0.5 ms that a mark of 100 rows takes.
MARK_SENT = SQL("""
    WITH done AS (
        DELETE FROM {schema}.message_pending
        WHERE ctid = ANY (ARRAY(SELECT given.place FROM {given}))
        RETURNING *
    ), counted AS (
        INSERT INTO {schema}.published (node, messages) SELECT %(node)s, count(*) FROM done HAVING count(*) > 0
    )
    INSERT INTO {schema}.message_sent ({kept}, state, sent_at)
    SELECT {kept}, 'sent', now() FROM done
""")

# All columns but `state`, `sent_at` and the generated `lane`.
KEPT = SQL("""
    id, message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type, payload,
    payload_bytes, created_at, attempts, available_at, last_error, held_behind, parked_at, writer, batch_id,
    trace_context, written_as
""")

POSTPONE = SQL("""
    UPDATE {schema}.message
    SET attempts = %(attempts)s, available_at = now() + %(seconds)s * interval '1 second', last_error = %(reason)s
    WHERE state = 'pending' AND lane = %(lane)s AND id = %(id)s
""")

PARK = SQL("""
    UPDATE {schema}.message AS row
    SET state = 'parked', available_at = NULL, parked_at = now(), quarantine = NULL, (attempts, last_error) = (
        SELECT fault.attempts, fault.reason
        FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[], %(attempts)s::smallint[], %(reasons)s::text[])
            AS fault (lane, id, attempts, reason)
        WHERE fault.lane = row.lane AND fault.id = row.id
    )
    WHERE state = 'pending' AND ctid = ANY (ARRAY(SELECT given.place FROM {given}))
""")

DISCARD = SQL("""
    UPDATE {schema}.message
    SET state = 'discarded', available_at = NULL, quarantine = NULL, last_error = %(reason)s
    WHERE state = 'pending' AND ctid = ANY (ARRAY(SELECT given.place FROM {given}))
""")

MARK_INTERVAL, BUSY_MARK_INTERVAL = 0.003, 0.02  # seconds between two marks with fewer rows than `ROWS_WORTH_A_MARK`
ROWS_WORTH_A_MARK = 1000
BUSY_IN_FLIGHT = 200  # messages; a backlog keeps more in flight, a steady flow far fewer
TIMED_ROWS = 8  # of each mark: all rows of a steady flow, a sample of a backlog's thousands
MOST_ATTEMPTS = 32_767  # what the column takes; a console's role may have written it
ROWS_PER_MARK = 4000  # limits the statement, not the rate: the next statement marks the other settled rows
# From the delay of an idle relay to that after an outage of hours.
DELIVERY_BOUNDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)


class Delivered:
    """The rows that a node has delivered since its start, in all its sessions: confirmed by the broker, and marked.

    Attributes:
        total: the number of rows that the marker has marked.
        times: see `NodeSnapshot.delivery_times`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.times = Histogram(DELIVERY_BOUNDS)

    def add(self, rows: int) -> None:
        """Count marked rows."""
        self.total += rows


class Marker:
    """Marks settled rows; one mark takes the rows that settled during the mark before it.

    Attributes:
        discarding: the way of rows into the partition of discarded rows; its `run` must run.
    """

    def __init__(
        self,
        session: LaneSession,
        tail: Tail,
        sender: Sender,
        parking: Parking,
        *,
        quarantine: Quarantine,
        policy: DeliveryPolicy,
        delivered: Delivered,
        retry: Retry,
        settings: RelaySettings,
    ) -> None:
        self._session = session
        self._tail = tail
        self._sender = sender
        self._parking = parking
        self._quarantine = quarantine
        self.discarding = PutAway(session, tail, retry)
        self._policy = policy
        self._delivered = delivered
        self._retry = retry
        self._settings = settings
        self._mark_sent = mark_statement(session)
        self._marked_at = 0.0

    async def run(self) -> None:
        """Mark until the sender has stopped, and the outcome of each row in flight is written."""
        while await self._sender.wait_settled():
            await self._gather()
            confirmed, faulty = self._sender.take_settled()
            for start in range(0, len(confirmed), ROWS_PER_MARK):
                await self._sent(confirmed[start : start + ROWS_PER_MARK])
            if of_addresses := [fault for fault in faulty if fault.blame is Blame.ADDRESS]:
                await self._quarantine.close_routes(of_addresses)
            await self._faults(faulty)
            confirmed.clear()  # otherwise these rows stay in memory until the next ones settle

    async def _gather(self) -> None:
        """Wait for more rows if the last mark was just now: a statement costs as much as twenty rows."""
        loop = asyncio.get_running_loop()
        interval = BUSY_MARK_INTERVAL if self._sender.in_flight > BUSY_IN_FLIGHT else MARK_INTERVAL
        wait = self._marked_at + interval - loop.time()
        if wait > 0 and len(self._sender.confirmed) < ROWS_WORTH_A_MARK:
            await asyncio.sleep(wait)
        self._marked_at = loop.time()

    async def _sent(self, rows: Sequence[Row]) -> None:
        parameters = places(rows) | {"node": self._settings.node}
        marked = await self._write_sent(parameters)
        if marked != len(rows):
            # An operator has parked, discarded or deleted the other rows meanwhile, although they were sent.
            log.warning("mark.missed", rows=len(rows), marked=marked)
        self._delivered.add(marked)
        self._tail.forget(rows)
        self._quarantine.note_sent(rows)
        self._note_times(rows)
        log.debug("batch.published", rows=len(rows), first_id=rows[0].id)

    def _note_times(self, rows: Sequence[Row]) -> None:
        now = self._tail.database_time()
        step = -(-len(rows) // TIMED_ROWS)
        for start in range(0, len(rows), step):
            seconds = max(0.0, now - rows[start].created_at) / 1e6
            self._delivered.times.observe(seconds, min(step, len(rows) - start))

    @retried
    async def _write_sent(self, parameters: dict[str, str]) -> int:
        began = time.monotonic()
        async with self._session.use() as connection:
            marked = (await connection.execute(self._mark_sent, parameters, prepare=True)).rowcount
        if marked:  # otherwise the statement had no transaction id: see LaneSession.write
            self._session.note_written(began)
        return marked

    async def _faults(self, faults: Sequence[Fault]) -> None:
        given_up: list[Fault] = []
        unwanted: list[Fault] = []
        for fault in faults:
            row = fault.row._replace(attempts=min(max(fault.row.attempts, 0) + 1, MOST_ATTEMPTS))
            match fault.blame:
                case Blame.ADDRESS:
                    pass  # the row waits in quarantine, and loses no attempt
                case Blame.ROW if row.attempts < self._settings.max_attempts:
                    if not await self._quarantine.put_probe_back(row):
                        await self._postpone(row, fault.reason)
                case Blame.NOBODY:
                    unwanted.append(fault)
                case Blame.ROW | Blame.ROW_FOR_GOOD:
                    given_up.append(fault._replace(row=row))
                case _:
                    assert_never(fault.blame)
        for piece in pieces(given_up, (fault.row.cost for fault in given_up)):
            await self._park(piece)
        for piece in pieces(unwanted, (fault.row.cost for fault in unwanted)):
            await self._discard([fault.row for fault in piece], piece[0].reason)

    async def _discard(self, rows: Sequence[Row], reason: str) -> None:
        try:
            await self._write_discarded(rows, reason)
        except ClosedError:
            self._put_back(self.discarding, rows)
            return
        log.debug("messages.discarded", rows=len(rows), reason=reason)
        self._tail.forget(rows)
        self._quarantine.note_sent(rows)
        for row in rows:
            self._sender.queue.release_key(row)

    @retried
    async def _write_discarded(self, rows: Sequence[Row], reason: str) -> None:
        async with self.discarding.transaction() as connection:
            await connection.execute(self._session.sql(DISCARD), {**places(rows), "reason": reason})

    async def _postpone(self, row: Row, reason: str) -> None:
        seconds = backoff(row.attempts, self._settings.backoff_initial, self._settings.backoff_max)
        until = await self._write_postponed(row, reason, seconds)
        log.warning("message.postponed", id=row.id, attempts=row.attempts, seconds=round(seconds, 2), reason=reason)
        self._tail.back_off(row, until, self._sender.queue.put_off(row))

    @retried
    async def _write_postponed(self, row: Row, reason: str, seconds: float) -> float:
        until = time.monotonic() + seconds  # not later than the table's, or the tail finds the row before it
        async with self._session.use() as connection:
            values = {"lane": row.lane, "id": row.id, "attempts": row.attempts, "reason": reason, "seconds": seconds}
            await connection.execute(self._session.sql(POSTPONE), values)
        return until

    async def _park(self, faults: Sequence[Fault]) -> None:
        try:
            are_parked = await self._write_parked(faults)
        except ClosedError:
            self._put_back(self._parking.door, [fault.row for fault in faults])
            return
        if not are_parked:
            half = len(faults) // 2
            await self._park(faults[:half])
            await self._park(faults[half:])
            return
        followers: list[Row] = []
        for row, reason, _ in faults:
            log.error("message.parked", id=row.id, attempts=row.attempts, reason=reason)
            self._quarantine.end_probe(row)
            followers += self._leave_key(row)
            if row.key is not None and self._policy.put_away_holds_key:
                self._parking.keys.add(row)
        self._tail.forget([fault.row for fault in faults])
        await self._parking.park_behind(followers)

    def _leave_key(self, row: Row) -> list[Row]:
        """Return the rows that wait behind a row that is put away, or let its key go on and return no rows."""
        queue = self._sender.queue
        if row.key is not None and self._policy.put_away_holds_key:
            return queue.remove_followers(row)
        queue.release_key(row)
        return []

    def _put_back(self, closed: PutAway, rows: Sequence[Row]) -> None:
        for row in rows:
            closed.put_back([row, *self._leave_key(row)])

    @retried
    async def _write_parked(self, faults: Sequence[Fault]) -> bool:
        """Park rows; False when the statement timed out, and the caller should park fewer rows at once."""
        parameters = places([fault.row for fault in faults]) | {
            "attempts": [fault.row.attempts for fault in faults],
            "reasons": [fault.reason for fault in faults],
        }
        try:
            async with self._parking.door.transaction(may_split=len(faults) > 1) as connection:
                await self._session.take_park_lock(connection)
                if len(faults) > 1:  # a single row gets the whole time
                    await self._session.halve_timeout(connection)
                await connection.execute(self._session.sql(PARK), parameters)
        except psycopg.errors.QueryCanceled:
            log.warning("park.timed_out", rows=len(faults))
            return False
        return True


def mark_statement(session: LaneSession) -> bytes:
    return session.sql(MARK_SENT, kept=KEPT)
