"""An operator mends what consumers could not do, in a browser, from the first page on, with scripts and without."""

from contextlib import AsyncExitStack

import pytest
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.consume import Permanent
from tests.console.consumers import rows, with_queue
from tests.console.site import serving
from tests.console.windows import NEEDS_CHROMIUM, window
from tests.consume.conftest import inbox, make_consumer, queue, table
from tests.consume.effects import QUEUE, MakeConsumer, Queue, Stumbling, Table, running
from tests.consume.policies import SEVERAL_MINUTES
from tests.operate.rows import Rows
from tests.support.eventually import eventually

__all__ = ["inbox", "make_consumer", "queue", "rows", "table"]  # fixtures

pytestmark = [
    NEEDS_CHROMIUM,
    pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"]),
]


async def shows(page: Page, words: str, *, where: str = "main") -> None:
    """Wait until the page shows these words; load it again until then, as a reader does."""

    async def does() -> bool:
        await page.wait_for_load_state()  # of what a click has opened
        await page.reload()
        return words in (await page.locator(where).text_content() or "")

    await eventually(does, f"the page shows {words!r}")


async def test_a_poison_group_of_dead_letters_is_sent_back(
    chromium: Browser,
    settings: Settings,
    rows: Rows,
    *,
    queue: Queue,
    table: Table,
    make_consumer: MakeConsumer,
    scripts: bool,
) -> None:
    handler = Stumbling(dict.fromkeys(range(3), 100), Permanent("no such customer"))
    consumer = make_consumer(handler.handle)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(consumer))
        await queue.send_all(range(3))
        await eventually(lambda: consumer.counters.acknowledged == 3, "the letters are dead")
        address = await stack.enter_async_context(serving(with_queue(settings, QUEUE)))
        context = await stack.enter_async_context(window(chromium, scripts=scripts))
        page = await context.new_page()
        await page.goto(address.entrance)
        await shows(page, f"3 dead letters in {QUEUE}.dead")

        await page.get_by_role("link", name="See why, and retry them").click()
        await page.get_by_role("row", name=f"{QUEUE}.dead").get_by_role("button", name="Look").click()
        if scripts:  # the page looks by itself
            await expect(page.locator("main")).to_contain_text("no such customer", timeout=30_000)
        else:
            await shows(page, "no such customer")
        await page.get_by_role("link", name="no such customer").click()
        handler.failures.clear()  # a release that knows the customer
        await page.get_by_label("Why", exact=True).fill("1.4 knows the customer")
        await page.get_by_role("button", name="Retry all").click()

        if scripts:
            await expect(page.locator("#progress")).to_contain_text("3 of 3", timeout=30_000)
        else:
            await shows(page, "3 of 3", where="#progress")
        await eventually(lambda: consumer.counters.applied == 3, "all are applied")
        assert await table.numbers() == [0, 1, 2]
        assert await queue.dead_count() == 0
        await page.get_by_role("link", name="Overview").click()
        await shows(page, "All is well", where=".verdict")
        await page.get_by_role("link", name="Failures").click()
        await expect(page.locator("main")).not_to_contain_text("no such customer")


async def test_a_lagging_consumer_tries_now_what_it_holds_for_an_hour(
    chromium: Browser,
    settings: Settings,
    rows: Rows,
    *,
    queue: Queue,
    table: Table,
    make_consumer: MakeConsumer,
    scripts: bool,
) -> None:
    handler = Stumbling({0: 100}, ConnectionError("the tax office does not answer"))
    consumer = make_consumer(handler.handle, retries=SEVERAL_MINUTES)
    async with (
        running(consumer),
        serving(with_queue(settings)) as address,
        window(chromium, scripts=scripts) as context,
    ):
        await queue.send_all(range(5))
        await eventually(lambda: consumer.counters.held == 5, "one is held, and four behind it")
        page = await context.new_page()
        await page.goto(address.entrance)
        await shows(page, "consumer projection holds 5 messages of 1 key")

        await page.get_by_role("link", name="See why, and let it try now").click()
        await page.get_by_role("link", name="the tax office does not answer").click()
        handler.failures.clear()  # it answers again
        await page.get_by_label("Why", exact=True).fill("the tax office is open")
        await page.get_by_role("button", name="Try now").click()

        await eventually(lambda: consumer.counters.applied == 5, "all are applied")
        assert await table.numbers() == list(range(5))
        await page.get_by_role("link", name="Overview").click()
        await shows(page, "All is well", where=".verdict")
        await page.get_by_role("link", name="Failures").click()
        await shows(page, "Nothing has failed")
