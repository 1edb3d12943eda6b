"""A consumer in a separate process, to be killed: python -m tests.consume.process."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import psycopg
import structlog
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, WorkPolicy, on
from tests.consume.effects import CONSUMER, QUEUE, count
from tests.consume.policies import QUICK

COMMAND = [sys.executable, "-m", "tests.consume.process"]
POISON = 666  # the process that applies this number dies
BURDEN = 400  # fails


def environment(database: DatabaseSettings, broker: BrokerSettings, **options: Any) -> Mapping[str, str]:
    """Return the variables that tell the process its servers, and the consumer its options."""
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
    options = json.loads(os.environ["TEST_OPTIONS"])
    if "retries" in options:
        options["retries"] = Retries(**options["retries"])
    work = WorkPolicy(concurrency=options.pop("concurrency", 1), batch_size=options.pop("batch_size", 1), backoff=QUICK)
    failures = FailurePolicy(**options)
    asyncio.run(Consumer(QUEUE, [count_or_die], inbox=inbox, broker=broker, failures=failures, work=work).run())


if __name__ == "__main__":
    main()
