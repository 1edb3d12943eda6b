"""A consumer in a process of its own, to be killed: python -m tests.consume.process."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import psycopg
import structlog
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, Retries, on
from tests.consume.effects import CONSUMER, QUEUE, QUICK, count

POISON = 666  # whoever applies this number dies
BURDEN = 400  # fails


def environment(database: DatabaseSettings, broker: BrokerSettings, **options: Any) -> Mapping[str, str]:
    """Give the variables that tell the process its servers, and the consumer its options."""
    return {
        **os.environ,
        "TEST_DATABASE_URL": database.url.get_secret_value(),
        "TEST_BROKER_URL": broker.url.get_secret_value(),
        "TEST_OPTIONS": json.dumps(options),
    }


@on("Counted")
async def count_or_die(message: Message, connection: psycopg.AsyncConnection) -> None:
    if message.json() == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    await count(message, connection)
    if message.json() == BURDEN:
        raise RuntimeError("too heavy")


def main() -> None:
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    inbox = Inbox(DatabaseSettings(url=SecretStr(os.environ["TEST_DATABASE_URL"])), CONSUMER)
    broker = BrokerSettings(url=SecretStr(os.environ["TEST_BROKER_URL"]))
    options = {"concurrency": 1, **json.loads(os.environ["TEST_OPTIONS"])}
    if "retries" in options:
        options["retries"] = Retries(**options["retries"])
    asyncio.run(Consumer(QUEUE, [count_or_die], inbox=inbox, broker=broker, backoff=QUICK, **options).run())


if __name__ == "__main__":
    main()
