"""Windows of Chromium on a console."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, BrowserContext, Page

from tests.console.site import PASSWORD

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed; as root, `tests/support/packages test`"
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
