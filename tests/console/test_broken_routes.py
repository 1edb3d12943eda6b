"""An operator sees 41 broken routes on one page, repairs them there, and sees what came of it; a relay runs."""

from pathlib import Path

import aio_pika
import httpx
import pytest
from playwright.async_api import Browser, expect

from relay.config.settings import Settings
from relay.config.topology import TopologySettings
from relay.console.pages.routes import LISTED
from relay.operate.operation import Role
from tests.console.filled import LONG
from tests.console.site import browser, log_in, post, running, serving, users
from tests.console.windows import NEEDS_CHROMIUM, has_overflow, violations, window
from tests.engine.conftest import RunNode, run_node
from tests.operate.rows import Rows
from tests.support.eventually import eventually

__all__ = ["run_node"]  # a fixture

NUMBER = 41
KEYS = [f"invoice.{number}" for number in range(NUMBER)]
TOPOLOGY = TopologySettings.model_validate(
    {
        "exchanges": [{"name": "billing"}],
        "queues": [{"name": key, "type": "classic"} for key in KEYS],
        "bindings": [{"exchange": "billing", "queue": key, "routing_key": key} for key in KEYS],
    }
)
AUDIT = "SELECT count(*), min(why) FROM outbox.operator_audit WHERE command = 'topology apply'"


async def declare_exchange(broker_url: str) -> None:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("billing", aio_pika.ExchangeType.TOPIC, durable=True)


def are_returned(rows: Rows, number: int) -> bool:
    """Whether so many routes are in quarantine, and each has been tried."""
    tried = rows.connection.execute("SELECT FROM outbox.quarantine WHERE probes > 0").rowcount
    return tried == number


def are_sent(rows: Rows) -> bool:
    return {state for state, _ in rows.states().values()} == {"sent"}


@NEEDS_CHROMIUM
async def test_41_routes_are_repaired_by_four_clicks(
    chromium: Browser, settings: Settings, rows: Rows, broker_url: str, run_node: RunNode
) -> None:
    await declare_exchange(broker_url)
    for key in KEYS * 2:
        rows.pending(key, exchange="billing", routing_key=key)
    listed = settings.model_copy(update={"topology": TOPOLOGY})
    async with run_node(), serving(listed) as address, window(chromium, width=1100) as context:
        await eventually(lambda: are_returned(rows, NUMBER), "all are tried", 120)
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.get_by_role("link", name="See the route, and try it").first.click(timeout=60_000)
        await expect(page.locator("#standing")).to_contain_text("41 routes with ")
        await expect(page.locator(".fold summary").filter(has_text="312 NO_ROUTE")).to_have_count(1)
        await page.get_by_role("link", name="Compare with relay.toml").click()
        await expect(page.locator(".notice").nth(1)).to_have_text("82 missing, 1 there")
        await page.get_by_label("Why").fill("the queues were deleted")
        await page.get_by_role("button", name="Declare what is missing").click()
        await expect(page.locator(".notice").nth(1)).to_have_text("41 declared, 41 bound, 1 there")
        await page.get_by_role("link", name="See what the probes say").click()
        await eventually(lambda: are_sent(rows), "all rows are sent", 60)
        await page.reload()
        await expect(page.locator("main")).to_contain_text("Every route works")
        await page.locator("#released summary").click()
        await expect(page.locator("#released tbody tr")).to_have_count(NUMBER)

    assert rows.connection.execute(AUDIT).fetchone() == (1 + 2 * NUMBER, "the queues were deleted")


@NEEDS_CHROMIUM
@pytest.mark.parametrize("scripts", [True, False])
async def test_41_routes_fit_on_a_page_and_one_is_found(
    chromium: Browser, settings: Settings, rows: Rows, scripts: bool
) -> None:
    for number in range(NUMBER):
        rows.quarantined(f"invoice.{number}", str(number), exchange=("billing", "sales")[number % 2])
    hostile = rows.quarantined(LONG[:228], exchange="billing")
    route = rows.connection.execute("SELECT quarantine FROM outbox.message WHERE id = %s", [hostile]).fetchone()
    assert route
    listed = settings.model_copy(update={"topology": TOPOLOGY})
    async with serving(listed) as address, window(chromium, width=390, scripts=scripts) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        await page.goto(f"{address}/routes")
        assert not await has_overflow(page)
        quarantine = await page.locator("#quarantine").bounding_box()
        pauses = await page.locator("#pauses").bounding_box()
        await page.get_by_label("Search").fill("INVOICE.40")
        await page.get_by_role("button", name="Search").click()
        await page.get_by_role("link", name="invoice.40").click()
        await expect(page.locator("h1")).to_have_text("billing → invoice.40")
        await expect(page.locator(".repairs")).to_contain_text("binding billing -> invoice.40 (invoice.40)")
        assert not await has_overflow(page)
        await page.goto(f"{address}/routes/{route[0]}")
        await expect(page.locator("h1")).to_contain_text("<img")
        assert not await has_overflow(page)
        if scripts:
            assert await violations(page) == []
            await page.goto(f"{address}/routes/topology")
            assert await violations(page) == []

    assert quarantine
    assert pauses
    assert pauses["y"] - quarantine["y"] < 900  # 41 routes are on one screen of a phone


async def test_rows_of_a_route_are_sent_elsewhere_and_seen_to_go(
    settings: Settings, tmp_path: Path, rows: Rows, broker_url: str, run_node: RunNode
) -> None:
    written = [rows.pending(key, exchange="", routing_key="typo") for key in "aabb"]
    async with await aio_pika.connect(broker_url) as connection:
        queue = await (await connection.channel()).declare_queue("right", durable=True)
        async with run_node(), running(settings, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.OPERATOR)
            await eventually(lambda: are_returned(rows, 1), "it is tried")
            await eventually(lambda: has(client, "/routes/1", "not accepted: 312 NO_ROUTE"), "the outcome is seen")
            same = await post(client, "/routes/1/reroute", {"exchange": "", "routing_key": "typo", "why": "typo"})
            without = await post(client, "/routes/1/reroute", {"exchange": "", "routing_key": "right"})
            done = await post(client, "/routes/1/reroute", {"exchange": "", "routing_key": "right", "why": "typo"})
            await eventually(lambda: are_sent(rows), "all rows are sent")
            await eventually(lambda: has(client, "/routes", "Every route works"), "the list is empty")
            seen = await client.get("/routes")
        came = [int(str((await queue.get()).headers["x-outbox-id"])) for _ in written]

    assert [each.status_code for each in (same, without, done)] == [422, 422, 303]
    assert "after the probe at" in seen.text
    assert [row for row in came if row in written[:2]] == written[:2]
    assert [row for row in came if row in written[2:]] == written[2:]
    assert sorted(came) == written


async def has(client: httpx.AsyncClient, path: str, words: str) -> bool:
    return words in (await client.get(path)).text


async def test_an_owner_declares_what_is_listed_and_an_operator_does_not(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    rows.quarantined("invoice.1", exchange="billing")
    rows.connection.execute("UPDATE outbox.quarantine SET probes = 7, probed_at = now()")
    listed = settings.model_copy(update={"topology": TOPOLOGY})
    async with running(listed, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        foreseen = await client.get("/routes/topology?route=1")
        refused = await post(client, "/routes/topology", {"why": "deleted"})
        await log_in(client, Role.OWNER)
        without = await post(client, "/routes/topology", {})
        done = await post(client, "/routes/topology", {"why": "deleted", "route": "1"})
        unlisted = await client.get("/routes/99")
        page = await client.get("/routes/1")

    assert [each.status_code for each in (foreseen, refused, without, done, unlisted)] == [200, 403, 422, 200, 404]
    assert "Declare what is missing" not in foreseen.text
    assert "An owner may declare this" in foreseen.text
    assert 'href="/routes/1">See what the probes say' in done.text
    assert "waits for a relay to try it" in page.text
    assert "binding billing -&gt; invoice.1 (invoice.1)" in page.text


async def test_thousands_of_routes_make_no_endless_page(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    rows.connection.execute(
        "INSERT INTO outbox.quarantine (exchange, routing_key, reason)"
        " SELECT 'billing', 'order.' || n, '312 NO_ROUTE' FROM generate_series(1, 2001) AS n"
    )
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = (await client.get("/routes")).text
        found = (await client.get("/routes", params={"q": "order.2001"})).text

    assert page.count('<a href="/routes/') - page.count('<a href="/routes/topology') == LISTED
    assert "The oldest 200 of 2,001" in page
    assert "hx-trigger" not in page
    assert ">order.2001<" in found
