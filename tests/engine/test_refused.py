"""What the broker refuses is tried again, then parked with its words; what is delayed waits."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from relay.engine.send.message import OURS
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


async def test_what_is_too_large_is_parked_unsent(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    large = await outbox.insert("1", payload=json.dumps("x" * 5000))
    fine = await outbox.insert("2")

    async with run_node(max_message_bytes=4096):
        await eventually(outbox.is_empty, "nothing pending")

    await assert_parked_at_once(outbox, large)
    assert "max_message_bytes" in await outbox.column("last_error", large)
    assert await queue.ids(1) == [fine]


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param('{"n": 1e400}', id="a number beyond all others"),
        pytest.param('{"n": 18446744073709551615}', id="more than 64 bits"),
        pytest.param(f'{{"large": "{"x" * 200_000}"}}', id="more than a frame"),
        pytest.param(f'{{"flat": "{"x" * 131_000}"}}', id="more than a frame, with the properties"),
        pytest.param(f'{{"deep": {"[" * 65}{"]" * 65}}}', id="deeper than consumers read"),
        pytest.param('{"CC": ["elsewhere"]}', id="CC"),
        pytest.param('{"BCC": ["elsewhere"]}', id="BCC"),
        pytest.param('{"x-cc": ["elsewhere"]}', id="x-cc"),
        pytest.param(f'{{"n": [{", ".join(["1e131000"] * 9000)}]}}', id="a gigabyte as text"),
        pytest.param(f'{{"n": [{", ".join(["1." + "0" * 16383] * 9000)}]}}', id="150 MB of zeros"),
        pytest.param(f'{{"deep": {"[" * 900}{"]" * 900}}}', id="deep"),
        pytest.param(f'{{"deep": {"[" * 13_000}{"]" * 13_000}}}', id="deeper than the server's stack"),
        pytest.param(f'{{"deep": {"[" * 2000}{"]" * 2000}}}', id="deeper"),
        pytest.param(f'{{"in": {{"{"x" * 129}": 1}}}}', id="a long name"),
    ],
)
async def test_headers_that_only_postgresql_takes_are_parked_and_stop_nobody(
    outbox: Outbox, queue: Reader, run_node: RunNode, headers: str
) -> None:
    odd, fine = await outbox.insert("1", headers=headers), await outbox.insert("2")

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().broker_losses == {}

    assert await queue.ids(1) == [fine]
    await assert_parked_at_once(outbox, odd)


@pytest.mark.parametrize("column", ["writer", "trace_context"])
async def test_what_is_large_and_not_sent_is_parked_too(
    outbox: Outbox, queue: Reader, run_node: RunNode, column: str
) -> None:
    """A mark moves the whole row: a few of hundreds of megabytes took longer than a statement may, again and again."""
    digits = "SELECT string_agg(md5(n::text), '') FROM generate_series(1, 4000) AS n"
    large = await (await outbox.connection.execute(f"SELECT to_json(({digits}))::text".encode())).fetchone()
    assert large is not None
    odd = await outbox.insert("1", **{column: large[0]})
    fine = await outbox.insert("2", **{column: '"small"'})

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")

    assert await queue.ids(1) == [fine]
    await assert_parked_at_once(outbox, odd)
    assert "writer and trace_context of 1" in await outbox.column("last_error", odd)


async def assert_parked_at_once(outbox: Outbox, id_: int) -> None:
    """It says that no broker has seen it, and no second try was made."""
    assert await outbox.ids("parked") == [id_]
    assert (await outbox.column("last_error", id_)).startswith("not sent by the relay: ")
    assert await outbox.column("attempts", id_) == 1


@pytest.fixture
def small_frames(rabbitmq: RabbitServer) -> Iterator[None]:
    """What `frame_max` in rabbitmq.conf does, for the connections made from now on. From 4.1 on 8192 is the least."""
    rabbitmq.call("application:set_env(rabbit, frame_max, 8192).")
    yield
    rabbitmq.call("application:set_env(rabbit, frame_max, 131072).")


@pytest.mark.usefixtures("small_frames")
async def test_headers_beyond_a_small_frame_are_parked_and_larger_bodies_are_sent(
    outbox: Outbox, run_node: RunNode, queue: Reader
) -> None:
    odd = await outbox.insert("1", headers=json.dumps({"large": "x" * 8192}))
    fine = await outbox.insert("2", payload=json.dumps("x" * 20_000), headers=json.dumps({"fits": "x" * 7000}))

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().broker_losses == {}

    assert await queue.ids(1) == [fine]
    await assert_parked_at_once(outbox, odd)
    assert "frame_max" in await outbox.column("last_error", odd)


async def test_only_a_trace_in_its_form_passes_from_trace_context(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    forged = {"x-outbox-id": 1, "x-aggregate-id": "another", "CC": ["elsewhere"], "baggage": "a=1"}
    contexts = [
        {"traceparent": parent, "tracestate": "a=1,b@c=2", **forged},
        {"traceparent": parent, "tracestate": "\u00e4"},
        {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01", "tracestate": "a=1"},
        {"traceparent": parent + "-and more"},
        {"traceparent": {"of": "another type"}},
        {"traceparent": parent, "tracestate": "a=" + "x" * 511},
    ]
    ids = [await outbox.insert(trace_context=json.dumps(context)) for context in contexts]

    async with run_node():
        messages = await queue.drain(len(ids))

    headers = [message.headers for message in messages]
    assert [each["x-outbox-id"] for each in headers] == ids
    assert all(each["x-aggregate-id"] == "1" and not forged.keys() & each.keys() - OURS for each in headers)
    traces = [(each.get("traceparent"), each.get("tracestate")) for each in headers]
    assert traces == [(parent, "a=1,b@c=2"), (parent, None), *[(None, None)] * 3, (parent, None)]


async def test_cc_names_routing_keys_where_the_operator_allows_it(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    elsewhere = Reader(channel, await channel.declare_queue("elsewhere", durable=True))
    address = {"exchange": "", "routing_key": "events"}
    id_ = await outbox.insert("1", headers=json.dumps({"CC": ["elsewhere"]}), **address)
    odd = await outbox.insert("2", headers=json.dumps({"CC": "elsewhere"}), **address)
    allowing = settings.broker.model_copy(update={"sender_selected_distribution": True})

    async with run_node(settings.model_copy(update={"broker": allowing})) as node:
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().broker_losses == {}

    assert await queue.ids(1) == await elsewhere.ids(1) == [id_]
    await assert_parked_at_once(outbox, odd)


async def test_a_row_that_names_an_exchange_that_is_not_allowed_is_parked(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    by_default = await outbox.insert("1")
    named = await outbox.insert("2", exchange="outbox")
    odd = await outbox.insert("3", exchange="", routing_key="events")
    broker = settings.broker.model_copy(update={"allowed_exchanges": "billing.*, outbox"})

    async with run_node(settings.model_copy(update={"broker": broker})):
        await eventually(outbox.is_empty, "nothing pending")

    assert sorted(await queue.ids(2)) == [by_default, named]
    await assert_parked_at_once(outbox, odd)
    assert "broker.allowed_exchanges" in await outbox.column("last_error", odd)


@pytest.mark.parametrize(
    "exchange",
    ["a" * 255, "a" * 220, "\u00e9" * 63, "a\nb"],
    ids=["long", "cut behind the name", "in another script", "two lines"],
)
async def test_however_a_missing_exchange_is_called_its_rows_alone_wait_for_it(
    outbox: Outbox, queue: Reader, run_node: RunNode, exchange: str
) -> None:
    odd = await outbox.insert("odd", exchange=exchange)
    fine = [await outbox.insert(f"fine-{n}") for n in range(5)]

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().broker_losses == {}

    assert await outbox.ids("quarantined") == [odd]
    assert await outbox.column("attempts", odd) == 0
    assert await outbox.ids("sent") == fine


async def test_many_missing_exchanges_cost_channels_and_no_connection(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """Probes open channels meanwhile, and one of them took the number of a channel that the broker had just closed."""
    odd = [await outbox.insert(f"odd-{n}", exchange=f"missing-{n}") for n in range(100)]
    fine = await outbox.insert("fine")

    async with run_node() as node:
        await eventually(lambda: outbox.are_aside(odd), "they wait for their exchanges")
        await eventually(lambda: is_sent(outbox, fine), "the other is sent")
        assert node.snapshot().broker_losses == {}


async def test_a_row_whose_exchange_a_broker_cannot_name_is_parked(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    odd = await outbox.insert("odd", exchange="\u00e9" * 64)
    fine = [await outbox.insert(f"fine-{n}") for n in range(5)]

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().broker_losses == {}

    await assert_parked_at_once(outbox, odd)
    assert await outbox.ids("sent") == fine


async def test_a_row_from_another_age_is_sent(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    ids = [await outbox.insert(created_at=moment) for moment in ("0099-01-01", "infinity", "-infinity", "294000-01-01")]

    async with run_node():
        assert await queue.ids(4) == ids


async def test_a_delayed_row_waits_and_holds_nobody(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    due_at = datetime.now(UTC) + timedelta(seconds=10)
    delayed = await outbox.insert("1", available_at=due_at)
    later = await outbox.insert("1")

    async with run_node():
        assert await queue.ids(1) == [later]
        assert await queue.ids(1) == [delayed]
        await eventually(outbox.is_empty, "marked")

    assert await outbox.column("sent_at", delayed) >= due_at


@pytest.mark.every_postgres
@pytest.mark.parametrize(
    ("available_at", "attempts", "is_due"),
    [("-infinity", 0, True), (datetime.now(UTC) + timedelta(days=30), 1, False), ("infinity", 1, False)],
    ids=["ever since", "in 30 days", "never"],
)
async def test_however_far_away_the_moment_of_a_row_is_others_go_on(
    outbox: Outbox, queue: Reader, run_node: RunNode, available_at: datetime | str, attempts: int, is_due: bool
) -> None:
    odd = await outbox.insert("1", available_at=available_at, attempts=attempts)
    fine = await outbox.insert("2")
    expected = [odd, fine] if is_due else [fine]

    async with run_node() as node:
        assert sorted(await queue.ids(len(expected))) == expected
        await eventually(node.is_ready, "it lives")


@pytest.mark.usefixtures("refused_by_broker")
async def test_a_retry_takes_its_backoff_along_over_a_restart(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    first = await outbox.insert("1", payload=json.dumps("x" * 5000))
    second = await outbox.insert("1")
    async with run_node(backoff_initial=1.0, backoff_max=2.0, max_message_bytes=4096):
        await eventually(lambda: attempts(outbox, first), "one attempt burnt")

    async with run_node():
        await eventually(outbox.is_empty, "both sent")

    assert await queue.ids(2) == [first, second]
    assert await outbox.column("attempts", first) >= 1


async def is_sent(outbox: Outbox, id_: int) -> bool:
    return bool(await outbox.column("state", id_) == "sent")


async def attempts(outbox: Outbox, id_: int) -> bool:
    return bool(await outbox.column("attempts", id_))
