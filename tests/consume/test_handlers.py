"""Handlers are found by event type and version; what cannot work is refused when the consumer is made."""

import re
from dataclasses import replace

import psycopg
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.consume.apply.handlers import AsyncHandler, collect_handlers
from relay.errors import ConfigurationError
from tests.consume.effects import received


@on("InvoiceIssued", "InvoiceCorrected")
async def project(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoiceIssued")
async def notify(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoicePaid")
def archive(message: Message, connection: psycopg.Connection) -> None: ...


@on("InvoiceIssued", version=2)
async def project_2(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoiceIssued", version="2")
async def notify_2(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("*")
async def log(message: Message, connection: psycopg.AsyncConnection) -> None: ...


@on("InvoicePaid")
async def settle(message: Message) -> None: ...


async def unmarked(message: Message, connection: psycopg.AsyncConnection) -> None: ...


def test_a_handler_takes_each_of_its_types_and_no_other() -> None:
    handlers = collect_handlers([project])

    assert handlers.takes(received(event_type="InvoiceIssued"))
    assert handlers.takes(received(event_type="InvoiceCorrected"))
    assert not handlers.takes(received(event_type="InvoicePaid"))
    assert handlers.is_async


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([], "needs at least one handler"),
        ([project, notify], "'InvoiceIssued' has two handlers, project and notify"),
        ([project_2, notify_2], "'InvoiceIssued' of version 2 has two handlers, project_2 and notify_2"),
        ([project, archive], "not both: project is an `async def`, archive is a plain function"),
        ([unmarked], "unmarked is no handler; put @on"),
        ([settle], "handler settle is called with (message, connection)"),
    ],
)
def test_handlers_that_cannot_work_together_are_refused(functions: list[object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        collect_handlers(functions)  # type: ignore[arg-type]


def issued(version: object = None) -> Message:
    return received(event_type="InvoiceIssued", headers={} if version is None else {"x-event-version": version})


def applied_by(functions: list[AsyncHandler], *messages: Message) -> list[str]:
    return [function.__name__ for function, _ in collect_handlers(functions).calls(messages)]


def test_a_version_has_a_handler_of_its_own_and_the_other_handler_takes_the_rest() -> None:
    taken = applied_by([project_2, project], issued(2), issued("2"), issued(3), issued(), issued(2.5))

    assert taken == ["project_2", "project_2", "project", "project", "project"]


@pytest.mark.parametrize("functions", [[project_2], [project_2, log]], ids=["alone", "beside a handler of all others"])
def test_a_version_that_no_handler_of_the_type_takes_is_not_taken(functions: list[AsyncHandler]) -> None:
    handlers = collect_handlers(functions)

    assert handlers.takes(issued(2))
    assert not handlers.takes(issued(3))
    assert not handlers.takes(issued())


def test_the_handler_of_all_other_types_takes_each_of_their_versions() -> None:
    other = received(event_type="InvoicePaid", headers={"x-event-version": 7})

    assert applied_by([project_2, log], other) == ["log"]
    with pytest.raises(ConfigurationError, match="takes every version"):
        on("*", version=2)


def test_an_idempotency_key_is_that_of_message_and_consumer() -> None:
    first = received()
    again = replace(first, redelivered=True, routing_key="rebuild", headers={"x-replay-id": 1})

    assert first.idempotency_key == again.idempotency_key
    assert first.idempotency_key != replace(first, consumer_name="another").idempotency_key
    assert first.idempotency_key != received().idempotency_key


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
        Consumer("billing", [project], inbox=inbox, broker=BrokerSettings(), work=WorkPolicy(**options))  # type: ignore[arg-type]


def test_a_pipeline_needs_async_handlers() -> None:
    inbox = Inbox(DatabaseSettings(), "projection")

    with pytest.raises(ConfigurationError, match="pipeline needs `async def` handlers"):
        Consumer("billing", [archive], inbox=inbox, broker=BrokerSettings(), work=WorkPolicy(pipeline=True))
