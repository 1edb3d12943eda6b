"""A moment on a page has its age and the local time next to UTC; without a script it is UTC."""

import asyncio
import re
from datetime import UTC, datetime

import pytest
from playwright.async_api import Browser, Route, expect

from relay.config.settings import Settings
from relay.console.formats import marked, moment
from tests.console.filled import fill
from tests.console.site import serving
from tests.console.windows import NEEDS_CHROMIUM
from tests.operate.rows import Rows

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
AGE = r"(now|\d+ (s|min) ago)"
LOCAL = r"(\d+ \w{3} )?\d\d:\d\d GMT\+5:30"  # with the day where it is another one there


@NEEDS_CHROMIUM
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right clock", "wrong clock"])
async def test_a_moment_has_its_age_and_the_local_time(
    chromium: Browser, settings: Settings, database_url: str, is_wrong: bool
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        rows.parked("1")
        rows.quarantined("nowhere")
    async with serving(settings) as address:
        page = await chromium.new_page(timezone_id="Asia/Kolkata")
        if is_wrong:
            await page.clock.set_fixed_time("2031-01-01T00:00:00Z")
        await page.goto(address.entrance)
        await page.goto(f"{address}/messages?state=parked")
        await expect(page.locator("tbody td", has=page.locator("time"))).to_have_text(
            re.compile(rf"^{STAMP} {AGE}, {LOCAL}$")
        )
        await page.goto(f"{address}/routes/1")
        await expect(page.locator("dd", has=page.locator("time")).last).to_have_text(
            re.compile(rf"^{STAMP} \d+ d ago, {LOCAL}$")
        )


@NEEDS_CHROMIUM
async def test_what_comes_later_gets_them_too_also_in_a_sentence(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    async with serving(settings) as address:
        page = await chromium.new_page(timezone_id="Asia/Kolkata")
        await page.goto(address.entrance)
        await expect(page.locator(".asof")).to_have_text(re.compile(rf"^as of {STAMP} {AGE}, {LOCAL}$"))
        rows = Rows(database_url)
        with rows.connection:
            rows.quarantined("nowhere")

        await expect(page.locator(".reasons")).to_contain_text(
            re.compile(rf"does not work since {STAMP} \d+ d ago, {LOCAL}, 1 row waits"), timeout=30_000
        )


@NEEDS_CHROMIUM
async def test_a_page_that_is_slow_to_come_tells_the_ages_of_what_comes_later(
    chromium: Browser, settings: Settings
) -> None:
    async def late(route: Route) -> None:
        answer = await route.fetch()
        await asyncio.sleep(4)
        await route.fulfill(response=answer)

    async with serving(settings) as address:
        page = await chromium.new_page(timezone_id="Asia/Kolkata")
        await page.goto(address.entrance)
        await page.route(f"{address}/", late)
        await page.goto(f"{address}/")
        await expect(page.locator(".asof")).to_have_text(re.compile(rf"^as of {STAMP} {AGE}, {LOCAL}$"))


@NEEDS_CHROMIUM
async def test_without_a_script_moments_are_utc(chromium: Browser, settings: Settings, database_url: str) -> None:
    fill(database_url)
    async with serving(settings) as address:
        context = await chromium.new_context(timezone_id="Asia/Kolkata", java_script_enabled=False)
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/audit")

        found = await page.locator("time[datetime]").all_inner_texts()
        assert found
        assert [each for each in found if not re.fullmatch(STAMP, each)] == []
        assert await page.locator(".ago").count() == 0


def test_a_moment_in_words_is_marked_and_the_words_are_escaped() -> None:
    at = datetime(2026, 11, 29, 6, 31, 58, tzinfo=UTC)

    assert moment(at) == '<time datetime="2026-11-29T06:31:58Z">2026-11-29 06:31:58 UTC</time>'
    assert moment(None) == "-"
    assert marked("at 2026-11-29 06:31:58Z: see `relay <b>`") == (f"at {moment(at)}: see <code>relay &lt;b&gt;</code>")
    assert marked("2026-11-29 06:31:58, and 12026-11-29 06:31:58 UTC") == (
        "2026-11-29 06:31:58, and 12026-11-29 06:31:58 UTC"
    )
