"""The outbox table as the buffer: a relay, which may run in this process, sends its rows."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import TupleRow
from psycopg.sql import SQL, Identifier, Literal

from relay.config.settings import Settings, Unroutable
from relay.engine.row import Row as EngineRow
from relay.engine.send.routes import Router
from relay.engine.session.session import SESSION_LOST
from relay.errors import (
    AccessError,
    CommitUnknownError,
    DatabaseUnavailableError,
    NotAcceptedError,
    no_answer_within,
)
from relay.outbox.insert import copy_async
from relay.outbox.row import NewRow
from relay.publisher.buffer import BufferedRows
from relay.publisher.embedded import EmbeddedRelay
from relay.publisher.entry import Unaccepted
from relay.runtime.backoff import backoff
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance
from relay.servers.postgres.compatibility import TABLES_MISSING, tables_missing
from relay.servers.postgres.database import (
    SESSION_SETTINGS,
    connect_async,
    hindrance_of,
    is_lent,
    is_unreplicated,
    one,
    one_line,
    public_reason,
)

COLUMNS = (*NewRow._fields, "writer", "created_at")
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
RETRY_INITIAL, RETRY_MAX = 0.05, 1.0  # seconds
UNREACHABLE = (*SESSION_LOST, DatabaseUnavailableError, TimeoutError)


MAY_WRITE = SQL("""
    SELECT bool_and(has_column_privilege({table}, name, 'INSERT'))
        AND has_sequence_privilege(pg_get_serial_sequence({table}, 'id'), 'USAGE')
    FROM unnest(%(columns)s::text[]) AS name
""")

# There is no index by writer, as it would slow down every writer, and Spark. So this reads all pending rows, and the
# pauses between two queries are long in comparison (relay/publisher/delivery_path.py).
LEFT = SQL("""
    SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state <> 'pending'), current_user
    FROM {schema}.message_state
    WHERE state IN ('pending', 'quarantined', 'parked') AND writer = %(writer)s
""")


class TableBuffer:
    """The rows of one writer, on a separate connection. It need not be a session: a pooler may lend it.

    When the connection is lost at the commit, it is unknown whether the rows were committed. The publisher writes them
    again, and so they may be sent twice, with the same message_id.

    Attributes:
        written_as: see `Buffer`; known once it is open.
    """

    publisher = None

    def __init__(self, settings: Settings, writer: str, *, embedded: bool) -> None:
        self._database = settings.database
        self._writer = writer
        self._router = Router.of(settings)
        self._relay = EmbeddedRelay(settings) if embedded else None
        self._health = Health()
        self._connection: psycopg.AsyncConnection | None = None
        self.written_as = b""
        self._is_unreplicated = False
        self._stuck = 0  # rows, at the last look
        self._turn = asyncio.Lock()  # a COPY has several answers, and no other statement may run between them

    @property
    def reasons(self) -> Sequence[str]:
        stuck = f"{self._stuck} rows are parked, in quarantine, or behind such a row: `relay status` tells why"
        relay = self._relay.reasons if self._relay is not None else ()
        return (*self._health.reasons, *([stuck] if self._stuck else []), *relay)

    def lets_go(self, row: EngineRow) -> bool:
        return self._router.unroutable(row) is Unroutable.SENT  # a discarded row stays in the table

    async def open(self) -> None:
        schema = self._database.schema_name
        lack = "a durable publisher needs the role outbox_publisher, which `relay config roles` prints"
        try:
            # Checked now, not at the first outage of the broker.
            (may_write,) = await self._ask(MAY_WRITE, table=Literal(f"{schema}.message"), columns=list(COLUMNS))
            await self._left()
        except TABLES_MISSING:
            raise tables_missing(schema) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise AccessError(f"{error.diag.message_primary}: {lack}") from None
        if not may_write:
            raise AccessError(f"this role may not write {schema}.message: {lack}")

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def write(self, entries: Sequence[Unaccepted]) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._database.command_timeout
        rows = [(*entry.written, self._writer, _moment(entry.row.created_at)) for entry in entries]
        failures = 0
        while True:
            try:
                async with self._use() as connection:
                    # A lent session may have an application's isolation; a transaction of the connection has ours.
                    async with connection.transaction() if is_lent(connection) else nullcontext():
                        await copy_async(connection, COLUMNS, rows, self._database.schema_name)
                    if self._is_unreplicated:
                        raise CommitUnknownError
            except UNREACHABLE as error:
                reason = hindrance_of(error) or Hindrance.plain(no_answer_within(self._database.command_timeout))
                self._health.degrade("database", reason)
                if loop.time() >= give_up_at:
                    raise NotAcceptedError(f"the outbox table could not be written: {reason}") from error
                failures += 1
                await asyncio.sleep(backoff(failures, RETRY_INITIAL, RETRY_MAX))
            except psycopg.Error as error:
                raise NotAcceptedError(f"the outbox table refused it: {one_line(error)}") from error
            else:
                self._health.heal("database")
                return

    async def left(self) -> BufferedRows:
        try:
            left = await self._left()
        except psycopg.Error as error:
            raise DatabaseUnavailableError(one_line(error), public=public_reason(error)) from error
        self._stuck = left.stuck
        return left

    async def run(self) -> None:
        if self._relay is not None:
            await self._relay.run()

    def stop(self) -> None:
        if self._relay is not None:
            self._relay.stop()

    async def _left(self) -> BufferedRows:
        waiting, stuck, role = await self._ask(LEFT, writer=self._writer)
        self.written_as = role.encode()
        return BufferedRows(waiting, stuck)

    async def _ask(self, question: SQL, table: Literal | None = None, **values: Any) -> TupleRow:
        """Return one row. The statement is not prepared: a pooler may run the next one on another server process."""
        statement = question.format(schema=Identifier(self._database.schema_name), table=table)
        try:
            async with self._use() as connection:
                return one(await (await connection.execute(statement, values, prepare=False)).fetchone())
        except UNREACHABLE as error:
            raise DatabaseUnavailableError(one_line(error), public=public_reason(error)) from error

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[psycopg.AsyncConnection]:
        """Yield the connection for this task alone; a connection that has failed is closed."""
        async with self._turn:
            if self._connection is None or self._connection.closed:
                self._is_unreplicated = False
                self._connection = await connect_async(
                    self._database,
                    may_be_lent=True,
                    session=SESSION_SETTINGS,
                    application_name=f"outbox-publisher {self._writer}",
                )
                self._connection.add_notice_handler(self._heed)
            try:
                async with asyncio.timeout(self._database.command_timeout):
                    yield self._connection
            except BaseException:
                await self._connection.close()
                raise

    def _heed(self, notice: psycopg.errors.Diagnostic) -> None:
        self._is_unreplicated |= is_unreplicated(notice)


def _moment(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)
