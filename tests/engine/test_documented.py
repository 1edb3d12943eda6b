"""docs/table-and-message.md tells the columns of the real table and the headers of real messages, and no others."""

import re
from pathlib import Path

import psycopg
from aio_pika.abc import AbstractIncomingMessage
from psycopg.types.json import Json

from relay.config.settings import BrokerSettings, CloudEvents, DatabaseSettings, Route
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Permanent, Retries, on
from relay.consume.apply.fence import EPOCH, PARTITION
from relay.consume.failed.envelope import FOLDED, OF_FAILURES, ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, THE_BROKERS
from relay.consume.failed.queues import retry_queue_name
from relay.engine.send.codec import Encoder
from relay.engine.send.message import LINK, OURS, REDELIVERED, REPLAY_ID, REPLAYED_AT, WRAPPED, MessageIdentity
from relay.engine.send.routes import Router
from relay.operate.messages.message import EDIT_OF
from relay.outbox.declared import VERSION
from relay.servers.rabbitmq.content_header import RAW_HEADER, RAW_METHOD, UNDECODABLE
from tests.consume.effects import running
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.rows import ROW
from tests.support.eventually import eventually
from tests.support.roles import SCRIPT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "table-and-message.md").read_text()
ROLES = re.sub(r"^(BEGIN|COMMIT);$", "", SCRIPT, flags=re.MULTILINE)
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
PROPERTIES = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id"),
)
COLUMNS = """
    SELECT attname, replace(format_type(atttypid, atttypmod), 'timestamp with time zone', 'timestamptz'),
        attnotnull, coalesce(pg_get_expr(adbin, adrelid), 'NULL'),
        concat_ws(', ', CASE WHEN has_column_privilege('outbox_writer', attrelid, attname, 'INSERT') THEN 'writer' END,
            CASE WHEN has_column_privilege('outbox_relay', attrelid, attname, 'UPDATE') THEN 'relay' END),
        EXISTS (SELECT FROM pg_constraint WHERE conrelid = attrelid AND attnum = ANY (conkey)
            AND pg_get_constraintdef(oid) LIKE '%<= 255%')
    FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE attrelid = 'outbox.message'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


def items(heading: str) -> dict[str, list[str]]:
    """Return what stands in the brackets of the items below a heading, and behind them, by name."""
    below = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    found = re.findall(r"^- `([\w-]+)` \((.*?)\): ((?:.+\n(?:  .+\n)*))", below, re.MULTILINE)
    return {name: [*cells.split("; "), words] for name, cells, words in found}


def test_the_documented_columns_are_those_of_the_table(database_url: str) -> None:
    documented = items("## Columns of `outbox.message`")
    with psycopg.connect(database_url) as connection:
        connection.execute(ROLES.encode())  # not committed: roles belong to the whole server
        found = connection.execute(COLUMNS).fetchall()
        connection.rollback()

    assert list(documented) == [name for name, *_ in found]
    for name, type_, is_needed, default, writers, is_short in found:
        told_type, told_writers, told_default, told_limits = documented[name]
        assert (told_type, told_writers) == (type_, writers or "database"), name
        assert ("255 bytes" in told_limits) is is_short, name
        match told_default:
            case "required":
                assert (is_needed, default) == (True, "NULL"), name
            case "generated":
                assert "hashtextextended" in default
            case _:
                assert told_default.strip("`") in default, name


@on("Later")
async def fail(message: Message, connection: psycopg.AsyncConnection) -> None:
    raise ValueError("not yet")


@on("Never")
async def refuse(message: Message, connection: psycopg.AsyncConnection) -> None:
    raise Permanent("no")


async def test_the_documented_properties_and_headers_are_those_of_a_message(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    await outbox.insert("17", headers=Json({VERSION: "2", "own": 1}), trace_context=Json(TRACE))
    async with run_node():
        (message,) = await queue.drain(1)
    headers = items("### Headers")

    assert set_properties(message) == set(items("### Properties"))
    assert set(message.headers) == {*headers, "own"} - {LINK, REDELIVERED, REPLAY_ID, REPLAYED_AT, EDIT_OF, WRAPPED}
    assert set(headers) == OURS | TRACE.keys() | {LINK, REPLAY_ID, REPLAYED_AT, VERSION, EDIT_OF}


def test_the_documented_types_are_those_of_the_frames() -> None:
    row = ROW._replace(traceparent=TRACE["traceparent"].encode(), tracestate=TRACE["tracestate"].encode())
    row = row._replace(written_as=b"billing")
    route = Route(exchange="outbox", cloudevents=CloudEvents.STRUCTURED)
    encoder = Encoder(1, 4096, Router((route,), "outbox"), MessageIdentity(b"relay", 1 << 20))
    frames = encoder.encode([row], {row.id}).frames

    types = {name: cells[0].strip("`").encode() for name, cells in items("### Headers").items()}
    for name in OURS | TRACE.keys():
        assert bytes([len(name)]) + name.encode() + types[name] in frames, name


async def test_the_documented_headers_of_consumers_are_those_of_their_copies(
    outbox: Outbox, queue: Reader, run_node: RunNode, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    for event_type in ("Later", "Never"):
        await outbox.insert(event_type=event_type)
    consumer = Consumer(
        queue.queue.name,
        [fail, refuse],
        inbox=Inbox(database, "copies"),
        broker=broker,
        failures=FailurePolicy(order="skip", retries=Retries(attempts=3, initial=600.0, maximum=600.0, jitter=0)),
    )
    async with run_node(), running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == 2, "both are carried on")
    ((step, _),) = consumer.counters.retried.items()
    retried = await (await queue.channel.get_queue(retry_queue_name(queue.queue.name, step))).get(no_ack=True)
    dead = await (await queue.channel.get_queue(f"{queue.queue.name}.dead")).get(no_ack=True)
    documented = items("## What consumers add")

    for copy, kind in ((retried, "retry"), (dead, "dead letter")):
        added = copy.headers.keys() - items("### Headers").keys() - THE_BROKERS
        assert added == {name for name, cells in documented.items() if kind in cells[1].split(", ")}
    assert set_properties(retried) - set_properties(dead) == {"expiration"}
    assert set(documented) == OF_FAILURES | {
        ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, PARTITION, EPOCH, FOLDED, UNDECODABLE, RAW_HEADER, RAW_METHOD
    }  # fmt: skip


def set_properties(message: AbstractIncomingMessage) -> set[str]:
    return {name for name in PROPERTIES if getattr(message, name)}
