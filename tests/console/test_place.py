"""Where the operator is, and how the outbox is there: in the header, the title and the icon of each page."""

import re
from pathlib import Path

import psycopg
import pytest
from playwright.async_api import Browser, expect
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, ConsoleSettings, DatabaseSettings, Settings
from relay.console.place import place_of
from relay.console.verdict import Mood
from relay.operate.operation import Role
from tests.console.rows import waiting
from tests.console.site import browser, running, serving, users
from tests.console.windows import LONG, NEEDS_CHROMIUM, expect_login, expect_state, log_in, open_tab, window

TABS = 8  # browsers allow six connections to a server


@pytest.mark.parametrize(
    ("database", "broker", "shown"),
    [
        (
            "postgresql://ada:secret-1@db1.test/shop",
            "amqp://ada:secret-2@mq1.test/orders",
            ("shop on db1.test", "mq1.test/orders"),
        ),
        (
            "postgresql://ada:secret-1@db1.test:6432,db2.test:5432/shop",
            "amqps://ada:secret-2@mq1.test:5671/%2F,amqps://ada:secret-2@[::1]:9/%2F",
            ("shop on db1.test:6432, db2.test", "mq1.test, [::1]:9/"),
        ),
        (
            "host=db1.test user=ada password=secret-1",
            "amqp://ada:secret-2@mq1.test",
            ("ada on db1.test", "mq1.test/"),
        ),
    ],
)
def test_a_place_names_hosts_and_no_login(database: str, broker: str, shown: tuple[str, str]) -> None:
    place = place_of(
        Settings(database=DatabaseSettings(url=SecretStr(database)), broker=BrokerSettings(url=SecretStr(broker)))
    )

    assert (place.database, place.broker) == shown
    assert "secret" not in place.words


def test_a_place_of_many_hosts_is_short() -> None:
    hosts = ",".join(f"database-{number}.example.org" for number in range(20))
    settings = Settings(
        database=DatabaseSettings(url=SecretStr(f"postgresql://{hosts}/shop")),
        broker=BrokerSettings(url=SecretStr("amqp://mq.test/")),
        console=ConsoleSettings(environment="production"),
    )

    assert len(place_of(settings).words) < 120


async def test_each_page_names_the_place_and_an_environment_is_a_text(settings: Settings) -> None:
    async with running(settings, environment="<b>prod</b>") as app, browser(app) as client:
        page = await client.get("/jobs")

    place = place_of(settings)
    assert "<title>Jobs · &lt;b&gt;prod&lt;/b&gt; · " in page.text
    assert page.text.count(place.database) == page.text.count(place.broker) == 2
    assert '<strong class="environment">&lt;b&gt;prod&lt;/b&gt;</strong>' in page.text


async def test_strangers_see_the_environment_and_no_host(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, environment="production", **users(tmp_path)) as app, browser(app) as client:
        page = await client.get("/login")

    assert "<title>Log in · production</title>" in page.text
    assert place_of(settings).database not in page.text
    assert "/icon/" not in page.text


@pytest.mark.parametrize("environment", ["", "production", "<"])
async def test_each_mood_has_its_icon_of_its_own_shape(settings: Settings, environment: str) -> None:
    async with running(settings, environment=environment) as app, browser(app) as client:
        icons = [await client.get(f"/icon/{mood}.svg") for mood in Mood]
        other = await client.get("/icon/blue.svg")

    shapes = [re.sub(r'"#\w+"|<text.*|<path d="M\d+(\.5)? \d+(\.5)?[a-z].*', "", each.text) for each in icons]
    assert len(set(shapes)) == len(Mood)
    assert {each.headers["Content-Type"] for each in icons} == {"image/svg+xml"}
    assert other.status_code == 422
    for each in icons:
        (letter,) = re.findall(r"<text[^>]*>(.*)</text>", each.text) or [""]
        assert letter == {"": "", "production": "P", "<": "&lt;"}[environment]


@NEEDS_CHROMIUM
async def test_the_icon_shows_the_state_as_it_changes(chromium: Browser, settings: Settings, database_url: str) -> None:
    async with serving(settings) as address, window(chromium) as context:
        overview = await open_tab(context, address.entrance)
        jobs = await open_tab(context, f"{address}/jobs")
        for tab in (overview, jobs):
            await expect_state(tab, "warning")  # no relay is alive
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("ALTER SCHEMA outbox RENAME TO elsewhere")
        await expect_state(jobs, "failed")
        await expect_state(overview, "failed")
        await expect(jobs).to_have_title(f"Jobs · {place_of(settings).words}")


@NEEDS_CHROMIUM
async def test_many_overviews_in_one_browser_are_all_alive(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    async with serving(settings) as address, window(chromium) as context:
        tabs = [await open_tab(context, address.entrance)]
        tabs += [await open_tab(context, str(address)) for _ in range(TABS - 1)]
        await tabs[-1].goto(f"{address}/doctor")
        await tabs[-1].goto(str(address))
        waiting(database_url, "parked", 3)

        for tab in tabs:
            await expect(tab.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)
            await expect(tab.locator("body")).not_to_have_class("stale")


@NEEDS_CHROMIUM
async def test_another_tab_goes_on_when_the_one_with_the_stream_is_closed(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    async with serving(settings) as address, window(chromium) as context:
        first = await open_tab(context, address.entrance)
        second = await open_tab(context, str(address))
        await second.close()
        waiting(database_url, "parked", 3)

        await expect(first.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)
        await first.wait_for_timeout(6000)  # longer than a page is silent before it says so
        await expect(first.locator("#no-news")).to_be_hidden()


@NEEDS_CHROMIUM
async def test_a_session_that_ends_leads_every_tab_to_the_login(
    chromium: Browser, settings: Settings, tmp_path: Path
) -> None:
    async with serving(settings, **users(tmp_path)) as address, await chromium.new_context() as context:
        first = await open_tab(context, str(address))
        await log_in(first, Role.VIEWER)
        await expect(first.locator(".verdict")).to_be_visible()
        second = await open_tab(context, str(address))
        third = await open_tab(context, f"{address}/jobs")
        await third.get_by_role("button", name="Log out").click()

        await expect_login(first, second, third)
