"""The menu: three groups of pages, with the counts of what needs a look, on each screen, without a script."""

import re

import pytest
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.console.templates import MENU
from tests.console.filled import fill
from tests.console.rows import waiting
from tests.console.site import serving
from tests.console.windows import LONG, NEEDS_CHROMIUM, has_overflow, window
from tests.operate.rows import Rows

pytestmark = NEEDS_CHROMIUM

GROUPS = {group: [title for _, title in entries] for group, entries in MENU}
PAUSED_JOB = """
    INSERT INTO outbox.job (kind, source, made_by, filter, state, by_console)
    VALUES ('retry', 'parked', 'ada', '{}', 'paused', true)
"""
ROWS = "links => new Set(links.map(link => Math.round(link.getBoundingClientRect().top))).size"
FOCUSED = "document.activeElement.textContent.trim()"


async def titles(page: Page, group: str) -> list[str]:
    """Return the pages of a group that can be seen, without their counts."""
    links = page.get_by_role("navigation").get_by_role("list", name=group).get_by_role("link")
    return [re.split(r"\s*\d", text)[0] for text in await links.all_inner_texts()]


@pytest.mark.parametrize("width", [1440, 1280, 1100])
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "plain"])
async def test_a_desk_shows_all_pages_by_group_in_at_most_two_rows(
    chromium: Browser, settings: Settings, database_url: str, width: int, scripts: bool
) -> None:
    fill(database_url)
    async with serving(settings) as address, window(chromium, width=width, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/jobs")

        assert {group: await titles(page, group) for group in GROUPS} == GROUPS
        assert await page.locator("nav a").evaluate_all(ROWS) <= 2
        await expect(page.locator("nav [aria-current=page]")).to_contain_text("Jobs")
        assert not await has_overflow(page)


async def test_a_phone_opens_the_menu_by_a_key(chromium: Browser, settings: Settings) -> None:
    async with serving(settings) as address, window(chromium, width=390, scripts=False) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await expect(page.get_by_role("link", name="Doctor")).to_be_hidden()
        await page.get_by_text("Menu", exact=True).focus()
        await page.keyboard.press("Enter")

        assert {group: await titles(page, group) for group in GROUPS} == GROUPS
        assert not await has_overflow(page)
        await page.get_by_role("link", name="Audit").click()
        await expect(page.locator("h1")).to_have_text("Audit")


async def test_a_keyboard_goes_through_the_entries_of_a_desk(chromium: Browser, settings: Settings) -> None:
    async with serving(settings) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.locator(".brand").focus()
        reached = []
        for _ in range(sum(map(len, GROUPS.values()))):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate(FOCUSED))

        assert reached == [title for group in GROUPS.values() for title in group]


async def test_failures_and_jobs_have_counts_that_move(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    rows = Rows(database_url)
    async with serving(settings) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/nodes")
        await expect(page.get_by_role("link", name="Failures", exact=True)).to_be_visible()
        waiting(database_url, "parked", 3)
        with rows.connection as connection:
            head = rows.parked("k", event_type="Paid")
            rows.parked("k", behind=head)
            connection.execute(PAUSED_JOB)

        await expect(page.get_by_role("link", name="Failures 4 messages failed")).to_be_visible(timeout=LONG)
        await expect(page.get_by_role("link", name="Jobs 1 paused")).to_be_visible(timeout=LONG)
