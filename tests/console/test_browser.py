"""The console in Chromium: what it shows, what it asks for, and that its cookies work there."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from relay.config.settings import Settings
from tests.console.rows import parked, sent, waiting
from tests.console.site import PASSWORD, serving, users
from tests.operate.rows import Rows
from tests.support.eventually import eventually

CHROMIUM = shutil.which("chromium")
PAGES = (
    "/", "/messages", "/messages?state=parked", "/failures", "/jobs", "/replay", "/replay?since=1d", "/reconcile",
    "/routes", "/nodes", "/retention", "/batches",
    "/doctor", "/audit",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed; as root, `tests/support/packages test`"
)


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def window(
    chromium: Browser, *, width: int = 1280, dark: bool = False, scripts: bool = True
) -> AsyncIterator[BrowserContext]:
    """Yield a window, whose pages may complain about nothing and ask no other site."""
    complaints: list[str] = []
    context = await chromium.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
    )
    context.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("request", lambda request: complaints.append(request.url) if "127.0.0.1" not in request.url else None)
    yield context
    await context.close()
    assert complaints == []


async def has_overflow(page: Page) -> bool:
    return bool(await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_the_pages_fit_a_desk_and_a_phone_and_keep_to_the_policy(
    chromium: Browser, settings: Settings, database_url: str, width: int, dark: bool
) -> None:
    row = parked(database_url, "x" * 200 + "<img src=x onerror=alert(1)>")
    sent(database_url, 60)
    async with serving(settings) as address, window(chromium, width=width, dark=dark) as context:
        page = await context.new_page()
        for path in (*PAGES, f"/messages/{row}"):
            await page.goto(address + path)
            await expect(page.locator("main h1").first).to_be_visible()
            assert not await has_overflow(page), path


async def test_the_figures_move_without_a_reload(chromium: Browser, settings: Settings, database_url: str) -> None:
    async with serving(settings) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address)
        await expect(page.locator(".verdict")).to_contain_text("no relay is alive", timeout=30_000)
        waiting(database_url, "parked", 3)

        await expect(page.locator(".verdict")).to_contain_text("3 parked", timeout=30_000)


async def test_reading_and_acting_need_no_script(chromium: Browser, settings: Settings, database_url: str) -> None:
    parked(database_url, "a secret")
    async with serving(settings) as address, window(chromium, scripts=False) as context:
        page = await context.new_page()
        await page.goto(address)
        await page.get_by_role("link", name="See what failed, and retry it").click()
        await page.locator("tbody a").first.click()
        await page.locator("tbody a").first.click()
        await page.get_by_role("button", name="Reveal").click()

        await expect(page.locator("pre").last).to_contain_text("a secret")


@pytest.mark.parametrize("scripts", [True, False])
async def test_a_parked_row_is_set_aside_from_a_cold_start(
    chromium: Browser, settings: Settings, database_url: str, scripts: bool
) -> None:
    parked(database_url, "too large")
    async with serving(settings) as address, window(chromium, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(address)
        await page.get_by_role("link", name="See what failed, and retry it").click()
        await page.get_by_role("link", name="too large").click()
        await page.get_by_label("Why").fill("a test wrote it")
        await page.get_by_role("button", name="Archive all").click()
        progress = page.locator("#progress")
        if not scripts:
            await eventually(lambda: _is_done(page), "the job is done")

        await expect(progress).to_contain_text("1 of 1")
        await expect(progress.locator(".tag")).to_have_text("done")
        await page.goto(f"{address}/failures")
        await expect(page.locator("main")).to_contain_text("Nothing has failed")


@pytest.mark.parametrize(("width", "scripts"), [(1280, True), (390, False)])
async def test_a_route_and_a_lane_are_paused_and_resumed(
    chromium: Browser, settings: Settings, database_url: str, width: int, scripts: bool
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        rows.quarantined("gone")
    async with serving(settings) as address, window(chromium, width=width, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(f"{address}/routes")
        await page.get_by_label("Routing key").fill("later")
        await page.get_by_label("Why the route waits").fill("billing is restored")
        await page.get_by_role("button", name="Pause the route").click()
        await page.locator("select[name=lane]").select_option("7")
        await page.get_by_label("Why the lane waits").fill("too loud")
        await page.get_by_role("button", name="Pause the lane").click()
        await expect(page.get_by_role("button", name="Resume route 2")).to_be_visible()
        await expect(page.get_by_role("button", name="Probe now")).to_be_visible()
        assert not await has_overflow(page)
        await page.goto(f"{address}/nodes")
        await expect(page.locator(".lanes .paused")).to_contain_text("paused by")
        await page.goto(address)
        await eventually(lambda: _has_link(page), "the overview leads to the pauses")
        await page.get_by_role("link", name="See what is paused, and resume it").first.click()
        await page.get_by_role("button", name="Resume route 2").click()
        await page.get_by_role("button", name="Resume lane 7").click()

        await expect(page.locator("main")).to_contain_text("No lane is paused")
        await expect(page.get_by_role("button", name="Resume")).to_have_count(0)


async def _has_link(page: Page) -> bool:
    await page.reload()
    return await page.get_by_role("link", name="See what is paused, and resume it").count() > 0


async def _is_done(page: Page) -> bool:
    await page.reload()
    return await page.locator("#progress .tag").text_content() == "done"


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
        await page.goto(address)
        await page.get_by_label("Name").fill("viewer")
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator(".verdict")).to_be_visible()
        await page.goto("data:text/html,<a href='" + address + "/nodes'>there</a>")
        await page.get_by_role("link", name="there").click()

        await expect(page.locator("h1")).to_have_text("Nodes")
        (cookie,) = await context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["secure"]) == ("__Host-relay", True, True)
        assert cookie["sameSite"] == "Strict"
