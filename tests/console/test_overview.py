"""The first page says whether all is well."""

import aio_pika
import httpx
import pytest

from relay.config.settings import Settings
from relay.console import checkup
from relay.console.pages import overview
from relay.console.site import Site
from tests.console.site import browser, running
from tests.operate.rows import Rows
from tests.support.eventually import eventually


async def test_an_outbox_without_a_relay_says_so_first(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "FIRST_LOOK", 60.0)  # however busy the machine is

    page = await client.get("/")

    assert page.status_code == 200
    assert "no relay is alive: start <code>relay run</code>" in page.text


async def test_what_the_doctor_has_found_goes_once_it_is_mended(
    settings: Settings, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "EVERY_WHILE_FAILING", 0.1)
    monkeypatch.setattr(checkup, "FRESH", 0.0)
    broker = settings.broker.model_copy(update={"declare": False})
    async with running(settings.model_copy(update={"broker": broker})) as app, browser(app) as client:

        async def is_told() -> bool:
            return "no exchange &#39;outbox&#39;" in (await client.get("/")).text

        async def is_gone() -> bool:
            return not await is_told()

        await eventually(is_told, "the doctor's finding is told")
        async with await aio_pika.connect(broker_url) as connection:
            channel = await connection.channel()
            await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)

        await eventually(is_gone, "it is gone")


async def test_a_route_that_is_tried_keeps_its_place_in_the_count_of_failures(settings: Settings, rows: Rows) -> None:
    head, behind = rows.quarantined("gone"), rows.quarantined("gone")
    rows.connection.execute("UPDATE outbox.message SET held_behind = %s WHERE id = %s", [head, behind])
    async with running(settings) as app:
        site: Site = app.state.site

        def looks() -> int:
            site.sampler.wake()
            return site.sampler.latest.number if site.sampler.latest else 0

        await eventually(lambda: site.failed_messages == 1, "one row has failed, and the other waits behind it")
        rows.probe(head)
        seen = looks()
        await eventually(lambda: looks() >= seen + 2, "it has looked again")  # one look may have begun before

        assert site.failed_messages == 1
