"""A node carries what is committed, through lost connections, and drains."""

import json
from datetime import UTC, datetime

import aio_pika
import pytest
from pydantic import SecretStr

from relay.config.settings import Ordering, Route, Settings
from relay.engine.settle.mark import KEPT
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.roles import SCRIPT


@pytest.mark.parametrize("ordering", Ordering)
async def test_committed_rows_arrive_once_and_are_marked(
    outbox: Outbox, queue: Reader, run_node: RunNode, ordering: Ordering
) -> None:
    await outbox.insert_many(2000)

    async with run_node(ordering=ordering):
        await eventually(outbox.is_empty, "every row marked")

    assert sorted(await queue.ids(2000)) == await outbox.ids("sent")


async def test_a_message_says_who_it_is(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    id_ = await outbox.insert("42", headers=json.dumps({"tenant": "a"}), payload='{"amount": 1.50,  "x": "\\\\"}')

    async with run_node():
        (message,) = await queue.drain(1)

    assert message.body == b'{"amount": 1.50,  "x": "\\\\"}'
    assert message.message_id == str(await outbox.column("message_id", id_))
    assert (message.type, message.app_id, message.content_type) == ("InvoiceIssued", "outbox-relay", "application/json")
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.routing_key == "customer.InvoiceIssued"
    headers = {name: value for name, value in message.headers.items() if name != "x-delivery-count"}  # the broker's
    assert headers == {
        "x-outbox-id": id_,
        "x-outbox-lane": await outbox.column("lane", id_),
        "x-aggregate-type": "customer",
        "x-aggregate-id": "42",
        "x-outbox-writer": await outbox.column("written_as", id_),
        "tenant": "a",
    }
    created: datetime = await outbox.column("created_at", id_)
    assert message.timestamp == created.replace(microsecond=0)


async def test_no_row_can_name_another_writer(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    forged = json.dumps({"x-outbox-writer": "billing"})
    known = await outbox.insert(headers=forged, written_as="shipping")
    escaped = await outbox.insert(headers=forged, written_as='ein "Büro"')
    unknown = await outbox.insert(headers=forged, written_as="")  # from before migration 0021

    async with run_node():
        messages = await queue.drain(3)

    writers = {message.headers["x-outbox-id"]: message.headers.get("x-outbox-writer") for message in messages}
    assert writers == {known: "shipping", escaped: 'ein "Büro"', unknown: None}


async def test_the_default_exchange_is_declared_when_it_is_missing(
    outbox: Outbox, channel: aio_pika.abc.AbstractChannel, run_node: RunNode
) -> None:
    async with run_node() as node:
        await eventually(node.is_ready, "ready")

    exchange = await channel.declare_exchange("outbox", passive=True)
    queue = await channel.declare_queue("late", durable=True)
    await queue.bind(exchange, "customer.*")
    await outbox.insert()
    async with run_node():
        await eventually(outbox.is_empty, "sent")
    assert await queue.get(no_ack=True)


async def test_a_sent_row_keeps_every_column(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    id_ = await outbox.insert(
        None,
        headers=json.dumps({"tenant": "a"}),
        payload_bytes=b"\\x00\\",
        content_type="application/octet-stream",
        exchange="outbox",
        routing_key="customer.x",
        available_at=datetime(2026, 1, 1, tzinfo=UTC),
        last_error="once",
        writer="tests",
        batch_id=7,
        trace_context=json.dumps({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
    )
    whole = "SELECT to_jsonb(message) - '{state,sent_at}'::text[] FROM outbox.message WHERE id = %s"
    before = await (await outbox.connection.execute(whole, [id_])).fetchone()

    async with run_node():
        await eventually(outbox.is_empty, "sent")

    assert await (await outbox.connection.execute(whole, [id_])).fetchone() == before
    assert await outbox.column("sent_at", id_) is not None
    columns = await outbox.connection.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = 'outbox' AND table_name = 'message'"
    )
    kept = {name.strip() for name in KEPT.as_string().split(",")}
    assert {row[0] for row in await columns.fetchall()} == {*kept, "lane", "state", "sent_at", "quarantine"}


async def test_the_relay_s_role_suffices(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    database_url: str,
    run_node: RunNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.engine.settle.quarantine.PROBE_INITIAL", 5.0)  # no probe is on its way at the end
    await outbox.connection.execute(SCRIPT.encode())
    as_relay = settings.database.model_copy(update={"url": SecretStr(f"{database_url}?options=-crole%3Doutbox_relay")})
    fine, lost, behind = [await outbox.insert(), await outbox.insert_faulty("2"), await outbox.insert("2")]
    waiting = [await outbox.insert("3", exchange="missing"), await outbox.insert("3")]

    async with run_node(settings.model_copy(update={"database": as_relay}), max_attempts=2):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("sent") == [fine]
    assert await outbox.ids("parked") == [lost, behind]
    assert await outbox.ids("quarantined") == waiting


async def test_exchange_and_queue_can_be_addressed_directly(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    id_ = await outbox.insert(exchange="", routing_key="events")

    async with run_node():
        assert await queue.ids(1) == [id_]


async def test_routes_of_the_configuration_decide(
    outbox: Outbox, channel: aio_pika.abc.AbstractChannel, settings: Settings, run_node: RunNode
) -> None:
    exchange = await channel.declare_exchange("invoices", aio_pika.ExchangeType.DIRECT, durable=True)
    queue = await channel.declare_queue("invoices", durable=True)
    await queue.bind(exchange, "for-42")
    routed = settings.model_copy(update={"routes": (Route(exchange="invoices", routing_key="for-{aggregate_id}"),)})
    id_ = await outbox.insert("42")

    async with run_node(routed):
        await eventually(outbox.is_empty, "sent")

    message = await queue.get(no_ack=True)
    assert message.headers["x-outbox-id"] == id_


async def test_a_new_row_wakes_a_sleeping_node(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    # Polling is out of the question here: only the doorbell can be so quick.
    async with run_node(poll_interval=60, sweep_interval=60, heartbeat_interval=60) as node:
        await eventually(node.is_ready, "ready")
        await eventually(outbox.has_sleeping_relay, "asks writers to ring")

        for _ in range(3):
            id_ = await outbox.insert()
            assert await queue.ids(1) == [id_]
            await eventually(outbox.has_sleeping_relay, "sleeps again")


async def test_a_lost_database_session_is_replaced(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    async with run_node() as node:
        await eventually(node.is_ready, "ready")
        await outbox.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'outbox-relay' AND datname = current_database()"
        )
        id_ = await outbox.insert()

        assert await queue.ids(1) == [id_]


async def test_a_lost_broker_connection_is_replaced_and_burns_no_attempt(
    outbox: Outbox, queue: Reader, run_node: RunNode, rabbitmq: RabbitServer, broker_url: str
) -> None:
    async with run_node() as node:
        await eventually(node.is_ready, "ready")
        await outbox.insert_many(5000)
        rabbitmq.ctl("close_all_connections", "--vhost", broker_url.rpartition("/")[2], "test")
        await eventually(outbox.is_empty, "everything sent")

    sent = await outbox.ids("sent")
    assert len(sent) == 5000
    cursor = await outbox.connection.execute("SELECT max(attempts) FROM outbox.message WHERE state = 'sent'")
    assert await cursor.fetchone() == (0,)


async def test_told_to_stop_before_there_is_a_broker_it_ends(settings: Settings, run_node: RunNode) -> None:
    nowhere = settings.broker.model_copy(update={"url": SecretStr("amqp://127.0.0.1:1/")})

    async with run_node(settings.model_copy(update={"broker": nowhere})) as node:
        # Beyond that it waits for nothing but the broker; after `start_timeout` it would raise.
        await eventually(lambda: "database" not in node.hindrances(), "it has its session")


async def test_draining_settles_what_is_in_flight_and_leaves_the_rest(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    await outbox.insert_many(30_000)

    async with run_node() as node:
        await eventually(lambda: node.in_flight > 0, "something in flight")

    sent = await outbox.ids("sent")
    assert sent
    assert sorted(await queue.ids(len(sent))) == sent
