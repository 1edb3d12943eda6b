"""Archived and discarded rows are states that pages search, show and restore; a discard asks on a page first."""

import re
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.groups import group_page
from tests.console.rows import parked
from tests.console.site import browser, log_in, post, running, serving, users
from tests.console.windows import NEEDS_CHROMIUM
from tests.operate.rows import Rows
from tests.support.eventually import eventually


def states(rows: Rows) -> set[str]:
    return {state for state, _ in rows.states().values()}


def job_ids(rows: Rows) -> list[int]:
    return [job for (job,) in rows.connection.execute("SELECT id FROM outbox.job ORDER BY id").fetchall()]


@pytest.mark.parametrize(("kind", "state"), [("archive", "archived"), ("discard", "discarded")])
async def test_a_row_that_was_set_aside_is_found_shown_and_restored(
    client: httpx.AsyncClient, database_url: str, rows: Rows, kind: str, state: str
) -> None:
    row, other = (parked(database_url, "the broker says no") for _ in range(2))
    path, _ = await group_page(client)
    sent = {"kind": kind, "why": "of no use <b>", "part": "true", "id": str(row)}
    await post(client, f"{path}/{'discard' if kind == 'discard' else 'jobs'}", sent)
    await eventually(lambda: rows.states()[row] == (state, None), "it is set aside")

    found = await client.get("/messages", params={"state": state})
    by_id = await client.get("/messages", params={"id": str(row)})
    message = (await client.get(f"/messages/{row}")).text
    (link,) = re.findall(r'href="(/restore\?id=[^"]+)"', message)
    asks = (await client.get(link.replace("&amp;", "&"))).text
    restore = {"id": str(row), "why": "it is", **({"discarded": "true"} if kind == "discard" else {})}
    no_reason = await post(client, "/restore", {**restore, "why": ""})
    done = await post(client, "/restore", restore)

    assert all(f">{row}</a>" in each.text for each in (found, by_id))
    assert f">{other}</a>" not in found.text
    assert f"parked {kind}, by " in message
    assert "of no use &lt;b&gt;" in message
    assert "<h1>Restore 1 row?</h1>" in asks
    assert (no_reason.status_code, done.headers["Location"]) == (422, "/jobs/2")
    await eventually(lambda: states(rows) == {"parked"}, "it is parked again")
    assert "parked restore, by " in (await client.get(f"/messages/{row}")).text


async def test_all_that_a_job_has_discarded_is_restored_from_its_page(
    client: httpx.AsyncClient, database_url: str, rows: Rows
) -> None:
    for _ in range(3):
        parked(database_url, "the broker says no")
    path, _ = await group_page(client)
    await post(client, f"{path}/discard", {"why": "test data"})
    await eventually(lambda: states(rows) == {"discarded"}, "they are discarded")

    job = await client.get("/jobs/1")
    asks = await client.get("/restore?job=1")
    await post(client, "/restore", {"job": "1", "why": "no test data"})
    await eventually(lambda: states(rows) == {"parked"}, "they are parked again")
    again = await client.get("/restore?job=1")

    assert 'href="/restore?job=1"' in job.text
    assert "<h1>Restore 3 rows?</h1>" in asks.text
    assert "No such row is archived or discarded now." in again.text


@pytest.mark.parametrize("query", ["", "?job=7", "?id=seven", "?job=1"], ids=["nothing", "no job", "no id", "a retry"])
async def test_what_cannot_be_restored_is_told(
    client: httpx.AsyncClient, database_url: str, rows: Rows, query: str
) -> None:
    order = "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'ada', '{}')"
    rows.connection.execute(order)

    answer = await client.get(f"/restore{query}")

    assert answer.status_code == (404 if query == "?job=7" else 422)


async def test_a_discard_asks_with_rows_and_keys_and_stands_apart(
    settings: Settings, tmp_path: Path, database_url: str, rows: Rows
) -> None:
    head, other = rows.parked("7", aggregate_type="order"), rows.parked("8", aggregate_type="order")
    rows.parked("7", aggregate_type="order", behind=head)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        path, without = await group_page(client)
        refused = await client.get(f"{path}/discard")
        await log_in(client, Role.OWNER)
        page = (await client.get(path)).text
        asks = (await client.get(f"{path}/discard")).text
        part = await post(client, f"{path}/jobs", {"kind": "discard", "part": "true", "key": "8", "why": "so <it> is"})
        of_part = (await client.get(part.headers["Location"])).text
        nothing = await post(client, f"{path}/discard", {"part": "true", "why": "test"})

    assert refused.status_code == 403
    assert "/discard" not in without.text
    assert f'<p class="apart"><a class="danger" href="{path}/discard">Discard all…</a>' in page
    assert "<h1>Discard 2 rows?</h1>" in asks
    assert "<dt>keys</dt><dd>2</dd>" in asks
    assert "<dt>rows that wait behind them</dt><dd>1, and go out</dd>" in asks
    assert all(f'href="/messages/{row}"' in asks for row in (head, other))
    assert '<button class="danger">Discard 2 rows</button>' in asks
    assert "<h1>Discard 1 row?</h1>" in of_part
    assert 'value="so &lt;it&gt; is"' in of_part
    assert f'href="/messages/{head}"' not in of_part
    assert nothing.status_code == 422
    assert job_ids(rows) == []
    assert states(rows) == {"parked"}


@NEEDS_CHROMIUM
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
async def test_a_discard_and_its_way_back_by_keyboard(
    chromium: Browser, settings: Settings, database_url: str, rows: Rows, scripts: bool
) -> None:
    for _ in range(3):
        parked(database_url, "the broker says no")
    async with serving(settings) as address:
        page = await chromium.new_page(java_script_enabled=scripts)
        await page.goto(address.entrance)
        await page.goto(f"{address}/failures")
        await page.locator("tbody a").first.click()
        await page.get_by_role("link", name="Discard all").press("Enter")
        why = page.get_by_label("Why", exact=True)
        await why.fill("   ")
        await why.press("Enter")  # a browser lets blanks through
        await expect(why).to_have_attribute("aria-invalid", "true")
        await expect(why).to_be_focused()
        await page.goto(page.url)  # the way back would lead to the answer to the blanks, and ask to send them again
        await why.fill("test data")
        await page.get_by_role("button", name="Discard 3 rows").dblclick()
        await expect(page.locator("h1")).to_contain_text("Job 1: discard")
        await eventually(lambda: states(rows) == {"discarded"}, "they are discarded")
        await page.go_back()  # no page is kept by the browser
        await expect(page.locator("main")).to_contain_text("No such row is parked now")
        await page.goto(f"{address}/jobs/1")
        await page.get_by_role("link", name="Restore its rows").click()
        await page.get_by_label("Why", exact=True).fill("no test data")
        await page.get_by_role("button", name="Restore 3 rows").click()
        await eventually(lambda: states(rows) == {"parked"}, "they are parked again")

    assert job_ids(rows) == [1, 2]
