"""The audit has the deeds of its tables in their order, each on one page."""

import re
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import DatabaseSettings, Settings
from relay.errors import UsageError
from relay.operate.audit import list_deeds
from relay.operate.operation import Role
from relay.operate.session import session
from tests.console.site import browser, log_in, running, users

ROWS = """
    INSERT INTO outbox.operator_audit (done_at, done_by, command, target, why)
    SELECT timestamptz '2026-11-27' + n * interval '2 min', 'ada', 'parked retry', n::text, 'mended'
    FROM generate_series(1, 7) AS n
"""
LETTERS = """
    INSERT INTO outbox.dead_letter_audit (done_at, done_by, command, why, queue, message_id)
    SELECT timestamptz '2026-11-27' + n * interval '3 min', 'ada', 'discard', 'test', 'q.dead', 'm' || n
    FROM generate_series(1, 5) AS n
"""
REPLAYS = """
    INSERT INTO outbox.job (kind, source, made_at, made_by, why, filter)
    SELECT kind, source, timestamptz '2026-11-27' + n * interval '5 min', 'grace', 'asked for by the customer', '{}'
    FROM generate_series(1, 3) AS n, (VALUES ('replay', 'sent'), ('retry', 'parked')) AS job (kind, source)
"""


@pytest.fixture
def deeds(database_url: str) -> int:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(ROWS)
        connection.execute(LETTERS)
        connection.execute(REPLAYS)  # a retry has a deed for each of its rows
    return 15


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_the_pages_have_each_deed_once_in_order(database: DatabaseSettings, deeds: int, limit: int) -> None:
    found, after = [], None
    with session(database) as tables:
        while True:
            page = list_deeds(tables, limit=limit, after=after)
            found += page.deeds
            if (after := page.next) is None:
                break

    assert len({(deed.command, deed.id) for deed in found}) == len(found) == deeds
    assert [deed.done_at for deed in found] == sorted((deed.done_at for deed in found), reverse=True)


@pytest.mark.parametrize("after", ["x", "1", "1-1", f"1-1-{2**63}"])
def test_what_is_no_place_is_refused(database: DatabaseSettings, after: str) -> None:
    with session(database) as tables, pytest.raises(UsageError, match="no place"):
        list_deeds(tables, limit=1, after=after)


async def test_a_viewer_sees_it(settings: Settings, tmp_path: Path, deeds: int) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get("/audit")

    assert len(re.findall("<tr>", page.text)) == deeds + 1
    assert "dead-letters discard" in page.text
    assert page.text.count("<td>grace</td><td>replay</td>") == 3
