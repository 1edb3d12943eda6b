"""Curves outlast a restart of the console, with a gap for its time; there is one for each event type and route."""

import re
from collections.abc import Callable
from contextlib import AsyncExitStack

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb
from structlog.testing import capture_logs

from relay.config.settings import Settings
from relay.console import history, sampler
from relay.console.history import EventType, Name, SentRoute
from relay.console.sent_curves import LISTED
from relay.console.site import Site
from tests.console.rows import sent, waiting
from tests.console.site import browser, running
from tests.support.events import named, times
from tests.support.eventually import eventually

ROUTE = SentRoute("outbox", "customer.Paid")
PLOT = re.compile(r'<path class="line" d="([^"]+)"/>')
KEPT = """
    INSERT INTO outbox.console_history (at, backlog, sent)
    SELECT now() - ago * interval '1 second', 7, %s FROM generate_series(200, 300, 10) AS ago
"""
TYPES = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)
    SELECT 'customer', 'Type ' || lpad((n %% 200)::text, 3, '0'), '{}', 'sent', now() FROM generate_series(0, %s) AS n
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of half a second."""
    monkeypatch.setattr(sampler, "POINT", 0.5)
    monkeypatch.setattr(sampler, "IDLE_INTERVAL", 0.2)


def plots(page: httpx.Response) -> list[str]:
    """Return the lines of the figures, and of the curve of what was sent."""
    return PLOT.findall(page.text)


async def sends_until(url: str, condition: Callable[[], bool], what: str) -> None:
    """Let rows be sent until the condition holds."""

    def holds() -> bool:
        sent(url, 14)
        return condition()

    await eventually(holds, what)


@pytest.mark.usefixtures("soon")
async def test_a_console_goes_on_with_the_curves_of_the_one_before(settings: Settings, database_url: str) -> None:
    waiting(database_url, "pending", 5)
    async with running(settings) as app:
        first: Site = app.state.site
        await sends_until(database_url, lambda: len(first.history.hour.sent) >= 3, "it has counted three times")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM outbox.message WHERE state = 'pending'")
    async with running(settings) as app:
        second: Site = app.state.site

        def has_looked() -> bool:
            return bool(second.sampler.latest and second.sampler.latest.history[0].backlog == 5)

        await eventually(has_looked, "the backlog of before is in the curve")
        points = second.sampler.latest.history if second.sampler.latest else ()
        counted = second.history.hour

    assert (points[0].backlog, points[-1].backlog) == (5, 0)
    assert {each.name for each in counted.types} == {EventType("Issued"), EventType("Paid")}
    assert {each.name for each in counted.routes} == {SentRoute("outbox", "customer.Issued"), ROUTE}
    assert any(each.rate(ROUTE) for each in counted.sent)


async def test_the_time_of_a_restart_is_a_gap_in_each_curve(settings: Settings, database_url: str) -> None:
    busiest = {"routes": [["outbox", "customer.Paid", 3.0]], "types": [["Paid", 3.0]]}
    with psycopg.connect(database_url) as connection:
        connection.execute(KEPT, [Jsonb(busiest)])
    async with running(settings) as app, browser(app) as client:
        site: Site = app.state.site

        def has_both() -> bool:
            return site.sampler.latest is not None and site.sampler.latest.history[0].backlog == 7

        await eventually(has_both, "it has looked, and read what was kept")
        overview = await client.get("/?event_type=Paid")

    backlog, *_, paid = plots(overview)
    assert (backlog.count("M"), paid.count("M")) == (2, 1)
    assert "<h3>Paid</h3>" in overview.text


@pytest.mark.usefixtures("soon")
async def test_two_consoles_keep_one_history(settings: Settings, database_url: str) -> None:
    with capture_logs() as events:
        async with AsyncExitStack() as consoles:
            apps = [await consoles.enter_async_context(running(settings)) for _ in range(2)]
            sites: list[Site] = [app.state.site for app in apps]
            await sends_until(
                database_url, lambda: all(len(site.history.hour.sent) >= 4 for site in sites), "both have counted"
            )
    with psycopg.connect(database_url) as connection:
        (slots, written) = connection.execute(
            "SELECT extract(epoch FROM max(at) - min(at)) / 0.5 + 1, count(*) FROM outbox.console_history"
        ).fetchone() or (0, 0)

    assert [each for each in events if each["event"] in ("console.history_not_kept", "console.task_failed")] == []
    assert 0 < written <= slots


@pytest.mark.usefixtures("soon")
async def test_what_is_older_than_an_hour_goes(settings: Settings, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.console_history (at)"
            " SELECT now() + n * interval '59 min' FROM generate_series(-90, 90) AS n"
        )
        async with running(settings) as app:
            site: Site = app.state.site

            async def is_pruned() -> bool:
                (old,) = connection.execute(
                    "SELECT count(*) FROM outbox.console_history"
                    " WHERE at < now() - interval '61 min' OR at > now() + interval '1 min'"
                ).fetchone() or (-1,)
                return bool(old == 0)

            await eventually(is_pruned, "rows of other times are gone")

    assert site.sampler.latest is not None


@pytest.mark.usefixtures("soon")
async def test_without_the_table_curves_go_on_and_one_line_says_so(settings: Settings, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("ALTER TABLE outbox.console_history RENAME TO elsewhere")
    with capture_logs() as events:
        async with running(settings) as app:
            site: Site = app.state.site
            await sends_until(database_url, lambda: len(site.history.hour.sent) >= 3, "it has counted")
            failing = site.background.failing()

    assert times(events, "console.history_not_kept") == 1
    assert "relay migrate" in named(events, "console.history_not_kept")[0]["error"]
    assert failing == []


@pytest.mark.usefixtures("soon")
async def test_the_page_lists_the_busiest_of_many_and_draws_the_chosen(settings: Settings, database_url: str) -> None:
    async with running(settings) as app, browser(app) as client:
        site: Site = app.state.site
        looks = [site.history.hour]

        def counted() -> bool:
            """Write once a step: of more rows only a part is read, and another type may seem the busiest."""
            if site.history.hour is not looks[-1]:
                looks.append(site.history.hour)
                with psycopg.connect(database_url) as connection:
                    connection.execute(TYPES, [999])
                    connection.execute(TYPES, [3])
            return len(site.history.hour.types) == history.NAMED

        await eventually(counted, "it has counted")
        overview = await client.get("/")
        chosen = await client.get("/", params={"event_type": "Type 002"})
        route = await client.get("/", params={"exchange": "outbox", "routing_key": "customer.Type 001"})
        missing = await client.get("/", params={"event_type": "<b>"})

    assert overview.text.count('<td class="name"><a id="sent-') == 2 * LISTED
    assert "<h3>Type 000</h3>" in overview.text
    assert "<h3>Type 002</h3>" in chosen.text
    assert chosen.text.count('aria-current="true"') == 1
    assert "<h3>outbox → customer.Type 001</h3>" in route.text
    assert "Nothing was sent there in the last hour" in missing.text
    assert len(overview.content) < 60_000


def test_what_was_not_among_many_is_not_known() -> None:
    many: dict[Name, float] = {EventType(str(number)): 1.0 for number in range(history.NAMED)}

    assert history.Sent(0.0, {}, many).rate(EventType("other")) is None
    assert history.Sent(0.0, {}, {EventType("1"): 2.0}).rate(EventType("other")) == 0
