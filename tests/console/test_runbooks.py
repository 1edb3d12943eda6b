"""The console serves the runbooks: each reason leads to its page, which has no HTML but ours."""

import re

import httpx
import pytest

from relay.config.settings import Settings
from relay.console.pages.runbooks import as_html
from relay.operate import packaged
from relay.operate.runbooks import Runbook
from tests.console.consumers import rows
from tests.console.site import browser, running
from tests.operate.rows import Rows
from tests.support.eventually import eventually

__all__ = ["rows"]  # fixtures

LINK = re.compile(r'href="(/runbooks/[^"]*)"')
NAMES = sorted(page.stem for page in packaged.RUNBOOKS.glob("Outbox*.md"))


async def test_each_page_opens_from_the_list_and_leads_to_no_missing_page(client: httpx.AsyncClient) -> None:
    index = await client.get("/runbooks")
    listed = LINK.findall(index.text)
    linked: set[str] = set()
    for path in listed:
        page = await client.get(path)
        assert page.status_code == 200, path
        assert f"<h1>{path.removeprefix('/runbooks/')}</h1>" in page.text
        linked |= {*LINK.findall(page.text)}

    assert sorted(listed) == [f"/runbooks/{name}" for name in NAMES]
    assert linked <= {*listed, "/runbooks/README"}


@pytest.mark.parametrize("name", ["nothing", "..%2Fmetrics", "OutboxParked.md", "*", "%00"])
async def test_there_is_no_other_page(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/runbooks/{name}")).status_code == 404


def test_html_in_a_runbook_is_text_and_a_page_that_is_not_here_is_named() -> None:
    elsewhere = "[lane](../glossary.md#lane), [rules](../../config/a.yml)"
    html = as_html(f"<script>x</script> {elsewhere}, [parked](OutboxParked.md), [x](javascript:y)")

    assert "<script" not in html
    assert "lane (docs/glossary.md), rules (config/a.yml), " in html
    assert '<a href="/runbooks/OutboxParked">parked</a>' in html
    assert "href" not in html.replace('href="/runbooks/OutboxParked"', "")


async def test_each_reason_of_the_first_page_leads_to_its_runbook(settings: Settings, rows: Rows) -> None:
    head = rows.parked("1")
    rows.parked("1", behind=head)
    rows.quarantined("nowhere")
    async with running(settings) as app, browser(app) as client:
        await eventually(lambda: app.state.site.sampler.latest is not None, "the console has looked")
        page = await client.get("/")
        found = {*LINK.findall(page.text)}

    assert {f"/runbooks/{each}" for each in (Runbook.KEY_STUCK, Runbook.ROUTE)} <= found
    assert page.text.count("<li><span>") == len(LINK.findall(page.text))
