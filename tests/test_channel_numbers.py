"""The number of a channel that has ended is not used again at once: the broker may still know the old one."""

import pytest

from relay.config.settings import BrokerSettings
from relay.servers.rabbitmq.connection import connect, open_channel
from relay.servers.rabbitmq.insides import MOST_CHANNELS, Underlay


async def test_numbers_go_up_and_begin_again_where_the_broker_allows_no_more(broker: BrokerSettings) -> None:
    async with await connect(broker, "test") as connection:
        first = await open_channel(connection)
        first.connection.connection_tune.channel_max = 3

        numbers = []
        for _ in range(5):
            channel = await open_channel(connection)
            numbers.append(channel.number)
            await channel.close()

    assert first.number == 1
    assert numbers == [2, 3, 2, 3, 2]


async def test_a_connection_without_a_number_left_opens_no_channel(
    broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await connect(broker, "test") as connection:
        monkeypatch.setattr(Underlay, "_next_number", lambda _: MOST_CHANNELS + 1)

        with pytest.raises(ConnectionError, match="Channel number too large"):
            await open_channel(connection)
