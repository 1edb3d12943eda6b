"""Whatever the broker does, an accepted event arrives, in order per key; with either buffer."""

import asyncio
from datetime import UTC, datetime

import pytest
from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic

from relay.config.settings import Route, Unroutable
from relay.errors import EventError, NotAcceptedError
from relay.outbox import Event
from relay.publisher import DurablePublisher, Mode
from tests.engine.conftest import Reader
from tests.publisher.conftest import Open
from tests.publisher.events import first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy, Way


async def test_while_the_broker_takes_them_events_go_out_at_once(publisher: Open, queue: Reader) -> None:
    async with publisher() as sensors:
        ids = await asyncio.gather(*(publish_all(sensors, range(20), key) for key in "abc"))
        await eventually(lambda: not sensors.state.reasons, "a table's relay has its lanes, which takes a moment")
        state = sensors.state

    assert first_of_each(await queue.drain(60)) == dict(zip("abc", ids, strict=True))
    assert (state.mode, state.confirmed, state.buffered, state.waiting, state.reasons) == (Mode.DIRECT, 60, 0, 0, ())


async def test_without_a_broker_events_are_accepted_and_go_out_in_order_once_it_is_back(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    proxy.refusing = True
    async with publisher() as sensors:
        ids = await asyncio.gather(*(publish_all(sensors, range(20), key) for key in "abc"))
        assert (sensors.state.mode, sensors.state.buffered) == (Mode.BUFFERED, 60)
        assert any(reason.startswith("broker: ") for reason in sensors.state.reasons)

        proxy.refusing = False
        await eventually(lambda: is_direct(sensors), "the buffer is drained")
        ids[0] += await publish_all(sensors, [20])

    assert first_of_each(await queue.drain(61)) == dict(zip("abc", ids, strict=True))


async def test_what_was_accepted_goes_out_after_a_restart_and_before_what_follows(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    proxy.refusing = True
    async with publisher() as sensors:
        ids = await publish_all(sensors, range(30))
    proxy.refusing = False
    async with publisher() as sensors:
        ids += await publish_all(sensors, range(30, 60))
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    assert first_of_each(await queue.drain(60)) == {"a": ids}


async def test_an_event_whose_confirm_is_lost_comes_again_and_is_the_same(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.RESET)
    async with publisher() as sensors:
        (id_,) = await publish_all(sensors, [1])
        assert sensors.state.buffered == 1
        later = await publish_all(sensors, [2, 3])
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    messages = await queue.everything()
    assert first_of_each(messages) == {"a": [id_, *later]}
    copies = [(message.body, message.type) for message in messages if message.message_id == id_]
    assert len(copies) > 1
    assert len(set(copies)) == 1


async def test_an_event_that_is_buffered_late_has_the_time_of_its_publish(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    async with publisher(confirm_timeout=1.2) as sensors:
        proxy.hold(Way.DOWN)  # no confirm: it is buffered more than a second later
        await publish_all(sensors, [1])
        assert sensors.state.buffered == 1
        proxy.release(Way.DOWN)
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    messages = await queue.everything()
    assert len(messages) > 1
    assert len({(message.message_id, message.timestamp) for message in messages}) == 1


async def test_a_key_waits_for_the_outcome_and_the_others_do_not(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    async with publisher() as sensors:
        proxy.hold(Way.DOWN)
        events = [measured(1, "a"), measured(2, "a"), measured(1, "b"), measured(1, None), measured(2, None)]
        async with asyncio.TaskGroup() as publishing:
            for event in events:
                publishing.create_task(sensors.publish(event))
            arrived = await queue.drain(4)
            proxy.release(Way.DOWN)

        assert {message.message_id for message in arrived} == {str(e.message_id) for e in events if e is not events[1]}
        (last,) = await queue.drain(1)
        assert last.message_id == str(events[1].message_id)
        assert sensors.state.confirmed == 5


async def test_order_is_kept_while_the_connection_is_cut_again_and_again(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    stopped = asyncio.Event()
    ids: dict[str, list[str]] = {key: [] for key in "abcd"}

    async def publish(sensors: DurablePublisher, key: str) -> None:
        while not stopped.is_set():
            # Several at once: their order is that of the calls.
            events = [measured(n, key) for n in range(5)]
            await asyncio.gather(*map(sensors.publish, events))
            ids[key] += [str(event.message_id) for event in events]
            await asyncio.sleep(0.01)

    async with publisher() as sensors:
        async with asyncio.TaskGroup() as publishing:
            for key in ids:
                publishing.create_task(publish(sensors, key))
            for cut in range(4):
                confirmed = sensors.state.confirmed
                await eventually(lambda: sensors.state.confirmed > confirmed + 50, "direct again", 60)  # noqa: B023
                proxy.on_frame(Way.DOWN, Basic.Ack, proxy.seen[Way.DOWN, Basic.Ack] + 3 + cut, Act.RESET)
                await asyncio.wait_for(proxy.fired.wait(), 20)
                proxy.disarm()
            stopped.set()
        assert sensors.state.buffered > 0
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    assert first_of_each(await queue.everything()) == ids


async def test_an_event_that_no_queue_gets_waits_with_its_key_and_is_shown(
    publisher: Open, queue: Reader, channel: AbstractChannel
) -> None:
    lost = measured(1, "a", exchange="", routing_key="nowhere")
    async with publisher() as sensors:
        await sensors.publish(lost)
        behind = await publish_all(sensors, [2], "a")
        others = await publish_all(sensors, [1, 2], "b")
        assert first_of_each(await queue.drain(2)) == {"b": others}
        await eventually(
            lambda: any("quarantine" in r or "NO_ROUTE" in r for r in sensors.state.reasons), "it is shown"
        )
        assert sensors.state.mode is not Mode.DIRECT

        late = await channel.declare_queue("nowhere", durable=True)
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    message = await late.get(no_ack=True)
    assert message is not None
    assert message.message_id == str(lost.message_id)
    assert first_of_each(await queue.drain(1)) == {"a": behind}


UNWANTED = {"exchange": "", "routing_key": "nowhere"}


async def test_an_event_that_no_queue_gets_is_accepted_at_once_if_its_route_says_sent(
    publisher: Open, queue: Reader
) -> None:
    route = Route(event_type="Measured", exchange="outbox", unroutable=Unroutable.SENT)
    async with publisher(routes=[route]) as sensors:
        await eventually(lambda: is_direct(sensors), "nothing is in the buffer")
        await sensors.publish(measured(1, "a", **UNWANTED))
        behind = await publish_all(sensors, [2], "a")

        assert (sensors.state.mode, sensors.state.buffered) == (Mode.DIRECT, 0)

    assert first_of_each(await queue.drain(1)) == {"a": behind}


@pytest.mark.parametrize("unroutable", [Unroutable.SENT, Unroutable.DISCARD])
async def test_a_buffered_event_that_no_queue_gets_holds_up_nothing_if_its_route_says_so(
    unroutable: Unroutable, publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    proxy.refusing = True
    route = Route(event_type="Measured", exchange="outbox", unroutable=unroutable)
    async with publisher(routes=[route]) as sensors:
        await sensors.publish(measured(1, "a", **UNWANTED))
        behind = await publish_all(sensors, [2], "a")

        proxy.refusing = False
        await eventually(lambda: is_direct(sensors), "the buffer is drained")

    assert first_of_each(await queue.drain(1)) == {"a": behind}


async def test_closing_leaves_what_is_not_confirmed_in_time_in_the_buffer(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    async with publisher(drain_timeout=0.2) as sensors:
        proxy.hold(Way.DOWN)
        events = [measured(1), measured(2)]
        publishing = asyncio.gather(*map(sensors.publish, events))
        await queue.drain(1)
        await sensors.close()
        await publishing
        assert sensors.state.buffered == 2

        with pytest.raises(NotAcceptedError, match="closed"):
            await sensors.publish(measured(3))

    proxy.release(Way.DOWN)
    async with publisher() as sensors:
        await eventually(lambda: is_direct(sensors), "the buffer is drained")
    assert first_of_each(await queue.everything()) == {"a": [str(event.message_id) for event in events]}


@pytest.mark.parametrize(
    "event",
    [
        Event("", "a", "Measured", {}),
        Event("sensor", "a", "Measured", "{"),
        Event("sensor", "a", "Measured", {}, headers={"x" * 129: 1}),
        Event("sensor", "a", "Measured", {}, available_at=datetime(2030, 1, 1, tzinfo=UTC)),
        Event("sensor", "a", "Measured", b"x" * 2000, content_type="text/plain"),
    ],
)
async def test_an_event_that_cannot_be_carried_is_refused_before_anything_is_sent(
    publisher: Open, queue: Reader, event: Event
) -> None:
    async with publisher(max_message_bytes=1000) as sensors:
        with pytest.raises(EventError):
            await sensors.publish(event)
        await publish_all(sensors, [1])
        assert (sensors.state.confirmed, sensors.state.buffered) == (1, 0)

    assert len(await queue.drain(1)) == 1


async def test_an_event_that_the_settings_forbid_is_not_accepted_and_stops_no_other(
    publisher: Open, queue: Reader
) -> None:
    forbidden = Event("sensor", "a", "Measured", {}, headers={"CC": ["elsewhere"]})

    async with publisher() as sensors:
        await eventually(lambda: is_direct(sensors), "direct")
        with pytest.raises(NotAcceptedError, match="sender_selected_distribution"):
            await sensors.publish(forbidden)
        await publish_all(sensors, [1])
        assert is_direct(sensors)

    assert len(await queue.drain(1)) == 1


async def test_an_error_of_the_block_comes_out_as_it_is(publisher: Open) -> None:
    sensors = publisher()
    with pytest.raises(NotAcceptedError, match="not open"):
        await sensors.publish(measured(1))

    with pytest.raises(ZeroDivisionError):
        async with sensors:
            raise ZeroDivisionError


async def test_events_go_direct_again_while_more_come_in_all_the_time(
    publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    stopped = asyncio.Event()

    async def publish(sensors: DurablePublisher, key: str) -> None:
        while not stopped.is_set():
            await sensors.publish(measured(1, key))
            await asyncio.sleep(0)

    proxy.refusing = True
    async with publisher() as sensors, asyncio.TaskGroup() as publishing:
        for key in range(20):
            publishing.create_task(publish(sensors, str(key)))
        await eventually(lambda: sensors.state.buffered > 100, "some are in the buffer")
        proxy.refusing = False
        await eventually(lambda: sensors.state.confirmed > 100, "direct again", 60)
        stopped.set()
