"""A consumer of ours gets what the writer wrote, in whatever form its route sends it, also when it comes again."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
import pytest

from relay.config.settings import BrokerSettings, CloudEvents, DatabaseSettings, Route, Settings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, Retries, on
from tests.consume.effects import running
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.cloud_events import by_rabbitmq
from tests.support.eventually import eventually

EACH_FORM = list(CloudEvents)
BODIES: list[dict[str, Any]] = [
    {"payload": '{"amount": 9.90,  "digits": ' + "7" * 40 + "}"},
    {"payload": "null"},
    {"payload": '"text"'},
    {"payload": "[1]", "content_type": "text/plain"},
    {"payload_bytes": b"\0\xff"},
    {"payload_bytes": b""},
]


@dataclass
class Recorder:
    """A handler that fails at the first try of each message, and notes what it got at the others."""

    seen: Counter[str] = field(default_factory=Counter)
    got: list[tuple[bytes, str | None, str | None, str | None]] = field(default_factory=list)

    def handler(self) -> Any:
        @on("InvoiceIssued")
        async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
            self.seen[str(message.message_id)] += 1
            if self.seen[str(message.message_id)] == 1:
                raise RuntimeError("not today")
            assert message.payload == message.body
            self.got.append((message.body, message.content_type, message.aggregate_id, message.version))

        return note


def written(columns: dict[str, Any]) -> tuple[bytes, str]:
    usual = "application/json" if "payload" in columns else "application/octet-stream"
    body = columns["payload"].encode() if "payload" in columns else columns["payload_bytes"]
    return body, columns.get("content_type", usual)


@pytest.mark.parametrize("order", ["hold", "skip"])
@pytest.mark.parametrize("form", EACH_FORM)
async def test_a_handler_gets_the_same_message_in_each_form(
    form: CloudEvents,
    order: Literal["hold", "skip"],
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    settings: Settings,
    database: DatabaseSettings,
    broker: BrokerSettings,
) -> None:
    for number, columns in enumerate(BODIES):
        await outbox.insert(str(number), headers='{"x-event-version": "2"}', **columns)
    recorder = Recorder()
    failures = FailurePolicy(order=order, retries=Retries(attempts=3, initial=0.05, maximum=0.05))
    consumer = Consumer(
        queue.queue.name, [recorder.handler()], inbox=Inbox(database, "events"), broker=broker, failures=failures
    )
    routed = settings.model_copy(update={"routes": (Route(exchange="outbox", cloudevents=form),)})
    async with run_node(routed), running(consumer):
        await eventually(lambda: consumer.counters.applied == len(BODIES), "all are applied at the second try")

    expected = [(*written(columns), str(number), "2") for number, columns in enumerate(BODIES)]
    assert sorted(recorder.got, key=lambda got: got[2] or "") == expected


@on("InvoiceIssued")
async def refuse(message: Message, connection: psycopg.AsyncConnection) -> None:
    raise Permanent("no")


async def test_a_dead_letter_is_the_event_as_it_came(
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    settings: Settings,
    database: DatabaseSettings,
    broker: BrokerSettings,
) -> None:
    await outbox.insert("7")
    consumer = Consumer(queue.queue.name, [refuse], inbox=Inbox(database, "events"), broker=broker)
    route = Route(exchange="outbox", cloudevents=CloudEvents.STRUCTURED)
    async with run_node(settings.model_copy(update={"routes": (route,)})), running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 1, "it is a dead letter")

    letter = await (await queue.channel.get_queue(f"{queue.queue.name}.dead")).get(no_ack=True)
    assert letter is not None
    event = by_rabbitmq(letter)
    assert (event.get_id(), event.get_data()) == (letter.message_id, {"key": "7"})


async def test_an_envelope_that_its_writer_made_stays_on(
    outbox: Outbox, queue: Reader, run_node: RunNode, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    own = '{"specversion": "1.0", "datacontenttype": "text/plain","data":"mine"}'
    await outbox.insert("1", payload=own, content_type="application/cloudevents+json")
    recorder = Recorder(seen=Counter({str(await outbox.column("message_id", 1)): 1}))
    consumer = Consumer(queue.queue.name, [recorder.handler()], inbox=Inbox(database, "events"), broker=broker)
    async with run_node(), running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert recorder.got == [(own.encode(), "application/cloudevents+json", "1", None)]
