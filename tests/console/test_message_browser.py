"""A message's page in Chromium: it follows its row, and its payload is copied, downloaded, edited and sent again."""

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from tests.console.site import serving
from tests.console.windows import NEEDS_CHROMIUM, window
from tests.operate.rows import Rows

pytestmark = NEEDS_CHROMIUM

PATIENCE = 60_000  # milliseconds, on a busy machine


async def opened(page: Page, entrance: str, address: str, row: int) -> None:
    await page.goto(entrance)
    await page.goto(f"{address}/messages/{row}")


async def test_an_open_page_shows_the_row_go_and_keeps_what_is_typed(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        row = rows.parked()
        async with serving(settings) as address, window(chromium) as context:
            page = await context.new_page()
            await opened(page, address.entrance, address, row)
            why = page.get_by_label("Why", exact=True)
            await why.fill("the queue is back")
            note = "INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('message reveal', %s, 'bob')"
            rows.connection.execute(note, [str(row)])
            await expect(page.locator(".timeline")).to_contain_text("by bob", timeout=PATIENCE)
            await expect(why).to_have_value("the queue is back")
            await expect(why).to_be_focused()
            await page.get_by_role("button", name="Retry", exact=True).click()
            await expect(page.locator("h1 .tag")).to_have_text("pending", timeout=PATIENCE)
            await expect(page.get_by_role("button", name="Retry", exact=True)).to_have_count(0)
            rows.connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = %s", [row])
            await expect(page.locator("h1 .tag")).to_have_text("sent", timeout=PATIENCE)
            await expect(page.locator(".timeline")).to_contain_text("confirmed by the broker")


async def test_a_payload_is_copied_and_downloaded(
    chromium: Browser, settings: Settings, database_url: str, tmp_path: Path
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        row = rows.parked(payload='{"amount":1.10}')
    async with serving(settings) as address, window(chromium) as context:
        await context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = await context.new_page()
        await opened(page, address.entrance, address, row)
        await page.get_by_role("button", name="Reveal").click()
        await page.locator("[data-copies=payload]").click()
        await expect(page.locator("[data-copies=payload]")).to_have_text("Copied")
        async with page.expect_download(timeout=PATIENCE) as downloading:
            await page.get_by_role("button", name="Download").click()
        file = await downloading.value
        await file.save_as(tmp_path / "file")

        assert await page.evaluate("navigator.clipboard.readText()") == '{\n  "amount": 1.10\n}'
        assert (tmp_path / "file").read_text() == '{"amount":1.10}'
        assert file.suggested_filename.startswith("message-")
        assert file.suggested_filename.endswith(".json")


@pytest.mark.parametrize(("width", "scripts"), [(1440, True), (390, False)], ids=["desk", "phone without scripts"])
async def test_a_message_is_edited_reviewed_and_sent_again(
    chromium: Browser, settings: Settings, database_url: str, width: int, scripts: bool
) -> None:
    rows = Rows(database_url)
    with rows.connection:
        row = rows.parked(payload='{"amount":110,"note":"' + "x" * 300 + '"}', headers='{"tenant":"acme"}')
        rows.parked(behind=row)
        async with (
            serving(settings) as address,
            window(chromium, width=width, scripts=scripts, is_refused=True) as context,
        ):
            page = await context.new_page()
            await opened(page, address.entrance, address, row)
            await page.get_by_role("button", name="Edit and send again").click()
            payload = page.get_by_label("Payload")
            typed = (await payload.input_value()).replace("110", "1.10")
            await payload.fill(typed.replace("1.10,", "1.10,,"))
            await page.get_by_role("button", name="See what changed").click()
            await expect(page.get_by_role("alert").filter(has_text="is not JSON")).to_be_visible()
            await expect(payload).to_have_value(typed.replace("1.10,", "1.10,,"))
            await payload.fill(typed)
            await page.get_by_role("button", name="See what changed").click()
            await expect(page.locator("ins")).to_have_text('+  "amount": 1.10,')
            await page.wait_for_load_state()  # also of the style sheet
            assert not await page.evaluate(
                "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            )
            await page.get_by_label("Why").fill("the amount was in cents")
            await page.get_by_role("button", name="Send as a new message").click()
            await expect(page.locator(".timeline")).to_contain_text("an edited copy")
            await page.get_by_role("link", name="of this message").click()
            await expect(page.locator("h1 .tag")).to_have_text("discarded")
            await expect(page.get_by_role("link", name="sent as this message")).to_be_visible()

        states = sorted(state for state, _ in rows.states().values())
    assert states == ["discarded", "pending", "pending"]
