"""A publication of all tables, as for Debezium: the relay does all its work, and a subscriber gets the rows."""

from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from aio_pika.abc import AbstractChannel
from psycopg.sql import SQL
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings, Route, Settings, Unroutable
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer, installed
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.publication import publish_all
from tests.support.releases import NEWEST, OLDEST

# A subscriber finds a deleted row by what it gets of it. Before PostgreSQL 18 that has no `lane`. Later ones send it,
# and the expression of the subscriber must not make another.
BY_ID = """
    CREATE UNIQUE INDEX by_id ON outbox.message_pending (id);
    ALTER TABLE outbox.message_pending REPLICA IDENTITY USING INDEX by_id
"""
GETS_LANES = "ALTER TABLE outbox.message ALTER COLUMN lane DROP EXPRESSION"
STATES = "SELECT state, array_agg(id ORDER BY id) FROM outbox.message GROUP BY state"


@pytest.mark.every_postgres
async def test_a_relay_sends_parks_and_sets_aside_under_a_publication_of_all_tables(
    outbox: Outbox, queue: Reader, channel: AbstractChannel, settings: Settings, run_node: RunNode
) -> None:
    """Marks, postponed rows, parked, discarded, set aside, probed and released ones: nothing is refused."""
    await outbox.connection.execute(publish_all(outbox.connection.info.server_version))
    route = Route(event_type="Viewed", exchange="outbox", unroutable=Unroutable.DISCARD)
    base = settings.model_copy(update={"routes": [route]})
    async with run_node(base, max_attempts=2, **NO_SWEEP) as node:
        await outbox.insert_many(200)
        faulty = await outbox.insert_faulty("f")
        unwanted = await outbox.insert("u", event_type="Viewed", exchange="", routing_key="nobody")
        waiting = [await outbox.insert("w", exchange="later") for _ in range(3)]
        await eventually(outbox.is_empty, "all are put away")
        await eventually(lambda: outbox.are_aside(waiting), "those of the lost exchange wait aside")
        assert await outbox.ids("parked") == [faulty]
        assert await outbox.ids("discarded") == [unwanted]

        exchange = await channel.declare_exchange("later", "fanout")
        await queue.queue.bind(exchange)
        await eventually(outbox.is_at_rest, "the route works again, and its rows are sent")

        assert not node.hindrances()
        assert not node.snapshot().database_losses
    await queue.drain_different(203)


@pytest.fixture(params=[OLDEST, NEWEST])
def logical(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server whose log has what a subscriber needs."""
    if request.param not in installed():
        pytest.skip(f"PostgreSQL {request.param} is not installed; as root, `tests/support/packages test` installs it")
    with PostgresServer(request.param, settings={"wal_level": "logical"}) as server:
        yield server


async def test_a_subscriber_gets_what_the_relay_does(
    logical: PostgresServer, broker: BrokerSettings, queue: Reader, run_node: RunNode
) -> None:
    """Each row that is pending, sent or parked here is so there: no change of it is lost."""
    there, here = (logical.create_database(name) for name in ("there", "here"))
    for url in (there, here):
        migrate(DatabaseSettings(url=SecretStr(url)))
    with psycopg.connect(here, autocommit=True) as publisher, psycopg.connect(there, autocommit=True) as subscriber:
        subscriber.execute(GETS_LANES if logical.version >= 18 else BY_ID)
        publisher.execute(publish_all(publisher.info.server_version))
        publisher.execute("SELECT pg_create_logical_replication_slot('reader', 'pgoutput')")
        subscribe = SQL("""
            CREATE SUBSCRIPTION reader CONNECTION {} PUBLICATION everything
            WITH (create_slot = false, copy_data = false)
        """)
        subscriber.execute(subscribe.format(here))
        async with run_node(Settings(database=DatabaseSettings(url=SecretStr(here)), broker=broker), max_attempts=1):
            publisher.execute("""
                INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)
                SELECT 'a', n::text, 'e', '1', CASE n WHEN 7 THEN jsonb_build_object(repeat('x', 129), true) END
                FROM generate_series(1, 100) AS n
            """)
            states = partial(states_of, publisher)
            await eventually(lambda: states().keys() == {"sent", "parked"}, "all are put away")
            await queue.drain(99)
            await eventually(lambda: states_of(subscriber) == states(), "the subscriber has the same rows")
        subscriber.execute("DROP SUBSCRIPTION reader")


def states_of(connection: psycopg.Connection) -> dict[str, list[int]]:
    return dict(connection.execute(STATES).fetchall())
