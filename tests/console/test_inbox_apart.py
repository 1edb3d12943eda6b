"""Consumers have a separate database: a message's way, and what was not applied, are told across both."""

import re
from typing import LiteralString

import psycopg
import pytest

from relay.config.settings import Settings
from tests.console.rows import AGE, sent
from tests.console.site import browser, running
from tests.operate.held import held

AWAY = "postgresql://relay:hunter2@127.0.0.1:1/inbox"
APPLY: LiteralString = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    VALUES ('billing', %s, (now() AT TIME ZONE 'UTC')::date)
"""


@pytest.fixture
def rows(database_url: str) -> list[tuple[int, str]]:
    """Ids and message ids of two sent rows."""
    sent(database_url, 2)
    with psycopg.connect(database_url) as connection:
        connection.execute(AGE)
        return connection.execute("SELECT id, message_id::text FROM outbox.message ORDER BY id").fetchall()


async def page_of(settings: Settings, message_id: str, *, inbox_url: str) -> str:
    """Return the page of a message, of a console that looks for what was applied there."""
    async with running(settings, inbox_url=inbox_url) as app, browser(app) as client:
        listed = await client.get("/messages", params={"id": message_id})
        found = re.search(r'<a href="(/messages/[^"]*)">', listed.text)
        assert found is not None, listed.text
        return (await client.get(found[1].replace("&amp;", "&"))).text


async def test_a_message_is_followed_into_the_consumers_database(
    settings: Settings, inbox_url: str, rows: list[tuple[int, str]]
) -> None:
    (_, applied), (_, waiting) = rows
    with psycopg.connect(inbox_url) as connection:
        connection.execute(APPLY, [applied])
        held(connection, consumer="mail", error="the post office is closed")
        connection.execute("UPDATE outbox.held_message SET message_id = %s", [waiting])

    assert "applied by billing" in await page_of(settings, applied, inbox_url=inbox_url)
    assert "held by mail after 3 tries" in await page_of(settings, waiting, inbox_url=inbox_url)
    assert "no inbox here has it" in await page_of(settings, applied, inbox_url="")


async def test_a_consumers_database_that_is_away_is_told_on_the_page(
    settings: Settings, rows: list[tuple[int, str]]
) -> None:
    page = await page_of(settings, rows[0][1], inbox_url=AWAY)

    assert "confirmed by the broker" in page
    assert "what consumers have done with it is not known" in page
    assert "console.inbox_url: " in page
    assert "hunter2" not in page


async def test_what_was_sent_is_compared_with_the_consumers_database(
    settings: Settings, inbox_url: str, rows: list[tuple[int, str]]
) -> None:
    with psycopg.connect(inbox_url) as connection:
        connection.execute(APPLY, [rows[0][1]])
    async with running(settings, inbox_url=inbox_url) as app, browser(app) as client:
        page = await client.get("/reconcile", params={"since": "1d"})
    async with running(settings, inbox_url=AWAY) as app, browser(app) as client:
        away = await client.get("/reconcile", params={"since": "1d"})

    assert "1 of 2 that were sent are not in the inbox of billing" in page.text
    assert (away.status_code, "console.inbox_url: " in away.text, "hunter2" in away.text) == (503, True, False)
