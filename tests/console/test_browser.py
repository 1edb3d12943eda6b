"""The console in Chromium: what it shows, what it asks for, and that its cookies work there."""

from pathlib import Path
from uuid import uuid4

import pytest
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.every_page import pages
from tests.console.filled import fill
from tests.console.rows import parked, waiting
from tests.console.site import PASSWORD, serving, users
from tests.console.windows import NEEDS_CHROMIUM, has_overflow, log_in, violations, window
from tests.operate.rows import Rows
from tests.support.eventually import eventually

pytestmark = NEEDS_CHROMIUM


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_the_pages_fit_a_desk_and_a_phone_and_keep_to_the_policy(
    chromium: Browser, settings: Settings, database_url: str, width: int, dark: bool
) -> None:
    filled = fill(database_url)
    async with serving(settings) as address, window(chromium, width=width, dark=dark) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        assert page.url == f"{address}/"
        for path in await pages(page, address, filled):
            await page.goto(address + path)
            await expect(page.locator("main h1").first).to_be_visible()
            assert not await has_overflow(page), path


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
async def test_axe_finds_nothing_to_mend_by_day_and_by_night(
    chromium: Browser, settings: Settings, tmp_path: Path, database_url: str, width: int
) -> None:
    filled = fill(database_url)
    async with serving(settings, **users(tmp_path)) as address:
        page = await chromium.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
        await page.goto(address.entrance)
        found = await violations(page)
        await log_in(page, Role.OWNER)
        for path in (*await pages(page, address, filled), "/messages?since=yesterday", "/nowhere"):
            await page.goto(address + path)
            found += await violations(page)
        await page.goto(f"{address}/routes")
        await page.get_by_text("Pause a route or a lane").click()
        await page.get_by_label("Routing key").fill("paid")
        await page.get_by_label("Why the route waits").fill(" ")
        await page.get_by_role("button", name="Pause the route").click()
        found += await violations(page)
        await page.goto(address + filled[0])
        await page.get_by_role("button", name="Reveal").click()
        found += await violations(page)
        await page.get_by_role("button", name="Edit and send again").click()
        found += await violations(page)
        await page.get_by_label("Payload").fill("{")
        await page.get_by_role("button", name="See what changed").click()
        found += await violations(page)
        await page.get_by_label("Payload").fill("{}")
        await page.get_by_role("button", name="See what changed").click()
        found += await violations(page)
        await page.goto(f"{address}/messages/{uuid4()}")
        found += await violations(page)

    assert found == []


async def test_the_figures_move_without_a_reload(chromium: Browser, settings: Settings, database_url: str) -> None:
    async with serving(settings) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await expect(page.locator(".verdict")).to_contain_text("no relay is alive", timeout=30_000)
        waiting(database_url, "parked", 3)

        await expect(page.locator(".verdict")).to_contain_text("3 parked", timeout=30_000)


async def test_a_link_that_is_pressed_while_its_part_changes_is_followed(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    waiting(database_url, "parked", 1)
    async with serving(settings) as address, window(chromium) as context, window(chromium) as elsewhere:
        page, other = await context.new_page(), await elsewhere.new_page()
        for each in (page, other):
            await each.goto(address.entrance)
            await expect(each.locator(".verdict")).to_contain_text("1 parked")
        link = page.locator(".verdict").get_by_role("link", name="See what failed, and retry it")
        await link.hover()
        await page.mouse.down()
        waiting(database_url, "parked", 2)
        await expect(other.locator(".verdict")).to_contain_text("3 parked")
        seen = await page.evaluate("document.body.dataset.now")
        await page.wait_for_function("seen => document.body.dataset.now > seen", arg=seen)
        pressed = await page.locator(".verdict").inner_text()
        await page.mouse.up()

        assert "1 parked" in pressed
        await expect(page.locator("h1")).to_have_text("Failures")


async def test_reading_and_acting_need_no_script(chromium: Browser, settings: Settings, database_url: str) -> None:
    parked(database_url, "a secret")
    async with serving(settings) as address, window(chromium, scripts=False) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.get_by_role("link", name="See what failed, and retry it").click()
        await page.locator("tbody a").first.click()
        await page.locator("tbody a").first.click()
        await page.get_by_role("button", name="Reveal").click()

        await expect(page.locator("pre").last).to_contain_text("a secret")


@pytest.mark.parametrize(("width", "scripts"), [(1280, True), (390, False)])
async def test_a_route_and_a_lane_are_paused_and_resumed(
    chromium: Browser, settings: Settings, database_url: str, width: int, scripts: bool
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        rows.quarantined("gone")
    async with serving(settings) as address, window(chromium, width=width, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/routes")
        await page.get_by_text("Pause a route or a lane").click()
        await page.get_by_label("Routing key").fill("later")
        await page.get_by_label("Why the route waits").fill("billing is restored")
        await page.get_by_role("button", name="Pause the route").click()
        await page.get_by_text("Pause a route or a lane").click()
        await page.locator("select[name=lane]").select_option("7")
        await page.get_by_label("Why the lane waits").fill("too loud")
        await page.get_by_role("button", name="Pause the lane").click()
        await expect(page.get_by_role("button", name="Resume route 2")).to_be_visible()
        await expect(page.get_by_role("button", name="Probe all")).to_be_visible()
        assert not await has_overflow(page)
        await page.goto(f"{address}/nodes")
        await expect(page.locator(".lanes .paused")).to_contain_text("paused by")
        await page.goto(address.entrance)
        await eventually(lambda: _has_link(page), "the overview leads to the pauses")
        await page.get_by_role("link", name="See what is paused, and resume it").first.click()
        await page.get_by_role("button", name="Resume route 2").click()
        await page.get_by_role("button", name="Resume lane 7").click()

        await expect(page.locator("main")).to_contain_text("No lane is paused")
        await expect(page.get_by_role("button", name="Resume")).to_have_count(0)


async def _has_link(page: Page) -> bool:
    await page.reload()
    return await page.get_by_role("link", name="See what is paused, and resume it").count() > 0


async def test_a_keyboard_reaches_the_page_and_logs_in(chromium: Browser, settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, **users(tmp_path)) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(f"{address}/nodes")
        await page.keyboard.type("viewer")
        await page.keyboard.press("Tab")
        await page.keyboard.type(PASSWORD)
        await page.keyboard.press("Enter")

        await expect(page.locator("h1")).to_have_text("Nodes")
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()


async def test_a_link_of_another_site_opens_the_page_with_the_session(
    chromium: Browser, settings: Settings, tmp_path: Path
) -> None:
    async with serving(settings, **users(tmp_path)) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await log_in(page, Role.VIEWER)
        await expect(page.locator(".verdict")).to_be_visible()
        await page.goto("data:text/html,<a href='" + address + "/nodes'>there</a>")
        await page.get_by_role("link", name="there").click()

        await expect(page.locator("h1")).to_have_text("Nodes")
        (cookie,) = await context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["secure"]) == ("__Host-relay", True, True)
        assert cookie["sameSite"] == "Strict"
