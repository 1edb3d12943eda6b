"""A page whose news stop says so, goes on by itself, and goes to the login when its session is over."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.operate.operation import Role
from relay.testing.servers.process import free_port, is_listening
from tests.cli.command import RELAY, Command
from tests.console.rows import waiting
from tests.console.site import serving, users
from tests.console.windows import NEEDS_CHROMIUM, expect_login, log_in
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way

pytestmark = NEEDS_CHROMIUM

BY_PROXY = {"X-Forwarded-User": "ada", "X-Forwarded-Groups": "sre"}
LONG = 60_000  # milliseconds, on a busy machine


class Console:
    """A console in a process, behind a proxy that says who asks: no session is lost with it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._settings = settings

    def _environment(self) -> dict[str, str]:
        return Command(
            self._folder,
            RELAY_DATABASE_URL=self._settings.database.url.get_secret_value(),
            RELAY_BROKER_URL=self._settings.broker.url.get_secret_value(),
            RELAY_CONSOLE_LISTEN=f"127.0.0.1:{self.port}",
            RELAY_CONSOLE_ORIGIN=self.address,
            RELAY_CONSOLE_AUTHENTICATION="proxy",
            RELAY_CONSOLE_TRUSTED_PROXIES="127.0.0.1",
            RELAY_CONSOLE_OWNER_GROUPS="sre",
        ).environment({})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        async def listens() -> bool:
            return is_listening(self.port)

        process = await asyncio.create_subprocess_exec(RELAY, "console", env=self._environment(), cwd=self._folder)
        try:
            await eventually(listens, "the console listens", 60)
            yield process
        finally:
            process.kill()
            await process.wait()


async def expect_news(page: Page) -> None:
    await expect(page.locator("#no-news")).to_be_hidden(timeout=LONG)
    await expect(page.locator("body")).not_to_have_class("stale", timeout=LONG)


async def expect_no_news(page: Page) -> None:
    await expect(page.locator("#no-news")).to_be_visible(timeout=LONG)
    await expect(page.locator("#no-news")).to_have_text(re.compile(r"No news since \d\d:\d\d:\d\d UTC, trying again"))
    await expect(page.locator("body")).to_have_class("stale")


async def test_a_frozen_console_is_told_until_it_goes_on(chromium: Browser, settings: Settings, tmp_path: Path) -> None:
    console = Console(settings, tmp_path)
    async with console.running() as process:
        page = await chromium.new_page(extra_http_headers=BY_PROXY)
        await page.goto(console.address)
        await expect_news(page)

        process.send_signal(signal.SIGSTOP)
        await expect_no_news(page)

        process.send_signal(signal.SIGCONT)
        await expect_news(page)
    await page.close()


async def test_the_page_goes_on_after_a_restart_of_the_console(
    chromium: Browser, settings: Settings, database_url: str, tmp_path: Path
) -> None:
    console = Console(settings, tmp_path)
    page = await chromium.new_page(extra_http_headers=BY_PROXY)
    async with console.running():
        await page.goto(console.address)
        await expect_news(page)
    await expect_no_news(page)
    waiting(database_url, "parked", 3)

    async with console.running():
        await expect_news(page)
        await expect(page.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)
    await page.close()


async def test_a_cut_network_is_told_until_it_is_back(chromium: Browser, settings: Settings, tmp_path: Path) -> None:
    console = Console(settings, tmp_path)
    async with FaultProxy("127.0.0.1", console.port, amqp=False) as network:
        console.address = f"http://127.0.0.1:{network.port}"
        async with console.running():
            page = await chromium.new_page(extra_http_headers=BY_PROXY)
            await page.goto(console.address)
            await expect_news(page)

            network.hold(Way.DOWN)
            await expect_no_news(page)

            network.release(Way.DOWN)
            await expect_news(page)
        await page.close()


@pytest.mark.parametrize("path", ["/", "/jobs/1"])
async def test_a_page_whose_session_is_over_goes_to_the_login(
    chromium: Browser, settings: Settings, rows: Rows, tmp_path: Path, path: str
) -> None:
    rows.connection.execute(
        "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'ada', '{}')"
    )
    async with serving(settings, **users(tmp_path)) as address:
        context = await chromium.new_context()
        page, other = await context.new_page(), await context.new_page()
        await page.goto(address)
        await log_in(page, Role.VIEWER)
        await page.goto(f"{address}{path}")
        await other.goto(f"{address}/audit")
        await other.get_by_role("button", name="Log out").click()

        await page.wait_for_url(f"{address}/login?next=**", timeout=LONG)
        await expect_login(page, other)
        await context.close()


async def test_a_hidden_tab_hears_from_the_one_that_is_seen(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    async with serving(settings) as address:
        context = await chromium.new_context()
        first, second = await context.new_page(), await context.new_page()
        ended: list[str] = []
        first.on("requestfailed", lambda request: ended.append(request.url))
        await first.goto(address.entrance)
        await expect(first.locator(".verdict")).to_contain_text("no relay is alive", timeout=LONG)

        await see(first, hidden=True)
        await second.goto(str(address))
        await eventually(lambda: f"{address}/live" in ended, "the stream of the first is closed", 60)
        waiting(database_url, "parked", 3)
        for page in (first, second):
            await expect(page.locator(".verdict")).to_contain_text("3 parked", timeout=LONG)

        await second.close()
        waiting(database_url, "parked", 2)
        await expect(first.locator(".verdict")).to_contain_text("5 parked", timeout=LONG)
        await context.close()


async def see(page: Page, *, hidden: bool) -> None:
    """Let the page believe that its tab is hidden, or seen again."""
    await page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )
