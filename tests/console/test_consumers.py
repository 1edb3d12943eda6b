"""The verdict tells what consumers leave, each reason with its repair, and no page waits for the broker."""

from datetime import UTC, datetime

import aio_pika
from fastapi import FastAPI
from pamqp.commands import Queue as QueueCommand
from pydantic import SecretStr

from relay.config.settings import Settings
from relay.console.consumers import Consumers, HeldBy, SeenConsumers
from relay.console.sampler import Sampler
from relay.console.verdict import Mood, TheVerdict, verdict
from relay.operate.pool import LAGGING, MemberStatus, PartitionStatus, PoolStatus, reasons_of
from tests.console.consumers import rows, with_queue
from tests.console.site import browser, running
from tests.operate.held import held
from tests.operate.pools import MEMBERS
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

__all__ = ["rows"]  # fixtures


async def seen(app: FastAPI) -> SeenConsumers:
    """Return what a look saw that has begun after this call: the next one may be under way."""
    consumers: Consumers = app.state.site.consumers
    for _ in range(2):
        before = consumers.latest
        consumers.wake()
        await eventually(lambda: consumers.latest is not before, "the console has looked")  # noqa: B023  (awaited here)
    assert consumers.latest is not None
    return consumers.latest


async def told(app: FastAPI) -> TheVerdict:
    """Return the verdict on this moment, without the doctor's findings."""
    sampler: Sampler = app.state.site.sampler
    await eventually(lambda: sampler.latest is not None, "the console has looked at the outbox")
    return verdict(sampler.latest, None, await seen(app))


async def test_letters_of_the_queues_that_the_settings_list_are_counted(
    settings: Settings, broker_url: str, rows: Rows
) -> None:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        for name, letters in (("billing", 0), ("nowhere", 0), ("billing.dead", 2), ("mail.dead", 1), ("other.dead", 5)):
            await channel.declare_queue(name, durable=True)
            for _ in range(letters):
                await channel.default_exchange.publish(aio_pika.Message(b"1"), name)
        async with running(with_queue(settings, "billing", "mail.dead", "nowhere")) as app:
            found = await told(app)

    assert (found.mood, found.words) == (Mood.WARNING, "Messages go out, and consumers need a look")
    assert [(each.words, each.repair and each.repair.path) for each in found.reasons] == [
        ("2 dead letters in billing.dead", "/failures?queue=billing.dead"),
        ("1 dead letter in mail.dead", "/failures?queue=mail.dead"),
    ]


async def test_a_lost_connection_is_no_missing_queue(settings: Settings, broker_url: str, rows: Rows) -> None:
    async with (
        await aio_pika.connect(broker_url) as connection,
        proxied(settings.broker) as (proxy, far),
    ):
        channel = await connection.channel()
        await channel.declare_queue("billing.dead", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"1"), "billing.dead")
        async with running(with_queue(settings.model_copy(update={"broker": far}), "billing")) as app:
            await app.state.site.checkup.report()  # the doctor declares queues, too
            before = await seen(app)
            proxy.on_frame(Way.UP, QueueCommand.Declare, proxy.seen[Way.UP, QueueCommand.Declare] + 1, Act.RESET)
            consumers: Consumers = app.state.site.consumers
            consumers.wake()
            await eventually(lambda: bool(consumers.latest and consumers.latest.error), "the console has noticed")
            after = await seen(app)

    assert before.letters == after.letters == {"billing.dead": 1}


async def test_what_is_held_for_long_is_told_and_what_is_tried_soon_is_not(settings: Settings, rows: Rows) -> None:
    async with running(settings) as app:
        held(rows.connection, "soon", due_in=20)
        well = await told(app)
        held(rows.connection, "late", messages=3)
        late = await told(app)
        rows.connection.execute("UPDATE outbox.held_message SET due_at = now() - interval '2 min'")
        overdue = await told(app)

    assert (well.mood, well.reasons) == (Mood.OK, [])
    assert [(each.words, each.repair and each.repair.path) for each in late.reasons] == [
        ("consumer billing holds 4 messages of 2 keys", "/failures")
    ]
    assert [each.words for each in overdue.reasons] == [
        "consumer billing holds 4 messages of 4 keys, and does not try them: start it"
    ]


async def test_a_late_member_is_told_with_the_way_to_the_pools(settings: Settings, rows: Rows) -> None:
    rows.connection.execute(MEMBERS)
    async with running(settings) as app:
        found = await told(app)

    assert {each.repair and each.repair.path for each in found.reasons} == {"/nodes"}
    assert "member b of pool totals does not check in" in [each.words for each in found.reasons]


def test_a_partition_that_lags_is_a_reason() -> None:
    partitions = [
        PartitionStatus(number, f"q.0{number}", 1, "a", None, None, datetime.now(UTC), ready)
        for number, ready in enumerate([LAGGING - 1, LAGGING, None])
    ]
    member = MemberStatus("a", [0, 1, 2], 0, False, False, datetime.now(UTC), 0.0, datetime.now(UTC))

    assert reasons_of(PoolStatus("totals", "q", 1.0, [member], partitions, 0)) == [
        "10,000 messages wait in partition 1 of pool totals, which a holds"
    ]


async def test_the_relays_state_goes_before_that_of_the_consumers(settings: Settings, rows: Rows) -> None:
    rows.connection.execute("UPDATE outbox.node SET heartbeat_at = now() - interval '1 min'")
    held(rows.connection)
    async with running(settings) as app:
        found = await told(app)

    assert found.mood is not Mood.OK
    assert "consumers" not in found.words
    assert found.reasons[-1].words == "consumer billing holds 1 message of 1 key"


async def test_no_page_waits_for_a_broker_that_does_not_answer(settings: Settings, rows: Rows) -> None:
    held(rows.connection)
    async with proxied(settings.broker, connect_timeout=3600.0) as (proxy, far):
        proxy.hold(Way.DOWN)
        async with running(settings.model_copy(update={"broker": far})) as app, browser(app) as client:
            pages = [await client.get(path) for path in ("/", "/failures")]

    assert [page.status_code for page in pages] == [200, 200]


async def test_a_broker_that_is_not_there_leaves_what_the_database_tells(settings: Settings, rows: Rows) -> None:
    held(rows.connection)
    broker = settings.broker.model_copy(update={"url": SecretStr("amqp://guest:guest@127.0.0.1:1/")})
    async with running(settings.model_copy(update={"broker": broker})) as app, browser(app) as client:
        found = await seen(app)
        page = await client.get("/failures")

    assert "How many dead letters there are is not known now" in page.text
    assert found.held == [HeldBy(consumer="billing", messages=1, keys=1, waiting=1, overdue=0)]
