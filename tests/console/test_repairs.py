"""What an operator repairs in a browser: from the verdict of the first page to a verdict that all is well.

The relay is a real process. The checker of the drills reads table and queue, without code of the relay.
"""

import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from aio_pika.abc import AbstractChannel
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.carried import EXCHANGE, KEYS, QUEUE, ROUTING_KEY, ROWS, SOON, bind, channel, states, write
from tests.console.rows import parked
from tests.console.site import serving, users
from tests.console.windows import NEEDS_CHROMIUM, log_in, window
from tests.faults.evidence import Delivered, drain, read_table
from tests.http.conftest import StartRelay
from tests.operate.rows import Rows
from tests.support.eventually import eventually

MAX_BYTES = 1_000  # of a payload, until the operator raises it
QUARANTINED = "[aria-label^='Routes of exchange']"

__all__ = ["channel"]  # a fixture

pytestmark = NEEDS_CHROMIUM
with_and_without_scripts = pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator in front of a page."""

    page: Page
    scripts: bool = True

    async def sees(self, words: str, where: str) -> None:
        """Wait until a part of the page says this: the page moves by itself, or without scripts is loaded again."""
        part = self.page.locator(where)
        if self.scripts:
            await expect(part).to_contain_text(words, timeout=60_000)
        else:
            await self.reads(words, where)

    async def reads(self, words: str, where: str) -> None:
        """Wait until a part of the page says this: it is loaded again until then."""

        async def says() -> bool:
            await self.page.reload()
            return words in " ".join(await self.page.locator(where).all_inner_texts())

        await eventually(says, f"{where} says {words}")

    async def follow(self, link: str) -> None:
        async with self.page.expect_navigation():  # or a reload would end it
            await self.page.get_by_role("link", name=link).first.click()

    async def fill(self, label: str, words: str) -> None:
        await self.page.get_by_label(label, exact=True).fill(words)

    async def press(self, button: str) -> None:
        async with self.page.expect_navigation():
            await self.page.get_by_role("button", name=button, exact=True).click()


async def assert_delivered_once_and_in_order(database_url: str, broker_url: str) -> list[Delivered]:
    """Check that the queue has got each row of the table once, each key in order; return the deliveries."""
    table, deliveries = await read_table(database_url), await drain(broker_url, [QUEUE])
    by_key = defaultdict(list)
    for delivery in deliveries:
        by_key[delivery.key].append(delivery.outbox_id)

    assert {row.state for row in table} == {"sent"}
    assert sorted(delivery.outbox_id for delivery in deliveries) == sorted(row.id for row in table)
    assert {delivery.message_id for delivery in deliveries} == {row.message_id for row in table}
    assert all(ids == sorted(ids) for ids in by_key.values())
    return deliveries


@with_and_without_scripts
async def test_a_route_without_a_queue_is_tried_once_the_queue_is_bound(
    chromium: Browser,
    settings: Settings,
    database_url: str,
    broker_url: str,
    channel: AbstractChannel,
    rows: Rows,
    start_relay: StartRelay,
    scripts: bool,
) -> None:
    written = write(rows, ROWS)
    start_relay(**SOON)
    await eventually(
        lambda: {state for state, _ in rows.states().values()} == {"quarantined"}, "the route is set aside"
    )
    async with serving(settings) as address, window(chromium, scripts=scripts) as context:
        operator = Operator(page := await context.new_page(), scripts)
        await page.goto(address.entrance)
        await operator.sees(f"exchange '{EXCHANGE}', routing key '{ROUTING_KEY}' does not work", ".verdict")
        await operator.follow("See the route, and try it")
        await operator.reads(ROUTING_KEY, QUARANTINED)
        await operator.reads(str(len(written)), QUARANTINED)  # a probe takes one of them for a moment
        await bind(channel)
        await operator.press("Probe all")
        await operator.follow("Outbox relay")

        await operator.sees("All is well, nothing waits", ".verdict")
        await assert_delivered_once_and_in_order(database_url, broker_url)


async def test_rows_that_were_too_large_are_retried_in_stages_once_the_limit_is_raised(
    chromium: Browser,
    settings: Settings,
    database_url: str,
    broker_url: str,
    channel: AbstractChannel,
    rows: Rows,
    start_relay: StartRelay,
) -> None:
    await bind(channel)
    for key in range(1, KEYS + 1):
        rows.pending(str(key), exchange=EXCHANGE, routing_key=ROUTING_KEY, payload=f'"{"x" * MAX_BYTES}"')
    write(rows, ROWS)
    first = start_relay(**SOON, RELAY_MAX_MESSAGE_BYTES=str(MAX_BYTES))
    await eventually(lambda: states(rows) == {"parked"}, "the others are held behind them")
    async with serving(settings) as address, window(chromium) as context:
        operator = Operator(page := await context.new_page())
        await page.goto(address.entrance)
        await operator.sees(f"{KEYS} parked, {KEYS * ROWS} held behind them", ".verdict")
        await operator.follow("See what failed, and retry it")
        await expect(page.locator("tbody tr")).to_contain_text(["parked"])
        await page.locator("tbody a").click()
        await expect(page.locator("dl")).to_contain_text(f"{KEYS}, with {KEYS * ROWS} messages")
        first.process.tell(signal.SIGTERM)
        assert await first.wait_for_end() == 0
        start_relay(**SOON)
        await operator.fill("Why", "the limit is raised")
        await operator.press("Retry all")

        await operator.sees(f"{KEYS} of {KEYS}", "#progress")
        await operator.sees("done", "#progress .tag")
        await operator.follow("Outbox relay")
        await operator.sees("All is well, nothing waits", ".verdict")
        await assert_delivered_once_and_in_order(database_url, broker_url)


async def test_a_customer_gets_what_was_sent_once_more(
    chromium: Browser,
    settings: Settings,
    tmp_path: Path,
    database_url: str,
    broker_url: str,
    channel: AbstractChannel,
    rows: Rows,
    start_relay: StartRelay,
) -> None:
    await bind(channel)
    write(rows, ROWS)
    start_relay(**SOON)
    await eventually(lambda: states(rows) == {"sent"}, "they are sent")
    before = await assert_delivered_once_and_in_order(database_url, broker_url)
    async with serving(settings, **users(tmp_path)) as address, window(chromium) as context:
        operator = Operator(page := await context.new_page())
        await page.goto(address.entrance)
        await log_in(page, Role.OPERATOR)
        await operator.follow("Replay")
        await operator.fill("Type of key", "invoice")
        await operator.fill("Key", "7")
        await operator.press("Count")
        await expect(page.locator("main")).to_contain_text(f"{ROWS} messages")
        await operator.fill("Why", "the customer asks for it")
        await operator.press("Replay")
        await operator.sees(f"{ROWS} of {ROWS}", "#progress")
        await operator.sees("done", "#progress .tag")
        await operator.follow("Audit")

        await expect(page.locator("tbody td")).to_contain_text(["operator", "replay", "1", "the customer asks for it"])
    again = await drain(broker_url, [QUEUE])
    assert [each.message_id for each in again] == [each.message_id for each in before if each.key == "invoice/7"]


@with_and_without_scripts
async def test_a_row_that_nobody_needs_is_archived(
    chromium: Browser, settings: Settings, database_url: str, scripts: bool
) -> None:
    parked(database_url, "too large")
    async with serving(settings) as address, window(chromium, scripts=scripts) as context:
        operator = Operator(page := await context.new_page(), scripts)
        await page.goto(address.entrance)
        await operator.follow("See what failed, and retry it")
        await operator.follow("too large")
        await operator.fill("Why", "a test wrote it")
        await operator.press("Archive all")

        await operator.sees("1 of 1", "#progress")
        await operator.sees("done", "#progress .tag")
        await page.goto(f"{address}/failures")
        await operator.reads("Nothing has failed", "main")
