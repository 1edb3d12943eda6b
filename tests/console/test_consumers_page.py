"""Page Consumers: each consumer with its queue, processes, rate, lag and last message, whatever its name says."""

import re
from datetime import UTC, datetime

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractIncomingMessage
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console import applied, consumers
from relay.console.applied import ProgressLooks
from relay.console.consumers import ConsumerStatus
from relay.operate import queues
from relay.servers.postgres.tables import Tables
from tests.console.consumers import rows, with_queue
from tests.console.site import browser, running
from tests.operate.pools import MEMBERS
from tests.operate.rows import Rows
from tests.support.eventually import eventually

__all__ = ["rows"]  # fixtures

NOTE = "INSERT INTO outbox.consumer_queue (consumer_name, queue) VALUES (%s, %s)"
APPLY = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, processed_at)
    SELECT %(consumer)s, gen_random_uuid(), (now() AT TIME ZONE 'UTC')::date,
        now() - %(age)s * interval '1 s' - n * interval '1 ms'
    FROM generate_series(1, %(rows)s) AS n
"""
HOSTILE = "<img src=x onerror=alert(1)>" + "x" * 300


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "INTERVAL", 0.2)
    monkeypatch.setattr(queues, "UNREAD_AFTER", 0.5)


def apply(connection: psycopg.Connection, consumer: str, rows: int, *, age: float = 0) -> None:
    connection.execute(APPLY, {"consumer": consumer, "rows": rows, "age": age})


async def keep(_: AbstractIncomingMessage) -> None:
    """Take a message, and settle it never."""


def lines(app: FastAPI) -> list[ConsumerStatus]:
    seen = app.state.site.consumers.latest
    return [*seen.consumers] if seen else []


async def test_a_consumer_is_shown_with_what_it_does_and_what_waits(
    settings: Settings, broker_url: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "WINDOW", 3600.0)  # however slow the machine is
    rows.connection.execute(NOTE, ["billing", "invoices"])
    apply(rows.connection, "billing", 120)
    async with await aio_pika.connect(broker_url) as connection, running(settings) as app, browser(app) as client:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1)
        queue = await channel.declare_queue("invoices", durable=True)
        for _ in range(2):
            await channel.default_exchange.publish(aio_pika.Message(b"1"), "invoices")
        await queue.consume(keep)
        await eventually(lambda: [(each.processes, each.ready) for each in lines(app)] == [(1, 1)], "it is seen")
        (line,) = lines(app)
        page = await client.get("/consumers")

    assert (line.consumer, line.queue, line.is_pool) == ("billing", "invoices", False)
    assert line.applied is not None
    assert line.applied.rate == pytest.approx(120 / 3600)
    assert (datetime.now(UTC) - line.applied.last_at).total_seconds() < 300
    assert re.search(r'<th scope="row" class="name">billing</th>\s*<td[^>]* class="mono">invoices</td>', page.text)
    assert "needs a look" not in page.text


async def test_a_queue_of_a_consumer_that_nothing_consumes_leads_to_its_runbook(
    settings: Settings, broker_url: str, rows: Rows
) -> None:
    rows.connection.execute(NOTE, ["billing", "invoices"])
    async with await aio_pika.connect(broker_url) as connection, running(settings) as app, browser(app) as client:
        channel = await connection.channel()
        queue = await channel.declare_queue("invoices", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"1"), "invoices")
        await eventually(lambda: any(each.reasons for each in lines(app)), "it is a reason")
        page = await client.get("/consumers")
        await queue.consume(AbstractIncomingMessage.ack)
        await eventually(lambda: not any(each.reasons for each in lines(app)), "it is no reason any more")

    assert "nothing consumes invoices, and 1 message waits: start its consumer" in page.text
    assert 'href="/runbooks/OutboxConsumerDown"' in page.text


async def test_a_pool_has_its_members_and_a_listed_queue_no_name(
    settings: Settings, broker_url: str, rows: Rows
) -> None:
    rows.connection.execute(MEMBERS)
    rows.connection.execute("UPDATE outbox.pool_member SET checked_in_at = now() + interval '1 h' WHERE name = 'a'")
    rows.connection.execute(NOTE, ["totals", "billing"])
    async with await aio_pika.connect(broker_url) as connection, running(with_queue(settings, "mail")) as app:
        await (await connection.channel()).declare_queue("mail", durable=True)
        await eventually(lambda: len(lines(app)) == 2, "both are seen")
        pool, mail = lines(app)

    assert (pool.consumer, pool.queue, pool.is_pool, pool.processes) == ("totals", "billing", True, 1)
    assert "member b of pool totals does not check in" in pool.reasons
    assert (mail.consumer, mail.queue, mail.processes, mail.ready) == (None, "mail", 0, 0)


async def test_hostile_names_are_text_and_no_queue_of_theirs_harms_the_look(settings: Settings, rows: Rows) -> None:
    for queue in (HOSTILE, "amq.\x07\n", "x" * 1000):
        rows.connection.execute(NOTE, [HOSTILE, queue])
    apply(rows.connection, HOSTILE, 1)
    rows.connection.execute(
        "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, processed_at)"
        " VALUES (%s, gen_random_uuid(), '1970-01-01', 'infinity'), (%s, gen_random_uuid(), '1970-01-01', '-infinity')",
        [HOSTILE, HOSTILE],
    )
    async with running(settings) as app, browser(app) as client:
        await eventually(lambda: len(lines(app)) == 3, "they are seen")
        seen = app.state.site.consumers.latest
        page = await client.get("/consumers")

    assert (seen.error, seen.inbox_error) == (None, None)
    assert "<img src=x" not in page.text
    assert "&lt;img src=x" in page.text


def test_the_rate_is_that_of_the_last_minute_and_the_last_message_is_remembered(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "PAGES", 2)
    monkeypatch.setattr(applied, "WINDOW", 3600.0)
    apply(rows.connection, "rare", 1, age=30)
    inbox = ProgressLooks()
    _, first = inbox.look(Tables(rows.connection, "outbox"))
    rows.connection.execute(NOTE, ["rare", "q"])
    apply(rows.connection, "busy", 3000)
    _, second = inbox.look(Tables(rows.connection, "outbox"))

    assert first["rare"].rate == pytest.approx(1 / 3600)
    assert second["busy"].rate > 1  # of the rows of two pages, in the moment that they cover
    assert second["rare"].last_at == first["rare"].last_at  # its row is not in the last pages
    assert second["rare"].rate == 0


async def test_an_inbox_that_is_away_is_told_and_the_rest_is_shown(settings: Settings, rows: Rows) -> None:
    rows.connection.execute(MEMBERS)
    async with (
        running(settings, inbox_url="postgresql://relay:hunter2@127.0.0.1:1/inbox") as app,
        browser(app) as client,
    ):
        await eventually(lambda: len(lines(app)) == 1, "the pool is seen", 60)
        page = await client.get("/consumers")

    assert "What consumers have applied is not known now" in page.text
    assert "hunter2" not in page.text
