"""A pool's member as a process that a drill can kill: python -m tests.consume.pool.member."""

import asyncio
import os

import psycopg
import structlog
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Inbox, Message, WorkPolicy, on
from relay.consume.pool import PartitionedConsumer, PoolPolicy
from tests.consume.effects import CONSUMER, QUEUE
from tests.consume.policies import QUICK

# Who has applied what under which holding, in the order of each partition: the evidence for the checker.
APPLIED = """
    CREATE TABLE applied (
        position bigint GENERATED ALWAYS AS IDENTITY,
        message_id uuid NOT NULL,
        key text NOT NULL,
        number integer NOT NULL,
        partition integer NOT NULL,
        epoch integer NOT NULL,
        member text NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""
NAME = os.environ.get("TEST_MEMBER", "")


@on("Counted")
async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
    headers = message.headers
    await connection.execute(
        "INSERT INTO applied (message_id, key, number, partition, epoch, member) VALUES (%s, %s, %s, %s, %s, %s)",
        (
            message.message_id,
            message.aggregate_id,
            message.json(),
            headers["x-partition"],
            headers["x-partition-epoch"],
            NAME,
        ),
    )


def main() -> None:
    structlog.configure(processors=[structlog.processors.TimeStamper(fmt="iso"), structlog.processors.JSONRenderer()])
    inbox = Inbox(DatabaseSettings(url=SecretStr(os.environ["RELAY_DATABASE_URL"])), CONSUMER)
    broker = BrokerSettings(url=SecretStr(os.environ["RELAY_BROKER_URL"]))
    member = PartitionedConsumer(
        QUEUE,
        [note],
        inbox=inbox,
        broker=broker,
        pool=PoolPolicy(member=NAME),
        work=WorkPolicy(concurrency=1, batch_size=20, backoff=QUICK),
        declare=False,
    )
    asyncio.run(member.run())


if __name__ == "__main__":
    main()
