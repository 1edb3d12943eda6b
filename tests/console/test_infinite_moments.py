"""A row whose moments are infinite, which any writer can write, hides nothing from the operator."""

from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.operate.status import read_status
from relay.probes.backlog import Backlog
from relay.servers.postgres.tables import Tables
from tests.cli.command import Command
from tests.operate.rows import Rows

MESSAGE = UUID("018f0000-0000-7000-8000-000000000001")
MOMENTS = pytest.mark.parametrize(
    ("available_at", "created_at"),
    [("-infinity", None), ("infinity", None), ("-infinity", "-infinity"), ("infinity", "infinity")],
)
PAGES = "/", "/messages?state=pending", f"/messages/1?message_id={MESSAGE}", "/messages?state=parked", "/failures"
CALLS = "/api/v1/status", "/api/v1/parked", "/api/v1/parked/preview", "/api/v1/failures"


def write(rows: Rows, available_at: str, created_at: str | None) -> None:
    """Write such a row that is pending and one that is parked, and one that has waited for an hour."""
    when: dict[str, Any] = {"available_at": available_at, **({"created_at": created_at} if created_at else {})}
    rows.pending("1", message_id=MESSAGE, **when)
    rows.parked("2", **when)
    rows.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, created_at)"
        " VALUES ('invoice', '3', 'InvoiceIssued', '{}', now() - interval '1 hour')"
    )


@MOMENTS
@pytest.mark.every_postgres
async def test_the_age_of_the_other_rows_is_told(
    available_at: str, created_at: str | None, rows: Rows, database: DatabaseSettings
) -> None:
    write(rows, available_at, created_at)
    counting = Backlog(database, RelaySettings())

    status = read_status(Tables(rows.connection, "outbox"), published_before={})
    counts = await counting.counts()
    await counting.close()

    assert (status.pending, status.parked) == (2, 1)
    assert counts is not None
    for age in (status.oldest_pending_age_s, counts.oldest_pending_age):
        assert age is not None
        assert 3600 <= age < 7200


@MOMENTS
async def test_commands_list_and_show_it(
    available_at: str, created_at: str | None, rows: Rows, database_url: str, tmp_path: Path
) -> None:
    write(rows, available_at, created_at)
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url)

    for command in (["status"], ["parked", "list"], ["parked", "show", "2"], ["failures", "list"]):
        told = relay(*command, "--output", "json")
        assert told.code == 0, told
        assert "Infinity" not in told.out


@MOMENTS
async def test_pages_and_the_api_show_it(
    available_at: str, created_at: str | None, rows: Rows, client: httpx.AsyncClient
) -> None:
    write(rows, available_at, created_at)

    answers = {path: await client.get(path) for path in (*PAGES, *CALLS)}

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(answers, 200)
