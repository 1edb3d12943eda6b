"""A durable publisher sends CloudEvents where its routes say so: directly, and out of each buffer."""

import pytest

from relay.config.settings import CloudEvents, Route
from relay.errors import NotAcceptedError
from tests.engine.conftest import Reader
from tests.publisher.conftest import Open
from tests.publisher.events import is_direct, measured
from tests.support.cloud_events import by_rabbitmq
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy


@pytest.mark.parametrize("form", [CloudEvents.BINARY, CloudEvents.STRUCTURED])
async def test_both_ways_send_the_same_events(
    form: CloudEvents, publisher: Open, queue: Reader, proxy: FaultProxy
) -> None:
    proxy.refusing = True
    events = [measured(number) for number in (1, 2)]
    async with publisher(routes=[Route(exchange="outbox", cloudevents=form)]) as sensors:
        await sensors.publish(events[0])
        assert sensors.state.buffered == 1
        proxy.refusing = False
        await eventually(lambda: is_direct(sensors), "the buffer is drained")
        await sensors.publish(events[1])
        assert sensors.state.confirmed == 1

    found = [by_rabbitmq(message) for message in await queue.drain(2)]
    assert [each.get_id() for each in found] == [str(event.message_id) for event in events]
    assert [each.get_data() for each in found] == [{"number": 1}, {"number": 2}]
    assert {(each.get_subject(), each.get_type()) for each in found} == {("sensor/a", "Measured")}


async def test_an_event_that_can_be_no_cloud_event_is_refused(publisher: Open, queue: Reader) -> None:
    async with publisher(routes=[Route(exchange="outbox", cloudevents=CloudEvents.BINARY)]) as sensors:
        await eventually(lambda: is_direct(sensors), "nothing is in the buffer")
        with pytest.raises(NotAcceptedError, match=r"aggregate_id has the character U\+000A"):
            await sensors.publish(measured(1, "a\nb"))
        await sensors.publish(measured(2))

    (message,) = await queue.drain(1)
    assert by_rabbitmq(message).get_data() == {"number": 2}
