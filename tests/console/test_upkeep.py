"""Pages of what is done now and then: reconcile, retention, batches."""

import asyncio
import html
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.config.settings import RelaySettings, Settings
from relay.console import given
from relay.console.api import upkeep as api_upkeep
from relay.console.pages import upkeep as pages_upkeep
from relay.operate.operation import Role
from relay.operate.retention import look_at_old_days
from relay.retention.day import OldDay
from tests.console.rows import AGE, sent
from tests.console.site import browser, log_in, post, running, users

APPLY = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT 'billing', message_id, (created_at AT TIME ZONE 'UTC')::date
    FROM outbox.message WHERE state = 'sent' ORDER BY id OFFSET %s
"""
OLD_DAY = "SELECT outbox.make_day('message_sent', current_date - 40)"
# Two batches of two pieces: of one a piece is not written yet.
BATCHES = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts)
    SELECT 'invoices', version, piece, 2, gen_random_uuid(), '{"rows": 5}'
    FROM unnest('{7,7,7,7,8,8}'::int[], '{-2,-1,0,1,-2,0}'::int[]) AS made (version, piece);
    UPDATE outbox.batch
    SET row_counts = '{"rows": 10, "table": "<b>billing.invoice", "messages": 10, "seconds": 7, "repeats": 2}'
    WHERE partition = -1
"""


@pytest.mark.parametrize(("left_out", "words"), [(0, "is applied"), (2, "It does not add up")])
async def test_what_was_not_applied_is_told_with_its_replay(
    settings: Settings, tmp_path: Path, database_url: str, left_out: int, words: str
) -> None:
    sent(database_url, 20)
    with psycopg.connect(database_url) as connection:
        connection.execute(APPLY, [left_out])
        connection.execute(AGE)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get("/reconcile", params={"since": "30d"})
        form = await client.get("/reconcile")

        link = re.search(r'href="(/replay\?[^"]*)"', page.text)
        counted = await client.get(html.unescape(link[1])) if link else None

    assert words in page.text
    assert (counted and "<h2>2 messages</h2>" in counted.text) == (True if left_out else None)
    assert form.status_code == 200


async def test_looks_that_take_connections_of_their_own_come_one_after_the_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty requests of a viewer took 83 connections of the database."""
    running_now: list[int] = []
    most = 0

    def look(*given: Any) -> list[OldDay]:
        nonlocal most
        running_now.append(1)
        most = max(most, len(running_now))
        try:
            time.sleep(0.05)
            return look_at_old_days(*given)
        finally:
            running_now.pop()

    monkeypatch.setattr(given, "ALONE_WITHIN", 60.0)
    for module in (pages_upkeep, api_upkeep):
        monkeypatch.setattr(module, "look_at_old_days", look)
    async with running(settings) as app, browser(app) as client:
        paths = ["/retention", "/api/v1/retention"] * 6
        answers = await asyncio.gather(*map(client.get, paths))
        monkeypatch.setattr(given, "ALONE_WITHIN", 0.05)
        async with app.state.site.alone:
            refused = await client.get("/api/v1/doctor")

    assert {answer.status_code for answer in answers} == {200}
    assert most == 1
    assert refused.status_code == 409


async def test_a_moment_that_cannot_be_is_told(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get("/reconcile", params={"since": "yesterday"})

    assert page.status_code == 422
    assert "yesterday" in page.text


async def test_old_days_are_dropped_by_an_owner_who_says_why(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(OLD_DAY)
    kept = settings.model_copy(update={"relay": RelaySettings(retention="30 days")})
    async with running(kept, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        page = await client.get("/retention")
        silent = await post(client, "/retention", {"why": " "})
        done = await post(client, "/retention", {"why": "disk"})
        after = await client.get("/retention")

    assert "is kept for 30 days" in page.text
    assert (silent.status_code, done.status_code) == (422, 303)
    assert "No day is older than is kept" in after.text


async def test_a_batch_is_one_line_with_what_the_ledger_tells(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(BATCHES)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get("/batches")

    whole, begun = sorted(
        (re.sub(r"<[^>]*>|\s+", " ", line).split() for line in re.findall(r"<tr>(.*?)</tr>", page.text, re.DOTALL)[1:]),
        key=lambda words: words[1],
    )
    assert (whole[:2], whole[5:]) == (["invoices", "7"], ["7", "s", "10", "&lt;b&gt;billing.invoice", "10", "2", "2"])
    assert begun[:4] == ["invoices", "8", "not", "committed"]
    assert "1 of its 2 pieces are written" in " ".join(begun)


async def test_an_operator_gives_a_batch_up_with_a_reason(
    settings: Settings, tmp_path: Path, database_url: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(BATCHES)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        viewed = await client.get("/batches")
        await log_in(client, Role.OPERATOR)
        page = await client.get("/batches")
        form = {"app_id": "invoices", "version": "8"}
        silent = await post(client, "/batches/give-up", {**form, "why": " "})
        done = await post(client, "/batches/give-up", {**form, "why": "the input is gone"})
        after = await client.get("/batches")

    assert ("Give it up" in viewed.text, "Give it up" in page.text) == (False, True)
    assert (silent.status_code, done.status_code) == (422, 303)
    assert "Give it up" not in after.text
    told = " ".join(re.sub(r"<[^>]*>", " ", after.text).split())
    assert "given up by operator: the input is gone. There stay 1 of its 2 pieces: 5 rows, with their events" in told
