"""Windows of Chromium on a console."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Page, expect

from tests.console.site import PASSWORD

CHROMIUM = shutil.which("chromium")
LONG = 60_000  # milliseconds, on a busy machine
expect.set_options(timeout=LONG)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed; as root, `tests/support/packages test`"
)

# What axe-core checks in each colour: all rules that are on, and the size of targets; in dark the contrasts again.
CHECKED: tuple[tuple[Literal["light", "dark"], dict[str, object]], ...] = (
    ("light", {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}),
    ("dark", {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}),
)


@asynccontextmanager
async def window(
    chromium: Browser, *, width: int = 1280, dark: bool = False, scripts: bool = True, is_refused: bool = False
) -> AsyncIterator[BrowserContext]:
    """Yield a window, whose pages may complain about nothing and ask no other site.

    Args:
        is_refused: a form of the test is refused, which Chromium complains about.
    """
    complaints: list[str] = []
    context = await chromium.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
    )
    context.on(
        "console",
        lambda message: (
            complaints.append(f"{message.location['url']}: {message.text}")
            if message.type in ("error", "warning") and not (is_refused and "status of 422" in message.text)
            else None
        ),
    )
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("request", lambda request: complaints.append(request.url) if "127.0.0.1" not in request.url else None)
    yield context
    await context.close()
    assert complaints == [], complaints


async def log_in(page: Page, name: str) -> None:
    await page.get_by_label("Name").fill(name)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Log in").click()


async def expect_login(*tabs: Page) -> None:
    """Wait until each tab has loaded the login page: Chromium may never close some that are on their way to it."""
    for tab in tabs:
        await expect(tab.get_by_label("Password")).to_be_visible(timeout=LONG)
        await tab.wait_for_load_state()


async def open_tab(context: BrowserContext, address: str) -> Page:
    """Return a new tab that shows the page of this address."""
    page = await context.new_page()
    await page.goto(address)
    return page


async def expect_state(page: Page, state: str) -> None:
    """Wait until the icon of the page shows a state."""
    icon = re.compile(rf"/icon/{state}\.svg$")
    await expect(page.locator("link[rel=icon]")).to_have_attribute("href", icon, timeout=LONG)
    await expect(page.locator(".brand img")).to_have_attribute("src", icon)
    await expect(page.locator(".brand img")).to_have_attribute("alt", f"State: {state}.")


async def has_overflow(page: Page) -> bool:
    await page.wait_for_load_state()  # a click does not wait for the style sheet of the page that it opens
    return bool(await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


async def violations(page: Page) -> list[str]:
    """Return what axe-core has against the page in light colours, and against its contrasts in dark ones."""
    await expect(page.locator("main h1").first).to_be_visible()
    await page.wait_for_load_state()  # as in has_overflow
    found = []
    for colours, options in CHECKED:
        await page.emulate_media(color_scheme=colours, reduced_motion="reduce")  # no colour is on its way
        report = await Axe().run(page, options=options)
        found += [
            f"{page.url}, {colours}: {each['id']}: {node['html'][:120]}: {node['failureSummary']}"
            for each in report.response["violations"]
            for node in each["nodes"]
        ]
    return found
