"""The curves of the overview: an axis, a value where the pointer is, and a gap where nobody knew the value."""

import re

import pytest
from playwright.async_api import Browser, expect

from relay.config.settings import Settings
from relay.console import sampler
from relay.console.sampler import Sampler
from relay.errors import UnavailableError
from tests.console.rows import waiting
from tests.console.site import running, serving
from tests.console.windows import LONG, NEEDS_CHROMIUM, window
from tests.support.eventually import eventually


@NEEDS_CHROMIUM
async def test_the_pointer_reads_a_curve_while_it_is_drawn_again(
    chromium: Browser, settings: Settings, database_url: str
) -> None:
    waiting(database_url, "parked", 3)
    async with serving(settings) as address, window(chromium) as context:
        page = await context.new_page()
        await page.goto(address.entrance)
        parked = page.locator(".figure", has_text="Parked")
        await expect(parked.locator(".scale")).to_have_text("50", timeout=LONG)
        await expect(parked.locator(".axis")).to_have_text("5 min agonow")
        area = await parked.locator("svg").bounding_box()
        assert area
        await page.mouse.move(area["x"] + area["width"] - 2, area["y"] + 20)
        readout = parked.locator(".readout")
        await expect(readout).to_have_text(re.compile(r"^\d\d:\d\d:\d\d UTC: 3$"))

        now = await page.locator(".asof time").inner_text()
        await expect(page.locator(".asof time")).not_to_have_text(now, timeout=LONG)
        await expect(readout).to_have_text(re.compile(r"^\d\d:\d\d:\d\d UTC: 3$"))
        await page.mouse.move(1, 1)
        await expect(readout).to_be_empty()


async def test_a_look_that_failed_is_a_gap(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("the database is away")

    monkeypatch.setattr(sampler, "POINT", 0.0)
    monkeypatch.setattr(sampler, "IDLE_INTERVAL", 0.1)
    async with running(settings) as app:
        looks: Sampler = app.state.site.sampler

        async def knows() -> bool:
            return looks.latest is not None and looks.latest.history[-1].backlog == 0

        async def knows_not() -> bool:
            return not await knows()

        await eventually(knows, "the database was looked at")
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "read_status", fail)
            await eventually(knows_not, "the look has failed")
        await eventually(knows, "it is looked at again")
        found = looks.latest.history if looks.latest else ()

    assert None in [point.backlog for point in found]
    assert found[-1].backlog == 0
