"""Handlers are found by event type; what cannot work is refused when the consumer is made."""

import re

import psycopg
import pytest

from relay.consume import Consumer, Inbox, Message, on
from relay.consume.handlers import collect_handlers
from relay.errors import ConfigurationError
from relay.settings import BrokerSettings, DatabaseSettings


@on("InvoiceIssued", "InvoiceCorrected")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoiceIssued")
async def notify(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoicePaid")
def archive(message: Message, connection: psycopg.Connection) -> None: ...


async def unmarked(message: Message, connection: psycopg.AsyncConnection) -> None: ...


def test_a_handler_takes_each_of_its_types_and_no_other() -> None:
    handlers = collect_handlers([project])

    assert handlers.takes("InvoiceIssued")
    assert handlers.takes("InvoiceCorrected")
    assert not handlers.takes("InvoicePaid")
    assert handlers.is_async


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([], "needs at least one handler"),
        ([project, notify], "'InvoiceIssued' has two handlers, project and notify"),
        ([project, archive], "not both"),
        ([unmarked], "unmarked is no handler; put @on"),
    ],
)
def test_handlers_that_cannot_work_together_are_refused(functions: list[object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        collect_handlers(functions)  # type: ignore[arg-type]


def test_on_takes_at_least_one_type() -> None:
    with pytest.raises(ConfigurationError, match="@on takes the event types"):
        on()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"concurrency": 1000, "batch_size": 1000}, "product at most 65535"),
    ],
)
def test_a_prefetch_that_amqp_cannot_carry_is_refused(options: dict[str, int], words: str) -> None:
    inbox = Inbox(DatabaseSettings(), "projection")

    with pytest.raises(ConfigurationError, match=words):
        Consumer("billing", [project], inbox=inbox, broker=BrokerSettings(), **options)  # type: ignore[arg-type]


def test_a_pipeline_needs_async_handlers() -> None:
    inbox = Inbox(DatabaseSettings(), "projection")

    with pytest.raises(ConfigurationError, match="pipeline needs `async def` handlers"):
        Consumer("billing", [archive], inbox=inbox, broker=BrokerSettings(), pipeline=True)
