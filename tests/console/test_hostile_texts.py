"""What writers, consumers, programs and AMQP clients have written is text on every page of a real browser."""

from pathlib import Path

from playwright.async_api import Browser, Page, expect

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.filled import fill
from tests.console.hostile import MARKUP, SCHEME, make_hostile
from tests.console.site import serving, users
from tests.console.windows import NEEDS_CHROMIUM, log_in, window
from tests.consume.conftest import queue
from tests.dead_letters.conftest import letters
from tests.dead_letters.letters import DEAD, Letters
from tests.operate.rows import Rows

__all__ = ["letters", "queue"]  # fixtures

MOST_PAGES = 70
# What no page of ours has, and where a link of ours may lead.
NOT_OURS = """() => [...document.querySelectorAll('*')].flatMap(each => [
    ...(/^(IFRAME|OBJECT|EMBED|BASE|STYLE|MATH|VIDEO|AUDIO)$/i.test(each.tagName) ? [each.outerHTML] : []),
    ...(/^(SCRIPT|IMG)$/.test(each.tagName) && !/^[/](static|icon)[/]/.test(each.getAttribute('src') || '')
        ? [each.outerHTML] : []),
    ...[...each.attributes].filter(found => /^(on|style$|srcdoc$)/i.test(found.name)
        || (/^(href|src|action|formaction|hx-get|hx-post)$/i.test(found.name)
            && !/^([?#]|\\/(?![\\/\\\\]))/.test(found.value))
    ).map(found => each.tagName + ' ' + found.name + '=' + found.value)
])"""
LINKS = "links => links.map(link => link.getAttribute('href'))"

pytestmark = NEEDS_CHROMIUM


async def test_hostile_texts_stay_text_on_every_page(
    chromium: Browser, settings: Settings, tmp_path: Path, database_url: str, letters: Letters
) -> None:
    filled = fill(database_url)
    with Rows(database_url).connection as connection:
        connection.execute("INSERT INTO outbox.lane_pause (lane, paused_by, paused_why) VALUES (7, 'ada', 'test')")
    taken = make_hostile(database_url, MARKUP)
    make_hostile(database_url, SCHEME)
    await letters.put(event_type=MARKUP[:200], key=MARKUP[:200], exception=MARKUP, headers={"note": MARKUP})
    await letters.put(event_type=SCHEME, key=SCHEME, exception=SCHEME, message_id=MARKUP[:200])
    async with serving(settings, **users(tmp_path)) as address, window(chromium) as context:
        page = await context.new_page()
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        await page.goto(address)
        await log_in(page, Role.OWNER)
        await look_at_letters(page, address)
        seen = await walk(page, address, ["/", *filled])
        for path in [path for path in seen if path.startswith("/messages/")][:4]:
            await page.goto(address + path)
            await page.get_by_role("button", name="Reveal").click()
            seen[f"{path}, revealed"] = await marks(page)

    assert {"message.aggregate_id", "node.name", "job.why", "held_message.error", "quarantine.reason"} <= set(taken)
    assert {path: found for path, (found, _) in seen.items() if found} == {}
    assert dialogs == []
    shown = {path.split("/")[1].split("?")[0] for path, (_, has_text) in seen.items() if has_text}
    assert {"messages", "failures", "jobs", "routes", "nodes", "batches", "audit"} <= shown
    assert len([path for path in seen if "revealed" in path]) == 4


async def look_at_letters(page: Page, address: str) -> None:
    await page.goto(f"{address}/failures")
    await page.get_by_label("Another queue").fill(DEAD)
    await page.locator("form.actions button").click()
    await expect(page.locator("main")).to_contain_text("ago", timeout=30_000)


async def walk(page: Page, address: str, begin: list[str]) -> dict[str, tuple[list[str], bool]]:
    """Open every page that a link leads to; return what is not ours in each, and whether a hostile text is shown."""
    waiting = [*begin, f"/failures?queue={DEAD}"]
    seen: dict[str, tuple[list[str], bool]] = {}
    while waiting and len(seen) < MOST_PAGES:
        path = waiting.pop(0)
        if path in seen or path.startswith("/static"):
            continue
        await page.goto(address + path)
        await expect(page.locator("main h1").first).to_be_visible()
        seen[path] = await marks(page)
        links = await page.locator("a[href^='/']").evaluate_all(LINKS)
        waiting += [link for link in links if not link.startswith("/messages?id=")]  # of an id that no message can have
    return seen


async def marks(page: Page) -> tuple[list[str], bool]:
    """Return what is not ours on this page, and whether a hostile text is shown there."""
    return await page.evaluate(NOT_OURS), "onerror=alert(1)" in await page.locator("body").inner_text()
