"""The database session of a replay: it holds the job's lock, lists the selected rows, reads them and saves how far.

The days of sent rows have no index, since one would slow every mark. So PostgreSQL sorts the places of the selected
rows once, into a cursor WITH HOLD, which holds no snapshot open. The rows themselves are then read by their place, a
thousand at a time (docs/decisions/0007-replay-by-place.md).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from itertools import groupby
from typing import Any, NamedTuple, Self

from psycopg import AsyncConnection, AsyncCursor
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.config.settings import DatabaseSettings
from relay.engine.read.pending import BODY_SIZE
from relay.engine.row import ROW_BYTES, Row, fetch_rows, give_rows
from relay.engine.send.message import LINK
from relay.errors import DeadlineError
from relay.jobs.job import Job
from relay.jobs.work import Answer, Save
from relay.logger import get_logger
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.target import Trace
from relay.servers.postgres.database import connect_async, one

log = get_logger(__name__)

# The lists of a large outbox take longer than what a role may be limited to.
PREPARE = SQL("SET statement_timeout = 0; SET jit = off; SET plan_cache_mode = force_custom_plan")

# Marks that had begun when the job was made carry a time before it, and may not be visible yet.
MARKING = SQL("""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = to_regclass({sent})
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")

LIST = SQL("DECLARE replay_rows SCROLL CURSOR WITH HOLD FOR {places}")
PLACES = SQL("""
    SELECT id, (sent_at AT TIME ZONE 'UTC')::date AS day, ctid::text,
        {size} AS size
    FROM {schema}.message
    WHERE state = 'sent' AND sent_at >= {since} AND sent_at < {until} AND {conditions} AND id > {after}
    ORDER BY id
""")
UNLIST = SQL("CLOSE ALL")
COUNT_LISTED = SQL("MOVE FORWARD ALL IN replay_rows")
TO_START = SQL("MOVE ABSOLUTE 0 IN replay_rows")
NEXT_PLACES = SQL("FETCH {rows} FROM replay_rows")

# Of one day, so that the places are those of one partition. In the order of Row's fields.
READ = SQL("""
    SELECT lane, id, message_id::text, aggregate_type, aggregate_id, event_type,
        coalesce(%(to_exchange)s::text, exchange), coalesce(%(routing_key)s::text, routing_key), content_type,
        {headers_and_trace}, payload, payload_bytes, created_at, 0::smallint, 0, NULL::text, 0, false, NULL::text,
        written_as
    FROM {schema}.message
    WHERE state = 'sent' AND sent_at >= %(first)s::timestamptz AND sent_at < %(next)s::timestamptz
        AND ctid = ANY (%(places)s::tid[])
""")

# Headers, traceparent and tracestate. A row's own headers may have the trace, too.
HEADERS_AND_TRACE = {
    Trace.KEEP: SQL("headers::text, trace_context ->> 'traceparent', trace_context ->> 'tracestate'"),
    Trace.LINK: SQL("""(
            CASE WHEN coalesce(trace_context ->> 'traceparent', headers ->> 'traceparent') ~ {form}
            THEN coalesce(headers, '{{}}') || jsonb_build_object(
                {link}, coalesce(trace_context ->> 'traceparent', headers ->> 'traceparent'))
            ELSE headers END - ARRAY['traceparent', 'tracestate']
        )::text, NULL::text, NULL::text""").format(
        form=Literal("^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"), link=Literal(LINK)
    ),
    Trace.DROP: SQL("(headers - ARRAY['traceparent', 'tracestate'])::text, NULL::text, NULL::text"),
}

# A row that is to go out tomorrow is in nobody's way today.
LOOK = SQL("""
    SELECT last_value, EXISTS (
        SELECT FROM {schema}.message_state WHERE state = 'pending' AND (available_at IS NULL OR available_at <= now())
    )
    FROM {schema}.message_id_seq
""")

MARK_POLL = 0.01  # seconds


class _Place(NamedTuple):
    """Where a selected row lies."""

    id: int
    day: date
    place: str
    size: int


class ReplaySession:
    """A connection that may run one job, until it is closed or lost."""

    def __init__(self, connection: AsyncConnection, database: DatabaseSettings, job: Job) -> None:
        self._connection = connection
        self._schema = database.schema_name
        self._timeout = database.command_timeout
        self._job = job
        self._places: list[_Place] = []
        self._is_listed = False
        self._cursor: AsyncCursor[Any] = connection.cursor(binary=True)
        give_rows(self._cursor)
        self._read = read_statement(self._schema, job)

    @classmethod
    async def open(cls, database: DatabaseSettings, job: Job, save: Save) -> Self:
        """Connect and take the job's lock.

        Raises:
            DatabaseUnavailableError: nothing lets us in.
            ConfigurationError: what lets us in is a pooler that keeps no session.
            BusyError: another process runs the job.
        """
        connection = await connect_async(database, application_name="outbox-relay replay")
        try:
            session = cls(connection, database, job)
            await connection.execute(PREPARE)
            await save.take_lock(connection)
        except BaseException:
            await connection.close()
            raise
        return session

    async def close(self) -> None:
        """Let another process run the job."""
        await self._connection.close()

    @property
    def is_lost(self) -> bool:
        return self._connection.closed

    async def list_rows(self, after: int) -> int:
        """List the selected rows with an id above `after`, and give their number. It takes a scan of their days."""
        await self._wait_marked()
        await self._connection.execute(UNLIST)
        await self._connection.execute(LIST.format(places=places_statement(self._schema, self._job, after)))
        count = (await self._connection.execute(COUNT_LISTED)).rowcount
        await self._connection.execute(TO_START)
        self._places.clear()
        self._is_listed = True
        return count

    async def next_rows(self, after: int, rows: int, size: int) -> list[Row]:
        """Return the next rows above `after` by id, at most about so many and so many bytes; none: that was all."""
        while True:
            if not self._is_listed:
                await self.list_rows(after)
            places = await self._next_places(rows, size)
            found = {row.id: row for part in _by_day(places) for row in await self._read_places(part)}
            if all(place.id in found for place in places):
                return [found[place.id] for place in places]
            # A day was dropped or rewritten (VACUUM FULL) meanwhile: where the rows are now, if they are, a new list
            # tells.
            log.warning("replay.listed_again", replay=self._job.id, after=after)
            self._is_listed = False

    async def call(self, call: Callable[[AsyncConnection], Awaitable[Answer]]) -> Answer:
        """Call with the connection; DeadlineError when the database does not answer."""
        async with self._deadline("the job"):
            return await call(self._connection)

    async def look(self) -> tuple[int, bool]:
        """Return the last id given to a new row, and whether a row is pending that could go out."""
        async with self._deadline("looking at the live rows"):
            cursor = await self._connection.execute(self._sql(LOOK))
            last_id, is_pending = one(await cursor.fetchone())
        return last_id, is_pending

    async def _wait_marked(self) -> None:
        statement = self._sql(MARKING, sent=Literal(f"{self._schema}.message_sent"))
        async with self._deadline("the marks that run"):
            begun = await self._column(statement)
            while begun & await self._column(statement):  # noqa: ASYNC110  (it happens in the database)
                await asyncio.sleep(MARK_POLL)

    async def _next_places(self, rows: int, size: int) -> list[_Place]:
        if len(self._places) < rows:
            async with self._deadline("the list of rows"):
                statement = self._sql(NEXT_PLACES, rows=Literal(rows))
                cursor = await self._connection.execute(statement)
                self._places += [_Place(*place) for place in await cursor.fetchall()]
        count = total = 0
        for place in self._places[:rows]:
            total += place.size + ROW_BYTES
            if count and total > size:
                break
            count += 1
        taken, self._places = self._places[:count], self._places[count:]
        return taken

    async def _read_places(self, places: Sequence[_Place]) -> list[Row]:
        first = datetime.combine(places[0].day, time(), UTC)
        wanted = "{" + ",".join(f'"{place.place}"' for place in places) + "}"
        async with self._deadline("sent rows"):
            values = {
                "first": first,
                "next": first + timedelta(days=1),
                "places": wanted,
                "to_exchange": self._job.to_exchange,
                "routing_key": self._job.routing_key,
            }
            await self._cursor.execute(self._read, values, prepare=True)
            return await fetch_rows(self._cursor)

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise DeadlineError(f"PostgreSQL, {what}", self._timeout) from None

    def _sql(self, statement: SQL, **names: Any) -> Composed:
        return statement.format(schema=Identifier(self._schema), **names)

    async def _column(self, statement: Composed) -> set[Any]:
        return {row[0] for row in await (await self._connection.execute(statement)).fetchall()}


def places_statement(schema: str, job: Job, after: int) -> Composed:
    """Return the SELECT of the places of a job's rows with an id above `after`."""
    selection = SentSelection.from_json(job.filter)
    selected = {"conditions": selection.conditions(), **selection.times_before(job.made_at)}
    return PLACES.format(schema=Identifier(schema), **selected, after=Literal(after), size=BODY_SIZE)


def read_statement(schema: str, job: Job) -> Composed:
    """Return the SELECT of rows of one day by their places."""
    return READ.format(
        schema=Identifier(schema),
        headers_and_trace=HEADERS_AND_TRACE[Trace(job.filter.get("trace", Trace.LINK))],
    )


def _by_day(places: Sequence[_Place]) -> list[list[_Place]]:
    ordered = sorted(places, key=lambda place: place.day)
    return [list(group) for _, group in groupby(ordered, key=lambda place: place.day)]
