"""A drill for consumers that are not ours, and keep the totals of docs/consume-elsewhere.md: they are killed."""

import os
import signal
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from uuid import uuid4

from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic
from psycopg.types.json import Json
from yarl import URL

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, RunNode
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way
from tests.support.queues import declare_bound

QUEUE = "billing.totals"
MESSAGES = 200
KILLED_AT = (20, 60, 100, 140, 170)  # effects

# What each effect has made of the total of its key. As each adds another power of two, the sums tell the order.
ORDER = """
    CREATE TABLE applied (position bigint GENERATED ALWAYS AS IDENTITY, customer text, amount numeric);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO applied (customer, amount) VALUES (NEW.customer, NEW.amount);
            RETURN NULL;
        END
    $$;
    CREATE TABLE total (customer text PRIMARY KEY, amount numeric NOT NULL);
    CREATE TRIGGER note AFTER INSERT OR UPDATE ON total FOR EACH ROW EXECUTE FUNCTION note();
"""
TOTALS = "SELECT customer, amount FROM total ORDER BY customer"
APPLIED = "SELECT array_agg(amount ORDER BY position) FROM applied GROUP BY customer"

Start = Callable[[Mapping[str, str]], Process]


async def drill_totals(
    start: Start, outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode
) -> None:
    """Kill a consumer five times, in three of them between its commit and its acknowledgement, and check each effect.

    Args:
        start: starts the consumer with these variables, which name its servers.
    """
    queue = await declare_bound(channel, QUEUE, arguments={"x-single-active-consumer": True})
    await outbox.connection.execute(ORDER)
    for number in range(MESSAGES):
        message_id, amount = uuid4(), str(2 ** (number // 2 % 60))
        for _ in range(1 + (number % 10 == 0)):  # every tenth comes twice
            await outbox.insert(str(number % 2), message_id=message_id, payload=Json({"amount": amount}))

    async def has_applied(count: int) -> bool:
        assert consumer.is_running(), consumer.log_end()
        return (await outbox.connection.execute("SELECT FROM applied")).rowcount >= count

    async def is_done() -> bool:
        """Whether each message had its effect. An empty queue does not say so: the consumer may hold the last."""
        is_all_out = await outbox.is_empty() and (await queue.declare()).message_count == 0
        return is_all_out and await has_applied(MESSAGES)

    broker = URL(settings.broker.url.get_secret_value())
    async with run_node(), FaultProxy(str(broker.host), int(broker.port or 0)) as proxy:
        environment = {
            **os.environ,
            "DATABASE_URL": settings.database.url.get_secret_value(),
            "BROKER_URL": str(broker.with_host("127.0.0.1").with_port(proxy.port)),
        }
        for turn, count in enumerate(KILLED_AT):
            consumer = start(environment)
            await eventually(partial(has_applied, count), f"{count} effects are there")
            if turn % 2 == 0:
                proxy.hold(Way.UP)  # the next acknowledgement does not arrive
                await proxy.wait_seen(Way.UP, Basic.Ack, proxy.seen[Way.UP, Basic.Ack] + 1)
            consumer.stop(signal.SIGKILL)
            proxy.cut()
            proxy.release(Way.UP)
        consumer = start(environment)
        try:
            await eventually(is_done, "the queue is empty")
        finally:
            consumer.stop(signal.SIGTERM)

    steps = [2 ** (number // 2 % 60) for number in range(0, MESSAGES, 2)]
    sums = [Decimal(sum(steps[: place + 1])) for place in range(len(steps))]
    totals = await (await outbox.connection.execute(TOTALS)).fetchall()
    assert totals == [("0", sums[-1]), ("1", sums[-1])]
    applied = [amounts for (amounts,) in await (await outbox.connection.execute(APPLIED)).fetchall()]
    assert applied == [sums, sums]
