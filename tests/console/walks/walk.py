"""A walk: from a cause to its words on the overview, to the repair, and to a verdict that all is well."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.config.topology import TopologySettings
from tests.console.site import serving
from tests.console.windows import window
from tests.consume.effects import QUEUE

EXCHANGE, ROUTING_KEY, EVENT_TYPE = "counters", "counted", "Counted"
MOST_CLICKS = 4
WELL = "All is well"
WITHIN = 120_000  # milliseconds, on a busy machine; how long it takes is printed, and fails nothing
TOPOLOGY = TopologySettings.model_validate(
    {
        "exchanges": [{"name": EXCHANGE}],
        "queues": [{"name": QUEUE}],
        "bindings": [{"exchange": EXCHANGE, "queue": QUEUE, "routing_key": ROUTING_KEY}],
    }
)


@dataclass
class Walk:
    """An operator who watches the overview, and goes from there.

    Args:
        note: keeps what the table shows.
    """

    page: Page
    address: str
    note: Callable[[str, object], None]
    began: float = 0.0
    clicks: int = 0

    def begin(self, cause: str) -> None:
        """Start the clock: the next line brings the cause about."""
        self.note("cause", cause)
        self.began = time.monotonic()

    async def sees(self, words: str) -> None:
        """Wait until the overview says this, without a click or a reload."""
        reason = self.page.locator(".verdict li > span", has_text=words).first
        await reason.wait_for(timeout=WITHIN)
        self.note("seconds", round(time.monotonic() - self.began, 1))
        self.note("words", (await reason.inner_text())[:60])

    async def follow(self, link: str) -> None:
        await self._click("link", link)

    async def press(self, button: str) -> None:
        await self._click("button", button)

    async def fill(self, label: str, words: str) -> None:
        await self.page.get_by_label(label, exact=True).fill(words)

    async def names(self, command: str) -> None:
        """Check that the page names the command that alone can help."""
        await expect(self.page.locator("main")).to_contain_text(command, timeout=WITHIN)
        self.note("repair", f"`{command}`")

    async def is_well(self) -> None:
        """Wait until the overview says so."""
        await self.page.goto(self.address)
        await expect(self.page.locator(".verdict h1")).to_contain_text(WELL, timeout=WITHIN)

    async def _click(self, role: Literal["link", "button"], name: str) -> None:
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        async with self.page.expect_navigation(timeout=WITHIN):
            await self.page.get_by_role(role, name=name).first.click(timeout=WITHIN)
        self.note("clicks", self.clicks)
        if role == "button":
            self.note("repair", name)


@asynccontextmanager
async def walking(chromium: Browser, settings: Settings, note: Callable[[str, object], None]) -> AsyncIterator[Walk]:
    """Yield a walk that begins, and ends, where all is well."""
    listed = settings.model_copy(update={"topology": TOPOLOGY})
    async with serving(listed) as address, window(chromium) as context:
        walk = Walk(await context.new_page(), address, note)
        await walk.page.goto(address.entrance)
        await walk.is_well()
        yield walk
        await walk.is_well()
