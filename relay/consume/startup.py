"""Check and maintain the inbox: it answers, has partitions for the next days, and forgets old begun attempts."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import psycopg
from psycopg import errors

from relay.consume.apply.fence import NO_PARTITION
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Transactions
from relay.consume.apply.transactions_factory import open_transactions
from relay.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    DeadlineError,
    OutboxError,
    SchemaError,
    UnavailableError,
)
from relay.logger import get_logger
from relay.runtime.backoff import Backoff, Stopping, wait_for_event
from relay.servers.postgres.compatibility import TABLES_MISSING
from relay.servers.postgres.database import one_line

log = get_logger("relay.consume")

PROBE = "SELECT consumer_name, message_id, message_day, business_key FROM {schema}.processed_message LIMIT 0"
MAY_MAKE_DAYS = """
    SELECT has_function_privilege(format('%%I.ensure_inbox_days(date, integer)', %(schema)s::text), 'EXECUTE')
"""

# Today (UTC) and the two days after it. Any other day that is missing is made when a message of that day comes.
MAKE_NEXT_DAYS = "SELECT {schema}.ensure_inbox_days((now() AT TIME ZONE 'UTC')::date, 3)"
# A message may disappear between two tries: its queue was purged, or the broker dropped it. If it is sent again later,
# the old deaths must not count against it.
FORGET_TRIES = """
    DELETE FROM {schema}.begun_message WHERE consumer_name = %(consumer)s AND begun_at < now() - interval '1 day'
"""
UPKEEP_INTERVAL = 3600.0  # seconds

NOTE = """
    INSERT INTO {schema}.consumer_queue (consumer_name, queue, event_types)
    VALUES (%(consumer)s, %(queue)s, %(event_types)s)
    ON CONFLICT (consumer_name, queue) DO UPDATE SET event_types = excluded.event_types, started_at = now()
"""

ASK = "SELECT 1"
ASK_INTERVAL = 5.0  # seconds


LEFT_BEHIND = """
    SELECT count(*) FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND NOT (%(holds)s AND (partition = %(no_partition)s) = NOT %(by_partition)s)
"""


class StartWait:
    """Waits at a consumer's start for servers that cannot be reached, for so many seconds after `begin`."""

    def __init__(self, queue: str, seconds: float, backoff: Backoff) -> None:
        self._queue = queue
        self._seconds = seconds
        self._backoff = backoff
        self._until = -math.inf  # by the loop's clock

    def begin(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._seconds

    async def until_done(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Return when `prepare` has; it is called again while a server cannot be reached."""
        failures = 0
        while True:
            try:
                return await prepare()
            except (BrokerUnavailableError, DatabaseUnavailableError) as error:
                if not self.goes_on(error):
                    raise
                failures += 1
                await asyncio.sleep(self._backoff.seconds(failures))

    def goes_on(self, error: Exception) -> bool:
        """Whether a server cannot be reached, and the start has time left; the log says what is waited for."""
        goes_on = isinstance(error, UnavailableError) and asyncio.get_running_loop().time() < self._until
        if goes_on:
            log.warning("consumer.waiting", queue=self._queue, reason=str(error))
        return goes_on


async def check_inbox(inbox: Inbox) -> None:
    """Check that the inbox exists, and that the consumer's user may use it.

    Raises:
        DatabaseUnavailableError: no host of the URL accepts a connection.
        SchemaError: the table is missing or of an older release, or a privilege is missing.
        DeadlineError: no answer.
    """
    try:
        async with _opened(inbox) as transactions:
            await transactions.execute(inbox.statement(PROBE))
            ((may_make_days,),) = await transactions.execute(inbox.statement(MAY_MAKE_DAYS), {"schema": inbox.schema})
    except TABLES_MISSING:
        raise SchemaError(
            f"table {inbox.schema}.processed_message is missing in the consumer's database, or of an older release;"
            " `relay migrate` makes it"
        ) from None
    except errors.InsufficientPrivilege:
        may_make_days = False
    except TimeoutError:
        raise DeadlineError("the inbox", inbox.statement_timeout) from None
    if not may_make_days:
        raise SchemaError(
            f"the consumer's database user may not use {inbox.schema}.processed_message; it needs SELECT and INSERT,"
            f" and EXECUTE on {inbox.schema}.ensure_inbox_days, which `relay config roles` grants to outbox_consumer"
        )


def warn_of_single_batches(handlers: Handlers, batch_size: int) -> None:
    """Log the handlers that take lists although each list has only one message."""
    names = handlers.of_batches() if batch_size == 1 else []
    if names:
        log.warning("consumer.batches_of_one", handlers=names, remedy="work=WorkPolicy(batch_size=...)")


async def note_queue(inbox: Inbox, session: InboxSession, queue: str, event_types: Sequence[str] | None) -> None:
    """Write down what this consumer handles, for `relay reconcile`. If the table cannot be written, the log says so.

    Raises:
        DatabaseUnavailableError: no answer.
    """
    note = {
        "consumer": inbox.consumer_name,
        "queue": queue,
        "event_types": None if event_types is None else list(event_types),
    }
    try:
        await session.run(inbox.statement(NOTE), note)
    except DatabaseUnavailableError as error:
        if not isinstance(error.__cause__, errors.UndefinedTable | errors.InsufficientPrivilege):
            raise
        log.warning("consumer.not_noted", queue=queue, reason=one_line(error.__cause__))


async def keep_up(inbox: Inbox) -> None:
    """Make the partitions of the next days each hour, so that no message waits for its day. The log reports failures.

    Attempts that began more than a day ago are forgotten.
    """
    while True:
        try:
            async with _opened(inbox) as transactions:
                await transactions.execute(inbox.statement(MAKE_NEXT_DAYS))
                await transactions.execute(inbox.statement(FORGET_TRIES), {"consumer": inbox.consumer_name})
        except (psycopg.Error, OutboxError, TimeoutError) as error:
            log.warning("inbox.days_blocked", error=one_line(error) or type(error).__name__)
        await asyncio.sleep(UPKEEP_INTERVAL)


async def ask_inbox(inbox: Inbox, session: InboxSession, stopping: asyncio.Event) -> None:
    """Wait until the database answers. Raises Stopping."""
    await session.insist(stopping, inbox.statement(ASK))


async def keep_asking(inbox: Inbox, session: InboxSession, stopping: asyncio.Event) -> None:
    """Query the database every few seconds, so that an idle consumer also notices when it is lost."""
    with suppress(Stopping):
        while True:
            await ask_inbox(inbox, session, stopping)
            await wait_for_event(stopping, ASK_INTERVAL)


@asynccontextmanager
async def _opened(inbox: Inbox) -> AsyncIterator[Transactions]:
    transactions = open_transactions(inbox)
    try:
        await transactions.open()  # inside the `try`: a cancellation may come when it already has the connection
        yield transactions
    finally:
        await transactions.close()


async def warn_of_left_behind(inbox: Inbox, session: InboxSession, *, holds: bool, by_partition: bool = False) -> None:
    """Log how many held messages this consumer will not try, if there are any.

    Args:
        holds: the consumer holds keys in order, and so tries the messages that it has held.
        by_partition: the consumer is a member of a pool.
    Raises:
        DatabaseUnavailableError: no answer.
    """
    own = {
        "consumer": inbox.consumer_name,
        "holds": holds,
        "by_partition": by_partition,
        "no_partition": NO_PARTITION,
    }
    ((count,),) = await session.run(inbox.statement(LEFT_BEHIND), own)
    if count:
        log.error(
            "messages.left_behind",
            consumer=inbox.consumer_name,
            messages=count,
            reason="they were held with another order or another kind of consumer, and this one does not try them. "
            "Run the former consumer until no message is held, or delete them",
        )
