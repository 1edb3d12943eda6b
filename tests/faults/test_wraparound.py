"""A server has no transaction id left: it answers reads, and refuses all that writes until a vacuum has freed some."""

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.consume.database_faults import DatabaseFault, fault_of
from relay.operate.doctor.finding import Verdict
from relay.operate.health import OutboxState
from relay.operate.schema.migrate import migrate
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import installed
from tests.doctor.findings import look
from tests.engine.conftest import Reader, RunNode
from tests.support.eventually import eventually
from tests.support.releases import NEWEST, OLDEST
from tests.support.wraparound import WrappingServer

INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"
PENDING = "SELECT FROM outbox.message_pending"


@pytest.fixture(params=[OLDEST, NEWEST])
def server(request: pytest.FixtureRequest) -> Iterator[WrappingServer]:
    """A server of this test alone."""
    if request.param not in installed():
        pytest.skip(f"PostgreSQL {request.param} is not installed; as root, `tests/support/packages test` installs it")
    with WrappingServer(request.param) as started:
        yield started


async def test_a_relay_waits_and_is_named_until_a_vacuum_frees_ids(
    server: WrappingServer, broker: BrokerSettings, queue: Reader, run_node: RunNode
) -> None:
    url = server.create_database("shop")
    settings = Settings(database=DatabaseSettings(url=SecretStr(url)), broker=broker)
    migrate(settings.database)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(INSERT)
    server.use_up()

    with psycopg.connect(url, autocommit=True) as connection:
        async with run_node(settings) as node:
            await eventually(lambda: "wraparound" in node.hindrances().get("database", ""), "it says why it waits")
            tables = Tables(connection, "outbox")
            await eventually(
                lambda: read_status(tables).state is OutboxState.STALLED, "the row has waited for a second"
            )
            status = read_status(tables)
            (finding,) = await asyncio.to_thread(look, settings, "database.transaction_ids")
            with pytest.raises(psycopg.errors.ProgramLimitExceeded) as refused:
                connection.execute(INSERT)
            with pytest.raises(psycopg.errors.ProgramLimitExceeded) as too_long:
                connection.execute("SELECT repeat('x', 2000000000)")
            server.free()
            await eventually(lambda: connection.execute(PENDING).rowcount == 0, "it goes on")
        (freed,) = await asyncio.to_thread(look, settings, "database.transaction_ids")

    assert status.reasons[0].startswith("PostgreSQL has no transaction id left: all that writes waits, relays too;")
    assert not any("no relay is alive" in reason for reason in status.reasons)
    assert (finding.verdict, freed.verdict) == (Verdict.FAILED, Verdict.OK)
    # A consumer waits, and counts no attempt; the same SQLSTATE of another cause is the message's.
    assert [fault_of(each.value) for each in (refused, too_long)] == [DatabaseFault.OUTAGE, DatabaseFault.MESSAGE]
    assert len(await queue.ids(1)) == 1


def test_a_server_without_ids_and_without_relays(server: WrappingServer) -> None:
    url = server.create_database("shop")
    migrate(DatabaseSettings(url=SecretStr(url)))
    server.use_up()

    with psycopg.connect(url, autocommit=True) as connection:
        status = read_status(Tables(connection, "outbox"))

    assert status.reasons[0].startswith("PostgreSQL has no transaction id left: all that writes waits; VACUUM in ")
    assert "no relay is alive: start `relay run`" in status.reasons
