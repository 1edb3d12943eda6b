"""The console works with the role `outbox_console`, and that role can be no relay."""

from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from tests.console.rows import parked, sent
from tests.console.site import browser, post, running
from tests.support.roles import allowed, granted_roles


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection, granted_roles(connection):
        yield connection


async def test_every_page_opens_with_the_rights_of_the_role(
    settings: Settings, database_url: str, connection: psycopg.Connection
) -> None:
    row = parked(database_url, "x")
    sent(database_url, 3)
    url = SecretStr(f"{database_url}?options=-crole%3Doutbox_console")
    limited = settings.model_copy(update={"database": DatabaseSettings(url=url)})
    paths = (
        "/",
        "/messages",
        "/messages?state=parked",
        "/messages?state=pending",
        f"/messages/{row}",
        "/nodes",
        "/routes",
    )
    async with running(limited) as app, browser(app) as client:
        answers = {path: await client.get(path) for path in (*paths, "/doctor")}
        shown = await post(client, f"/messages/{row}/reveal", {})
        await app.state.site.sampler.stop()

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(answers, 200)
    assert shown.status_code == 200
    assert "must be granted" not in answers["/"].text
    assert app.state.site.sampler.latest.error is None


def test_the_role_carries_no_row(connection: psycopg.Connection) -> None:
    statements: list[LiteralString] = [
        "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')",
        "UPDATE outbox.message SET sent_at = now()",
        "UPDATE outbox.message SET payload = '2'",
        "DELETE FROM outbox.message_pending",
        "INSERT INTO outbox.message_sent DEFAULT VALUES",
        "DELETE FROM outbox.operator_audit",
        "UPDATE outbox.operator_audit SET why = 'another'",
        "INSERT INTO outbox.node (name, backend_pid, version) VALUES ('n', 1, '1')",
        """
        INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
        VALUES ('c', gen_random_uuid(), now())
        """,
    ]

    assert allowed(connection, "outbox_console", statements) == []
