"""The connection for the consumer's own statements, separate from the transactions of its handlers."""

import asyncio
from time import monotonic

import psycopg
from psycopg.sql import Composed

from relay.consume.apply.inbox import Inbox
from relay.consume.apply.transactions import Parameters, Rows
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.hindrances import Outages
from relay.errors import DatabaseUnavailableError, SchemaError
from relay.runtime.backoff import Stopping
from relay.servers.postgres.database import one_line

MISSING = """
    SELECT format('%%I.%%I', %(schema)s::text, name), string_agg(privilege, ', ' ORDER BY privilege)
    FROM unnest(ARRAY['begun_message', 'held_message']) AS name
        CROSS JOIN unnest(ARRAY['DELETE', 'INSERT', 'SELECT', 'UPDATE']) AS privilege
    WHERE has_table_privilege(to_regclass(format('%%I.%%I', %(schema)s::text, name)), privilege) IS NOT TRUE
    GROUP BY name
    ORDER BY name
"""


class InboxSession:
    """One connection to the inbox's database, opened at its first use; each statement is a transaction."""

    def __init__(self, inbox: Inbox, outages: Outages) -> None:
        self._inbox = inbox
        self._outages = outages
        self._transactions = open_transactions(inbox)
        self._turn = asyncio.Lock()
        self._asked_at: float | None = None

    @property
    def silent_for(self) -> float:
        """Return for how many seconds the current statement has had no answer; 0 when no statement runs."""
        return 0.0 if self._asked_at is None else monotonic() - self._asked_at

    async def check(self) -> None:
        """Check that the tables exist, and that the consumer's user may use them.

        Raises:
            DatabaseUnavailableError: no connection.
            SchemaError: a table or a privilege is missing.
        """
        for table, privileges in await self.run(self._inbox.statement(MISSING), {"schema": self._inbox.schema}):
            raise SchemaError(
                f"table {table} is missing in the consumer's database, or its user lacks {privileges} on it:"
                " `relay migrate` makes it, and `relay config roles` prints its grants"
            )

    async def run(self, statement: Composed, *parameters: Parameters) -> Rows:
        """Run a statement once with each of these parameters, in one transaction, and return the rows of the last run.

        Raises:
            DatabaseUnavailableError: the statement failed, or whether it was committed is unknown.
            psycopg.DataError: the statement cannot succeed with these parameters, however often it is repeated.
        """
        try:
            async with self._turn:
                return await self._run(statement, *parameters)
        except psycopg.DataError:
            raise
        except (psycopg.Error, TimeoutError) as error:
            raise DatabaseUnavailableError(one_line(error) or "no answer in time") from error

    async def insist(self, stopping: asyncio.Event, statement: Composed, *parameters: Parameters) -> Rows:
        """Call `run` until it succeeds. Raises Stopping: the statement may not have been done."""
        with self._outages.begin() as outage:
            while not stopping.is_set():
                try:
                    rows = await self.run(statement, *parameters)
                except DatabaseUnavailableError as error:
                    await outage.wait(error, stopping)
                else:
                    outage.end()
                    return rows
        raise Stopping

    async def close(self) -> None:
        await self._transactions.close()

    def unplug(self) -> None:
        """End every wait on the connection at once."""
        self._transactions.unplug()

    async def _run(self, statement: Composed, *parameters: Parameters) -> Rows:
        self._asked_at = monotonic()
        try:
            if self._transactions.is_lost:
                await self._transactions.open()
            return await self._transactions.execute(statement, *parameters)
        except (TimeoutError, asyncio.CancelledError):
            await self._transactions.close()  # its state is unknown
            raise
        finally:
            self._asked_at = None
