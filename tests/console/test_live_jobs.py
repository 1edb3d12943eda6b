"""What an operator sees of a job: by itself in a browser with scripts, and by a reload in one without."""

import asyncio
import re
import time

import psycopg
import pytest
from aio_pika.abc import AbstractChannel
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.jobs.job import Caution, Kind, pause_job
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import order_rows
from relay.servers.postgres.tables import Tables
from tests.console.carried import KEYS, SOON, bind, channel, states, write
from tests.console.site import serving
from tests.console.windows import NEEDS_CHROMIUM, window
from tests.http.conftest import StartRelay
from tests.operate.rows import Rows
from tests.operate.settler import Settler
from tests.support.eventually import eventually

__all__ = ["channel"]  # a fixture

LONG = 60_000  # milliseconds, on a busy machine
PAUSED = re.compile("Jobs.*1 paused")

pytestmark = NEEDS_CHROMIUM
with_and_without_scripts = pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])


async def sees(page: Page, words: str, where: str, *, scripts: bool) -> None:
    """Wait until a part of the page says this: by itself, or when it is loaded again."""
    if scripts:
        await expect(page.locator(where)).to_contain_text(words, timeout=LONG)
        return

    async def says() -> bool:
        await page.reload()
        return words in " ".join(await page.locator(where).all_inner_texts())

    await eventually(says, f"{where} says {words}", 60)


async def press(page: Page, button: str) -> None:
    async with page.expect_navigation():  # or a reload would end it
        await page.get_by_role("button", name=button).click()


@with_and_without_scripts
async def test_a_retry_that_mends_nothing_says_so(
    chromium: Browser,
    settings: Settings,
    channel: AbstractChannel,
    rows: Rows,
    start_relay: StartRelay,
    scripts: bool,
) -> None:
    await bind(channel)
    write(rows, 1)
    rows.connection.execute("UPDATE outbox.message SET payload = to_jsonb(repeat('x', 2000))")
    start_relay(**SOON, RELAY_MAX_MESSAGE_BYTES="1000")
    await eventually(lambda: states(rows) == {"parked"}, "they are too large", 60)
    async with serving(settings) as address, window(chromium, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/failures")
        await page.locator("tbody a").first.click()
        await page.get_by_label("Retry in stages").uncheck()
        await press(page, "Retry all")
        pressed = time.monotonic()

        await sees(page, f"of {KEYS}: {KEYS} parked again", "#progress", scripts=scripts)
        print(f"seconds to the words: {time.monotonic() - pressed:.1f}")
        await sees(page, "done", "#progress .tag", scripts=scripts)
        await expect(page.locator("#progress .tag")).to_have_class("tag warning")
        await expect(page.locator("#failed tbody tr")).to_have_count(KEYS)
        await expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        await page.goto(f"{address}/failures")
        await expect(page.locator("tbody td.number").first).to_have_text(str(KEYS))
        await page.goto(f"{address}/jobs")
        await expect(page.locator("tbody tr")).to_contain_text(f"of {KEYS}: {KEYS} parked again")


@with_and_without_scripts
async def test_a_job_that_is_paused_is_on_the_overview_until_it_goes_on(
    chromium: Browser, settings: Settings, database_url: str, rows: Rows, scripts: bool
) -> None:
    for number in range(40):
        rows.parked(str(number))
    rows.node()
    with psycopg.connect(database_url, autocommit=True) as connection:
        job = order_rows(
            Tables(connection, "outbox"),
            Kind.RETRY,
            ParkedSelection(),
            by="ada",
            caution=Caution(rate=4),
            by_console=True,
        ).id
        async with serving(settings) as address, window(chromium, scripts=scripts) as context:
            page = await context.new_page()
            await page.goto(address.entrance)
            await page.goto(f"{address}/jobs/{job}")
            await sees(page, "a second", "#progress", scripts=scripts)
            await sees(page, "left", "#progress", scripts=scripts)
            await expect(page.get_by_role("button", name="Pause")).to_be_visible()
            await page.get_by_label("Why").fill("typed while the page moves")
            # In a thread: the console in this loop may hold the row of the job.
            await asyncio.to_thread(pause_job, Tables(connection, "outbox"), job, by="bob", why="lunch")
            paused_at = time.monotonic()

            await sees(page, "paused by bob: lunch", "#progress", scripts=scripts)
            print(f"seconds to the pause: {time.monotonic() - paused_at:.1f}")
            await expect(page.get_by_role("button", name="Go on")).to_be_visible()
            await expect(page.get_by_role("button", name="Pause")).to_have_count(0)
            if scripts:
                await expect(page.get_by_label("Why")).to_have_value("typed while the page moves")
            await page.goto(str(address))
            await sees(page, f"job {job} (retry) is paused: paused by bob: lunch", ".verdict", scripts=scripts)
            await sees(page, "1 paused", "nav", scripts=scripts)
            async with page.expect_navigation():
                await page.get_by_role("link", name="See the job, and let it go on").click()
            await press(page, "Go on")
            await sees(page, "running", "#progress .tag", scripts=scripts)
            with Settler(database_url, fails=lambda _: False):
                await sees(page, "of 40: all sent", "#progress", scripts=scripts)
            await expect(page.get_by_role("button", name="End for good")).to_have_count(0)
            await expect(page.get_by_label("Why")).to_be_hidden()
            await expect(page.get_by_role("link", name=PAUSED)).to_have_count(0)
