"""The addresses of all pages of a console on a filled outbox."""

from playwright.async_api import Page

PAGES = (
    "/", "/messages", "/messages?state=parked", "/failures", "/failures?queue=billing", "/jobs",
    "/replay", "/replay?since=1d", "/reconcile",
    "/routes", "/routes/1", "/routes/topology", "/nodes", "/retention", "/batches",
    "/doctor", "/audit", "/audit?job=1&rows=true", "/consumers", "/runbooks", "/runbooks/OutboxLaneLost",
)  # fmt: skip
HREFS = "links => links.map(link => link.getAttribute('href'))"


async def pages(page: Page, address: str, filled: list[str]) -> list[str]:
    """Return the address of every page, also of each failure group and of a sent message."""
    await page.goto(f"{address}/failures")
    groups = await page.locator("tbody a").evaluate_all(HREFS)
    await page.goto(f"{address}/messages?state=sent")
    messages = await page.locator("tbody tr:first-child td:first-child a").evaluate_all(HREFS)
    assert len(groups) >= 4  # parked, in quarantine, and held
    return [*PAGES, *filled, *groups, *[f"{group}/discard" for group in groups], *messages]
