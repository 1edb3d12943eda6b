"""The page Routes: where messages go, what waits for a route, and pauses by forms without a script."""

import re
import time
from pathlib import Path
from unittest.mock import AsyncMock

import aio_pika
import httpx
from pydantic import SecretStr

from relay.config.settings import Settings
from relay.config.topology import TopologySettings
from relay.operate.operation import Role
from tests.console.site import browser, log_in, post, running, users
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way

AUDIT = "SELECT command, done_by, why FROM outbox.operator_audit ORDER BY id"
PAUSED = "SELECT id FROM outbox.quarantine WHERE paused_by = 'operator'"
TOPOLOGY = TopologySettings.model_validate(
    {
        "queues": [{"name": "billing", "type": "classic"}, {"name": "missing"}, {"name": "alone", "type": "classic"}],
        "bindings": [
            {"exchange": "outbox", "queue": "billing", "routing_key": "invoice.#"},
            {"exchange": "outbox", "queue": "missing", "routing_key": "order.#"},
            {"exchange": "outbox", "to_exchange": "archive"},
        ],
    }
)


async def opened(client: httpx.AsyncClient, words: str) -> str:
    """Return the page, once it has these words."""

    async def has_words() -> bool:
        return words in (await client.get("/routes")).text

    await eventually(has_words, f"the page has {words!r}")
    return (await client.get("/routes")).text


async def test_the_map_tells_queues_with_their_depth_and_consumers(
    settings: Settings, tmp_path: Path, broker_url: str
) -> None:
    listed = settings.model_copy(update={"topology": TOPOLOGY})
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        billing = await channel.declare_queue("billing", durable=True)
        await channel.declare_queue("alone", durable=True)
        for number in range(3):
            await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), "alone")
        await billing.consume(AsyncMock())
        async with running(listed, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.VIEWER)
            page = " ".join(re.sub(r' data-label="[^"]*"', "", await opened(client, "invoice.#")).split())

    assert (
        '<td class="mono">outbox</td> <td class="mono">invoice.#</td> <td class="mono">billing</td>'
        ' <td class="number">0</td> <td class="number">1</td>' in page
    )
    assert '<td class="mono">alone</td> <td class="number">3</td> <td class="number">0</td>' in page
    assert "no consumer" in page
    assert "the queue is not there" in page
    assert "exchange archive" in page
    assert "Pause the route" not in page  # a viewer
    assert page.index("Where messages go") < page.index("In quarantine") < page.index("Pauses")


async def test_a_broker_that_is_away_delays_no_page(settings: Settings, tmp_path: Path) -> None:
    async with proxied(settings.broker, connect_timeout=30.0) as (proxy, far):
        proxy.hold(Way.DOWN)
        away = settings.model_copy(update={"topology": TOPOLOGY, "broker": far})
        async with running(away, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.VIEWER)
            await client.get("/nodes")  # opens the database connections
            began = time.monotonic()
            page = await client.get("/routes")
            seconds = time.monotonic() - began

    assert page.status_code == 200
    assert seconds < 15  # of the 30 s that the console waits for the broker
    assert "is asking the broker" in page.text


async def test_a_broker_that_refuses_is_told_with_what_is_listed(settings: Settings, tmp_path: Path) -> None:
    broker = settings.broker.model_copy(update={"url": SecretStr("amqp://guest:guest@127.0.0.1:1/")})
    away = settings.model_copy(update={"topology": TOPOLOGY, "broker": broker})
    async with running(away, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await opened(client, "invoice.#")

    assert "127.0.0.1:1" in page
    assert "guest:guest" not in page


async def test_a_route_is_paused_resumed_and_probed_by_forms(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    rows.quarantined("gone")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        before = await client.get("/routes")
        probed = await post(client, "/routes/1/probe", {})
        works_already = await post(client, "/routes/99/probe", {})
        pause = {"exchange": "", "routing_key": "<b>later", "why": "<i>repair"}
        paused = await post(client, "/routes/pause", pause)
        without = await post(client, "/routes/pause", {**pause, "routing_key": "other", "why": " "})
        seen = await client.get("/routes")
        (route,) = rows.connection.execute(
            "SELECT id FROM outbox.quarantine WHERE paused_by = 'operator'"
        ).fetchone() or (0,)
        resumed = await post(client, f"/routes/{route}/resume", {})
        audit = rows.connection.execute(
            "SELECT command, done_by, why FROM outbox.operator_audit ORDER BY id"
        ).fetchall()

    assert [each.status_code for each in (probed, works_already, paused, without, resumed)] == [303, 303, 303, 422, 303]
    assert "Probe all" in before.text
    assert "&lt;b&gt;later" in seen.text
    assert "<b>later" not in seen.text
    assert f"Resume route {route}" in seen.text
    assert audit == [("quarantine pause", "operator", "<i>repair"), ("quarantine resume", "operator", None)]


async def test_an_owner_discards_the_rows_of_a_route_by_a_form(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    row = rows.quarantined("gone")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        page = await client.get("/routes/1")
        refused = await post(client, "/routes/1/discard", {"why": "test data"})
        await log_in(client, Role.OWNER)
        without = await post(client, "/routes/1/discard", {})
        missing = await post(client, "/routes/99/discard", {"why": "test data"})
        ordered = await post(client, "/routes/1/discard", {"why": "test data"})
        await eventually(lambda: rows.states()[row][0] == "discarded", "the row is discarded")

    assert "Discard its rows" not in page.text
    assert [each.status_code for each in (refused, without, missing, ordered)] == [403, 422, 404, 303]
    assert ordered.headers["Location"] == "/jobs/1"
    assert rows.connection.execute(AUDIT).fetchall() == [("quarantine discard", "owner", "test data")]


async def test_a_lane_is_paused_and_resumed_by_forms(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    rows.node()
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        paused = await post(client, "/routes/lanes/pause", {"lane": "7", "why": "too loud"})
        none = await post(client, "/routes/lanes/pause", {"lane": "16", "why": "too loud"})
        seen, nodes = await client.get("/routes"), await client.get("/nodes")
        resumed = await post(client, "/routes/lanes/7/resume", {})
        after = await client.get("/nodes")

    assert [each.status_code for each in (paused, none, resumed)] == [303, 422, 303]
    assert "Lane 7 is paused by operator" in seen.text
    assert "paused by operator" in nodes.text
    assert "paused by operator" not in after.text


async def test_a_viewer_sees_pauses_and_no_form(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    rows.quarantined("gone")
    rows.connection.execute("INSERT INTO outbox.lane_pause (lane, paused_by, paused_why) VALUES (7, 'ada', 'test')")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = (await client.get("/routes")).text + (await client.get("/routes/1")).text

    assert "Lane 7 is paused by ada" in page
    assert '<form method="post"' not in page.replace('<form method="post" action="/logout"', "")
