"""What is on a page fits the screen: no table scrolls sideways, no date breaks, and headings go down in size."""

from typing import Any

import pytest
from playwright.async_api import Browser

from relay.config.settings import Settings
from tests.console.every_page import pages
from tests.console.filled import fill
from tests.console.site import serving
from tests.console.windows import NEEDS_CHROMIUM, window

pytestmark = NEEDS_CHROMIUM

MISFITS = """() => {
    const found = [];
    const name = (element) => element.getAttribute("aria-label") || element.textContent.trim().slice(0, 40);
    for (const each of document.querySelectorAll(".scroll")) {
        if (each.scrollWidth > each.clientWidth) found.push(`scrolls: ${name(each)}`);
    }
    for (const each of document.querySelectorAll("time")) {
        if (each.getClientRects().length > 1) found.push(`breaks: ${name(each)}`);
    }
    const size = (each) => parseFloat(getComputedStyle(each).fontSize);
    const sizes = ["h1", "h2", "h3"].map((tag) => [...document.querySelectorAll(`main ${tag}`)].map(size));
    for (const [upper, lower] of [[0, 1], [1, 2]]) {
        if (Math.max(...sizes[lower]) >= Math.min(...sizes[upper])) found.push(`h${lower + 1} is too large`);
    }
    return found;
}"""
LABEL = "cell => getComputedStyle(cell, '::before').content"


@pytest.mark.parametrize("width", [1100, 390], ids=["small desk", "phone"])
async def test_no_table_scrolls_no_date_breaks_and_headings_go_down(
    chromium: Browser, settings: Settings, database_url: str, width: int
) -> None:
    filled = fill(database_url)
    misfits: dict[str, Any] = {}
    async with serving(settings) as address, window(chromium, width=width) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        for path in await pages(page, address, filled):
            await page.goto(address + path)
            await page.wait_for_selector("main h1")
            if found := await page.evaluate(MISFITS):
                misfits[path] = found

    assert misfits == {}


async def test_a_row_of_a_table_is_a_card_on_a_phone(chromium: Browser, settings: Settings, database_url: str) -> None:
    fill(database_url)
    async with serving(settings) as address, window(chromium, width=390, scripts=False) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/jobs")

        label = await page.locator("td", has_text="paused").evaluate(LABEL)
        assert label == '"State"'
        await page.set_viewport_size({"width": 1100, "height": 900})
        label = await page.locator("td", has_text="paused").evaluate(LABEL)
        assert label == "none"
