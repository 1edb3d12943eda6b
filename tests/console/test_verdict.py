"""The one big sentence is true: what consumers, queues, relays and routes do is in it, the weightiest first."""

from contextlib import AsyncExitStack

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.config.topology import Binding, Queue
from relay.console import consumers
from relay.console.site import Site
from relay.console.verdict import Mood, TheVerdict, verdict
from relay.consume.queue_depth import QueueDepth
from relay.operate import queues
from relay.operate.pool import LAGGING
from relay.operate.queues import Depths, consumed_queues
from tests.console.consumers import with_queue
from tests.console.site import running
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied

FRESH = -86_400.0  # seconds: the age of a heartbeat that stays fresh


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "INTERVAL", 0.2)
    monkeypatch.setattr(consumers, "MISSING_FOR", 0.2)
    monkeypatch.setattr(queues, "UNREAD_AFTER", 1.0)


def now(app: FastAPI) -> TheVerdict:
    """Return the verdict on this moment, without the doctor's findings."""
    site: Site = app.state.site
    return verdict(site.sampler.latest, None, site.consumers.latest)


async def becomes(app: FastAPI, mood: Mood, words: str) -> TheVerdict:
    await eventually(lambda: (now(app).mood, now(app).words) == (mood, words), f"the verdict is {words!r}", 60)
    return now(app)


async def test_messages_that_nobody_consumes_are_red_until_a_consumer_is_there(
    settings: Settings, broker_url: str, rows: Rows
) -> None:
    rows.node(age=FRESH)
    async with await aio_pika.connect(broker_url) as connection, running(with_queue(settings, "billing")) as app:
        channel = await connection.channel()
        queue = await channel.declare_queue("billing", durable=True)
        await channel.declare_queue("billing.dead", durable=True)
        await becomes(app, Mood.OK, "All is well, nothing waits")

        await channel.default_exchange.publish(aio_pika.Message(b"1"), "billing")
        red = await becomes(app, Mood.FAILED, "Messages go out, and nothing consumes billing")
        await queue.consume(AbstractIncomingMessage.ack)
        await becomes(app, Mood.OK, "All is well, nothing waits")

    assert [each.words for each in red.reasons] == ["nothing consumes billing, and 1 message waits: start its consumer"]


async def test_a_queue_that_is_not_there_is_named(settings: Settings, broker_url: str, rows: Rows) -> None:
    rows.node(age=FRESH)
    async with running(with_queue(settings, "billing")) as app:
        found = await becomes(app, Mood.WARNING, "Messages go out, and there is no queue billing")

    assert [each.words for each in found.reasons] == [
        "there is no queue billing: `relay topology apply` declares what relay.toml lists"
    ]


async def test_what_waits_for_the_only_route_is_red_until_something_goes_out(settings: Settings, rows: Rows) -> None:
    rows.node(age=FRESH, published_total=5)
    async with running(settings) as app:
        await becomes(app, Mood.OK, "All is well, nothing waits")
        rows.quarantined("billing")

        red = await becomes(app, Mood.FAILED, "Rows wait, and nothing goes out")
        sample = app.state.site.sampler.latest
        rows.connection.execute("UPDATE outbox.node SET published_total = 6")
        await becomes(app, Mood.WARNING, "Something needs a look; the rest goes out")

    assert red.reasons[0].mood is Mood.FAILED
    assert "routing key 'billing' does not work" in red.reasons[0].words
    assert (sample.backlog, sample.age_s is not None) == (1, True)


async def test_the_relays_are_unknown_while_the_database_is_down(settings: Settings, rows: Rows) -> None:
    rows.node(age=FRESH)
    async with AsyncExitStack() as network:
        _, far = await network.enter_async_context(proxied(settings.database))
        async with running(settings.model_copy(update={"database": far})) as app:
            site: Site = app.state.site
            await eventually(lambda: 'class="ok"' in site.live.parts()["relays"], "the relay is well", 60)
            await network.aclose()

            await eventually(lambda: 'class="unknown"' in site.live.parts()["relays"], "the relay is unknown", 60)
            assert "The database does not answer" in site.live.parts()["headline"]


def test_queues_of_what_was_given_up_need_no_consumer(settings: Settings) -> None:
    topology = settings.topology.model_copy(
        update={
            "queues": (
                Queue(name="billing", dead_letter_exchange="", dead_letter_routing_key="failed"),
                Queue(name="mail", dead_letter_exchange="dead"),
                *(Queue.model_validate({"name": name}) for name in ("failed", "buried", "mail.dead")),
                Queue.model_validate({"name": "history", "type": "stream"}),
            ),
            "bindings": (Binding(exchange="dead", queue="buried", routing_key="#"),),
        }
    )

    assert consumed_queues(settings.model_copy(update={"topology": topology})) == ["billing", "mail"]


@pytest.mark.parametrize(
    ("counts", "grown"),
    [
        ((0, 500, 900, 1200, 1500), 1500),
        ((0, 500, 900, 400, 1500), 0),
        ((5000, 4000, 3000, 2000, 1000), 0),
        ((9000, 9000, 9000, 9000, 9000), 0),
    ],
    ids=["it grows", "it was taken down in between", "it shrinks", "it stays"],
)
def test_a_queue_grows_when_each_half_of_a_minute_saw_more(counts: tuple[int, ...], grown: int) -> None:
    depths = Depths()
    looks = [depths.note({"billing": QueueDepth(ready, 1)}, 12.0 * number) for number, ready in enumerate(counts)]

    (status,) = looks[-1]
    assert status.grown == grown
    assert (status.reason is not None) is bool(grown)


@pytest.mark.parametrize(
    ("depth", "words"),
    [
        (QueueDepth(1, 0), "nothing consumes billing, and 1 message waits: start its consumer"),
        (QueueDepth(LAGGING, 1), "10,000 messages wait in billing"),
        (QueueDepth(LAGGING - 1, 1), None),
        (QueueDepth(0, 0), None),
    ],
    ids=["no consumer", "it is long", "it is shorter", "it is empty"],
)
def test_a_queue_needs_a_look_at_once_and_is_not_red(depth: QueueDepth, words: str | None) -> None:
    (status,) = Depths().note({"billing": depth}, 0.0)

    assert (status.reason, status.is_unread) == (words, False)


def test_a_queue_is_unread_from_its_first_message_without_a_consumer_on() -> None:
    depths = Depths()
    looks = [(0, 5, 1), (10, 5, 0), (15, 3, 0), (20, 0, 0), (30, 1, 0), (50, 1, 0), (60, 1, 1)]

    seen = [depths.note({"billing": QueueDepth(ready, readers)}, at)[0].unread_s for at, ready, readers in looks]

    assert seen == [0, 0, 5, 0, 0, 20, 0]
