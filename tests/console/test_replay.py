"""What was sent is counted by day and sent again from a page."""

from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.rows import sent
from tests.console.site import browser, log_in, post, running, users


async def test_a_replay_is_counted_and_ordered(settings: Settings, tmp_path: Path, database_url: str) -> None:
    sent(database_url, 30)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        empty = await client.get("/replay")
        counted = await client.get("/replay", params={"event": "Paid"})

        form = {"event": "Paid", "why": "a new consumer", "rate": "1"}
        ordered = await post(client, "/replay", form)
        job = await client.get(ordered.headers["Location"])
        await post(client, f"{ordered.headers['Location']}/cancel", {"why": "enough"})

    assert "messages</h2>" not in empty.text
    assert " messages</h2>" in counted.text
    assert ordered.status_code == 303
    assert 'event type <span class="mono">Paid</span>' in job.text
    assert "a new consumer" in job.text


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"event": "Paid", "rate": "fast"},
        {"event": "Paid", "rate": "-1"},
        {"id": "x"},
        {"event": "Paid", "id": ","},
        {"since": "yesterday"},
    ],
    ids=str,
)
async def test_what_cannot_be_replayed_is_refused(
    settings: Settings, tmp_path: Path, database_url: str, form: dict[str, str]
) -> None:
    sent(database_url, 30)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)

        refused = await post(client, "/replay", form)

    assert refused.status_code == 422


async def test_a_viewer_counts_and_orders_nothing(settings: Settings, tmp_path: Path, database_url: str) -> None:
    sent(database_url, 30)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        counted = await client.get("/replay", params={"event": "Paid"})

    assert " messages</h2>" in counted.text
    assert "Send them again" not in counted.text
