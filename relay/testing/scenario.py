"""A relay and consumers on real servers, for a test from the write to the effect."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from psycopg.sql import SQL

from relay.config.loading import load
from relay.consume import Consumer
from relay.consume.apply.inbox import ID_OF_WRITER
from relay.engine.node import Node
from relay.errors import ConfigurationError, OutboxError
from relay.operate.session import session
from relay.outbox.events import Event
from relay.servers.postgres.tables import Tables
from relay.servers.rabbitmq import topology
from relay.testing import hindering, reading
from relay.testing.matching import Expected, Key
from relay.testing.written import Written

LOOK_INTERVAL = 0.02  # seconds between two looks at what is waited for

# The inbox knows the message by its id, or by that of the message and its writer.
IS_APPLIED = SQL("""
    SELECT EXISTS (
        SELECT FROM {schema}.processed_message WHERE consumer_name = %(consumer)s AND message_id IN (
            SELECT %(message_id)s::uuid
            UNION ALL
            SELECT {id_of_writer} FROM {schema}.message_state WHERE message_id = %(message_id)s
        )
    )
""")

NEWEST = SQL("SELECT coalesce(max(id), 0) FROM {schema}.message_state")


class Scenario:
    """Runs a relay and consumers in a block, and waits for what follows from the test's writes.

    async with Scenario(relay_database, relay_broker, Consumer(...), config="relay.toml") as scenario:
        message_id = place_order(connection)
        await scenario.until_applied(message_id, "totals")

    A wait that takes too long raises TimeoutError, whose words say what hinders relay and consumers, which rows wait,
    and what has failed.

    Args:
        database_url, broker_url: such as the fixtures `relay_database` and `relay_broker` return.
        consumers: not started yet, with these servers; their inboxes are in this database.
        config: a relay.toml, whose topology is declared, and whose routes and settings the relay has.
        timeout: seconds for each wait that is not given others.
    """

    def __init__(
        self,
        database_url: str,
        broker_url: str,
        *consumers: Consumer,
        config: Path | str | None = None,
        timeout: float = 5,
    ) -> None:
        environment = {"RELAY_DATABASE_URL": database_url, "RELAY_BROKER_URL": broker_url}
        self._settings = load(config=Path(config) if config else None, environ=environment).settings
        self._judges = {consumer: hindering.ToldJudge(consumer) for consumer in consumers}
        self._timeout = timeout
        self._node = Node(self._settings)
        self._running = AsyncExitStack()
        self._since = 0  # the id of the newest row at the begin

    async def __aenter__(self) -> Self:
        """Declare the topology, and return when relay and consumers are ready.

        Raises:
            ConfigurationError: the topology cannot be declared so.
            TimeoutError: the relay is not ready in time.
            OutboxError: a server cannot be reached, or a consumer cannot start.
        """
        declared = await topology.apply(self._settings.broker, self._settings.topology)
        if bad := [each for each in declared if each.standing in topology.BAD]:
            raise ConfigurationError("; ".join(f"{each.kind} {each.name}: {each.words}" for each in bad))
        self._since = await asyncio.to_thread(self._newest)
        async with AsyncExitStack() as stack:
            relaying = asyncio.create_task(self._node.run(), name="scenario.relay")
            stack.push_async_callback(self._end, relaying)
            for consumer, judge in self._judges.items():
                consumer.setup.judge = judge
                await stack.enter_async_context(consumer)
            await self.until(lambda: self._node.is_ready() or relaying.done(), "the relay is ready")
            if relaying.done():
                relaying.result()
            self._running = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.__aexit__(kind, error, trace)

    async def until_applied(
        self,
        message_id: UUID | str | Event | Written | type,
        consumer_name: str,
        *,
        key: Key | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Return when this consumer has applied the message.

        Args:
            message_id: of the message, or an event or row that has it. Or the name of a type, or a declared class: then
                it is the newest such row that was written since the scenario began.
            key: for a type: `(aggregate_type, aggregate_id)`, or `aggregate_id` alone.
        Raises:
            TimeoutError: it has not.
        """
        wanted = _wanted(message_id, key)

        def is_applied() -> bool:
            with session(self._settings.database) as tables:
                values = {"message_id": self._id_of(tables, wanted), "consumer": consumer_name}
                return bool(tables.one(IS_APPLIED, values, id_of_writer=SQL(ID_OF_WRITER))[0])

        await self._until(
            lambda: asyncio.to_thread(is_applied),
            f"{consumer_name} applies {wanted}",
            timeout,
            lambda tables: hindering.of_message(tables, self._id_of(tables, wanted), consumer_name, self._judges),
        )

    async def until(
        self,
        condition: Callable[[], bool | Awaitable[bool]],
        what: str = "the condition",
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Return when the condition holds. It is a function or a coroutine function.

        Raises:
            TimeoutError: it does not; `what` names it.
        """
        await self._until(condition, what, timeout, lambda _: [])

    async def _until(
        self,
        condition: Callable[[], bool | Awaitable[bool]],
        what: str,
        timeout: float | None,  # noqa: ASYNC109
        about: Callable[[Tables], list[str]],
    ) -> None:
        """As `until`; `about` returns what is known of that which is waited for."""
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                while True:
                    held = condition()
                    if held if isinstance(held, bool) else await held:
                        return
                    await asyncio.sleep(LOOK_INTERVAL)
        except TimeoutError:
            lines = [f"{what}: not within {seconds:g} s", *await asyncio.to_thread(self._report, about)]
        raise TimeoutError("\n  ".join(lines))

    def _report(self, about: Callable[[Tables], list[str]]) -> list[str]:
        """Return what may be the cause, a line each."""
        lines = [f"relay: {part}: {reason}" for part, reason in self._node.hindrances().items()]
        for consumer, judge in self._judges.items():
            lines += hindering.of_consumer(consumer, judge)
        broker, consumers = self._settings.broker, list(self._judges)
        try:
            with session(self._settings.database) as tables:
                lines += about(tables)
                lines += hindering.of_tables(tables, broker, [consumer.queue for consumer in consumers])
            lines += hindering.of_retries(broker, consumers)
        except OutboxError as error:
            return [*lines, str(error)]
        return lines or ["nothing hinders relay and consumers, no row waits, and nothing has failed"]

    def _newest(self) -> int:
        with session(self._settings.database) as tables:
            return int(tables.one(NEWEST)[0])

    def _id_of(self, tables: Tables, wanted: UUID | Expected) -> UUID | None:
        """Return the id of what is wanted; None: there is no such row yet."""
        if isinstance(wanted, UUID):
            return wanted
        texts = tables.execute(reading.READ_SINCE, {"since": self._since}).fetchall()
        rows = [row for row in (reading.decoded(text) for (text,) in texts) if not wanted.differences(row)]
        return rows[-1].message_id if rows else None

    async def _end(self, relaying: asyncio.Task[None]) -> None:
        self._node.start_draining()
        await relaying


def _wanted(message: object, key: Key | None) -> UUID | Expected:
    """Return the id of a message, or what its row must be."""
    match message:
        case type():
            return Expected(message, key)
        case UUID():
            id_ = message
        case Event() | Written():
            id_ = message.message_id
        case str():
            try:
                id_ = UUID(message)
            except ValueError:
                return Expected(message, key)
        case _:
            kind, row = type(message).__name__, "Outbox(connection).assert_written(...)"
            raise TypeError(f"{kind} has no message_id: give a row, as of {row}, or a type and key=")
    if key is not None:
        raise TypeError(f"key is {key!r}, and the message is given by its id: key is for a type")
    return id_
