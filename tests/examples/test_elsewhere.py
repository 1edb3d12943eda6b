"""The consumer of docs/consume-elsewhere.md, which is not ours: each message has its effect once, in order per key."""

import os
import signal
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from uuid import uuid4

from aio_pika.abc import AbstractChannel
from psycopg.types.json import Json

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, RunNode
from tests.prose.pages import programs
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

QUEUE = "billing.totals"
MESSAGES = 200
KILLED_AT = (20, 60, 100, 140, 170)  # effects

(PROGRAM,) = programs("docs/consume-elsewhere.md")

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


async def test_each_message_has_its_effect_once_and_in_order_through_kills(
    outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode, tmp_path: Path
) -> None:
    queue = await declare_bound(channel, QUEUE, arguments={"x-single-active-consumer": True})
    await outbox.connection.execute(ORDER)
    for number in range(MESSAGES):
        message_id = uuid4()
        for _ in range(1 + (number % 10 == 0)):  # every tenth comes twice
            await outbox.insert(
                str(number % 2), message_id=message_id, payload=Json({"amount": 2 ** (number // 2 % 60)})
            )
    environment = {
        **os.environ,
        "DATABASE_URL": settings.database.url.get_secret_value(),
        "BROKER_URL": settings.broker.url.get_secret_value(),
    }

    def start() -> Process:
        return Process([sys.executable, "-c", PROGRAM], log=tmp_path / "log", environment=environment)

    async def is_done() -> bool:
        assert consumer.is_running(), consumer.log_end()
        return (await queue.declare()).message_count == 0 and await outbox.is_empty()

    async def has_applied(count: int) -> bool:
        assert consumer.is_running(), consumer.log_end()
        return (await outbox.connection.execute("SELECT FROM applied")).rowcount >= count

    async with run_node():
        for count in KILLED_AT:
            consumer = start()
            await eventually(partial(has_applied, count), f"{count} effects are there")
            consumer.stop(signal.SIGKILL)
        consumer = start()
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
