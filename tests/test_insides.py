"""A release of aiormq has every undocumented name that relay/servers/rabbitmq/insides.py uses."""

from collections.abc import Iterable
from inspect import signature

import pytest
from aiormq.abc import ChannelFrame
from aiormq.connection import FrameReceiver
from pamqp import frame
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect, open_channel
from relay.servers.rabbitmq.insides import answers, give_frames_back, take_frames, write_queue

OF_CONNECTION = (
    "_Connection__reader",
    "_Connection__last_frame_time",
    "_Connection__handle_connection_blocked",
    "_Connection__handle_connection_unblocked",
    "channels",
    "connection_tune",
)
OF_CHANNEL = ("frames", "write_queue", "rpc_frames", "number")


def lacking(owner: object, names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


async def test_the_library_has_each_name_that_is_used(broker: BrokerSettings) -> None:
    connection = await connect(broker, "test")
    channel = await open_channel(connection)

    assert lacking(channel.connection, OF_CONNECTION) == []
    assert lacking(channel, OF_CHANNEL) == []
    assert "reader" in signature(FrameReceiver).parameters
    await connection.close()


async def test_frames_of_a_channel_pass_who_takes_them(broker: BrokerSettings) -> None:
    connection = await connect(broker, "test")
    channel = await open_channel(connection)
    taken: list[object] = []

    async def take(weighed: tuple[int, object]) -> None:
        taken.append(weighed[1])
        await pass_on(weighed)

    pass_on = take_frames(channel, take)
    await channel.queue_declare("", exclusive=True)
    give_frames_back(channel, pass_on)
    await channel.queue_declare("", exclusive=True)

    assert [each.name for each in taken] == ["Queue.DeclareOk"]  # type: ignore[attr-defined]
    assert answers(channel).empty()
    assert write_queue(channel).empty()
    await connection.close()


async def test_a_confirm_that_comes_late_makes_no_warning(
    broker: BrokerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await connect(broker, "test")
    channel = await open_channel(connection, confirms=True)

    async def take(_: object) -> None:
        pass

    give_frames_back(channel, take_frames(channel, take))
    parts = Basic.Publish(routing_key="nowhere"), ContentHeader()
    message = b"".join(frame.marshal(part, channel.number) for part in parts)
    await write_queue(channel).put(ChannelFrame(message, should_close=False))
    await channel.queue_declare("", exclusive=True)  # answered behind the confirm
    await connection.close()

    assert [record.getMessage() for record in caplog.records] == []
