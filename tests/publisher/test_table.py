"""The outbox table as the buffer: its rows are what was published, and the rights that it takes."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from aio_pika.abc import AbstractIncomingMessage
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings, Route, Settings
from relay.errors import AccessError, NotAcceptedError, SchemaError
from relay.outbox import Event, add
from relay.publisher import DurablePublisher, Mode
from relay.testing.servers.postgres import PostgresServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.publisher.events import NOWHERE, first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually
from tests.support.proxied import proxied, with_port
from tests.support.proxy import FaultProxy
from tests.support.roles import SCRIPT

EVENTS = {
    "json": {
        "payload": '{"a": 1.50,  "b": "\\\\"}',
        "headers": {"tenant": "a", "n": 7, "x": 1.5, "deep": [{"k": None}]},
    },
    "bytes": {"payload": b"\x00\xff", "content_type": "application/octet-stream"},
    "text": {"payload": "grün", "content_type": "text/plain", "routing_key": "sensor.Other"},
    "no key": {"payload": {"a": 1}, "aggregate_id": None},
    "routed": {"payload": {"a": 1}, "aggregate_type": "probe"},
}
ROUTES = (Route(aggregate_type="probe", exchange="outbox", routing_key="p.{aggregate_id}.{event_type}"),)


def event(**fields: Any) -> Event:
    return Event(**{"aggregate_type": "sensor", "aggregate_id": "42", "event_type": "Measured", **fields})


# What differs between two messages; without a key the lane does, too.
DIFFERS = {"headers", "message_id", "timestamp", "delivery_tag", "consumer_tag", "redelivered"}
HEADERS_DIFFER = {"x-outbox-id", "x-delivery-count"}


def on_the_wire(message: AbstractIncomingMessage) -> dict[str, Any]:
    """Return all that a consumer gets but what differs between two messages."""
    has_key = "x-aggregate-id" in message.headers
    differ = HEADERS_DIFFER if has_key else HEADERS_DIFFER | {"x-outbox-lane"}
    return {
        **{name: value for name, value in message.info().items() if name not in DIFFERS},
        "headers": {name: value for name, value in message.headers.items() if name not in differ},
        "body": message.body,
    }


@pytest.fixture
def sensors(database: DatabaseSettings, broker: BrokerSettings) -> DurablePublisher:
    return DurablePublisher(database, broker=broker, name="sensors", routes=ROUTES)


@pytest.mark.parametrize("fields", EVENTS.values(), ids=EVENTS.keys())
async def test_on_the_wire_an_event_is_what_the_relay_makes_of_its_row(
    sensors: DurablePublisher,
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    fields: dict[str, Any],
    settings: Settings,
) -> None:
    began = datetime.now(UTC).replace(microsecond=0)
    async with sensors:
        await sensors.publish(event(**fields))
        assert sensors.state.confirmed == 1
    (direct,) = await queue.drain(1)
    assert direct.timestamp is not None
    assert began <= direct.timestamp <= datetime.now(UTC)

    await add(outbox.connection, event(**fields), autocommit=True)
    async with run_node(settings.model_copy(update={"routes": ROUTES})):
        (relayed,) = await queue.drain(1)

    assert on_the_wire(direct) == on_the_wire(relayed)
    assert int(str(direct.headers["x-outbox-id"])) < 0  # no row of the table


async def test_a_deployed_relay_drains_what_was_buffered(
    database: DatabaseSettings, broker: BrokerSettings, queue: Reader, run_node: RunNode
) -> None:
    async with proxied(broker) as (proxy, far), run_node():
        proxy.refusing = True
        async with DurablePublisher(database, broker=far, name="sensors") as sensors:
            ids = await publish_all(sensors, range(10))
            assert first_of_each(await queue.drain(10)) == {"a": ids}
            assert sensors.state.mode is Mode.BUFFERED

            proxy.refusing = False
            await eventually(lambda: is_direct(sensors), "nothing of ours is in the table")


async def test_rows_of_others_do_not_matter(sensors: DurablePublisher, outbox: Outbox, queue: Reader) -> None:
    await outbox.insert_many(10)

    async with sensors:
        await publish_all(sensors, [1])
        assert sensors.state.confirmed == 1


@pytest.mark.parametrize("state", ["pending", "quarantined", "parked"])
async def test_what_is_left_of_its_name_goes_first(
    sensors: DurablePublisher, outbox: Outbox, queue: Reader, state: str
) -> None:
    left = await outbox.insert(writer="sensors", state=state)

    async with sensors:
        await publish_all(sensors, [1])
        assert (sensors.state.confirmed, sensors.state.buffered) == (0, 1)
        await outbox.connection.execute("DELETE FROM outbox.message WHERE id <> %s", [left])
        await outbox.connection.execute("UPDATE outbox.message SET state = 'discarded' WHERE id = %s", [left])
        await eventually(lambda: is_direct(sensors), "nothing is left")


async def test_the_role_for_publishers_is_enough_and_that_for_writers_is_not(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    await outbox.connection.execute(SCRIPT.encode())

    def of_role(role: str) -> DurablePublisher:
        url = make_conninfo(database.url.get_secret_value(), options=f"-crole={role}")
        return DurablePublisher(DatabaseSettings(url=SecretStr(url)), broker=NOWHERE, name="sensors")

    async with of_role("outbox_publisher") as publisher:
        await publish_all(publisher, [1])
        assert publisher.state.buffered == 1
    with pytest.raises(AccessError, match="outbox_publisher"):
        await of_role("outbox_writer").__aenter__()


async def test_a_database_without_the_tables_is_named(postgres: PostgresServer) -> None:
    database = DatabaseSettings(url=SecretStr(postgres.url("postgres")))

    with pytest.raises(SchemaError, match="relay migrate"):
        await DurablePublisher(database, broker=NOWHERE, name="sensors").__aenter__()


@pytest.fixture
async def database_proxy(database: DatabaseSettings) -> AsyncIterator[FaultProxy]:
    async with proxied(database) as (proxy, _):
        yield proxy


@pytest.fixture
def cut_off(database: DatabaseSettings, database_proxy: FaultProxy) -> DurablePublisher:
    """A publisher without a broker, whose database can be taken, too."""
    far = with_port(database, database_proxy.port)
    impatient = far.model_copy(update={"command_timeout": 3.0, "connect_timeout": 2.0})
    return DurablePublisher(impatient, broker=NOWHERE, name="sensors")


async def test_a_lost_database_connection_is_replaced(
    cut_off: DurablePublisher, outbox: Outbox, database_proxy: FaultProxy
) -> None:
    async with cut_off as sensors:
        await publish_all(sensors, [1])
        database_proxy.cut()
        await publish_all(sensors, [2])

    assert len(await outbox.ids("pending")) == 2


async def test_with_neither_broker_nor_database_an_event_is_not_accepted(
    cut_off: DurablePublisher, outbox: Outbox, database_proxy: FaultProxy
) -> None:
    event = measured(1)
    async with cut_off as sensors:
        database_proxy.refusing = True
        database_proxy.cut()
        with pytest.raises(NotAcceptedError, match="outbox table"):
            await sensors.publish(event)
        assert any(reason.startswith("database: ") for reason in sensors.state.reasons)

        database_proxy.refusing = False
        await sensors.publish(event)

    assert len(await outbox.ids("pending")) == 1
