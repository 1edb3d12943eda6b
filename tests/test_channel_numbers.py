"""The number of a channel that has ended is not used again at once: the broker may still know the old one."""

from relay.broker.connection import connect
from relay.config.settings import BrokerSettings


async def test_numbers_go_up_and_begin_again_where_the_broker_allows_no_more(broker: BrokerSettings) -> None:
    async with await connect(broker, "test") as connection:
        first = await (await connection.channel()).get_underlay_channel()
        first.connection.connection_tune.channel_max = 3

        numbers = []
        for _ in range(5):
            channel = await connection.channel()
            numbers.append((await channel.get_underlay_channel()).number)
            await channel.close()

    assert first.number == 1
    assert numbers == [2, 3, 2, 3, 2]
