"""A consumer in a process of its own, to be killed: python -m tests.consume.process."""

import asyncio
import os
from collections.abc import Mapping

import structlog
from pydantic import SecretStr

from relay.consume import Consumer, Inbox
from relay.settings import BrokerSettings, DatabaseSettings
from tests.consume.effects import CONSUMER, QUEUE, count


def environment(database: DatabaseSettings, broker: BrokerSettings) -> Mapping[str, str]:
    """Give the variables that tell the process its servers."""
    return {
        **os.environ,
        "TEST_DATABASE_URL": database.url.get_secret_value(),
        "TEST_BROKER_URL": broker.url.get_secret_value(),
    }


def main() -> None:
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    inbox = Inbox(DatabaseSettings(url=SecretStr(os.environ["TEST_DATABASE_URL"])), CONSUMER)
    broker = BrokerSettings(url=SecretStr(os.environ["TEST_BROKER_URL"]))
    asyncio.run(Consumer(QUEUE, [count], inbox=inbox, broker=broker, concurrency=1).run())


if __name__ == "__main__":
    main()
