"""What every writer promises, whichever driver it is for."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import TracerProvider

from relay.outbox import Event, EventError
from tests.outbox.conftest import MessageTable
from tests.outbox.writers import ALL, CHECKED, MANY, Writer

pytestmark = pytest.mark.every_postgres

# JSON that any parse and dump would change: spaces, order, repeated names, escapes, numbers beyond 64 bits,
# zeros at the end. And what drivers' placeholders look like.
TEXT = (
    ' {"b" : 1,\t"a":0.10, "a": 12345678901234567890123456789.000000000000000000001, "n": -0e+0, "e": 1e400,'
    '\n"path": "C:\\\\temp\\\\new", "escaped": "\\u00e4\\u0000\\ud83d\\ude00\\/", "plain": "ä😀\u2028",'
    ' "like": "%s %(a)s %% :name ::text $1 {schema} ?", "quotes": "\'\\"$$"}  '
)
LATER = datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=timezone(timedelta(hours=5, minutes=45)))


def issued() -> Event:
    return Event("Invoice", "7", "InvoiceIssued", "{}")


@pytest.fixture(params=list(ALL))
def writer(request: pytest.FixtureRequest) -> Writer:
    return ALL[request.param]


@pytest.fixture(params=list(CHECKED))
def checked_writer(request: pytest.FixtureRequest) -> Writer:
    return CHECKED[request.param]


async def write(writer: Writer, url: str, *events: Event) -> None:
    async with writer(url) as transaction:
        await transaction.add(*events)
        await transaction.commit()


async def test_the_row_is_the_event(writer: Writer, module_url: str, table: MessageTable) -> None:
    event = Event(
        "Rechnung: ä😀 \\ ' %s :x",
        "key/7\\n",
        "InvoiceIssued\t'\"",
        TEXT,
        headers={"text": "ä\\ %s", "deep": [1, {"null": None, "yes": True}], "big": 2**63 - 1, "half": 0.5},
        message_id=UUID("0190a7c0-5c1e-7bbb-8000-0123456789ab"),
        exchange="",
        routing_key="queue.ä",
        content_type="application/cloudevents+json; charset=utf-8",
        available_at=LATER,
    )

    await write(writer, module_url, event)

    assert table.row() == {
        "message_id": event.message_id,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "event_type": event.event_type,
        "exchange": "",
        "routing_key": "queue.ä",
        "headers": event.headers,
        "content_type": event.content_type,
        "payload": TEXT,
        "payload_bytes": None,
        "available_at": LATER,
        "trace_context": None,
        "state": "pending",
        "attempts": 0,
    }


async def test_what_an_event_leaves_out_is_null(writer: Writer, module_url: str, table: MessageTable) -> None:
    await write(writer, module_url, Event("Invoice", None, "InvoiceIssued", "1"))

    nulls = {column for column, value in table.row().items() if value is None}

    optional = {"aggregate_id", "exchange", "routing_key", "headers", "content_type", "available_at"}
    assert nulls == {*optional, "payload_bytes", "trace_context"}


async def test_bytes_go_out_as_they_are(writer: Writer, module_url: str, table: MessageTable) -> None:
    every_byte = bytes(range(256)) + b"\\x00 \\N \\\\ \\."

    await write(writer, module_url, Event("File", "7", "Stored", every_byte, content_type="application/x-thing"))

    assert table.row()["payload_bytes"] == every_byte
    assert table.row()["payload"] is None


async def test_rows_differ_in_what_they_leave_out(writer: Writer, module_url: str, table: MessageTable) -> None:
    events = [
        Event("A", None, "E", "1"),
        Event("A", "7", "E", b"\0", content_type="text/plain", headers={"a": 1}),
        Event("A", None, "E", "2", available_at=LATER),
    ]

    await write(writer, module_url, *events)

    assert [(row["aggregate_id"], row["payload"], row["payload_bytes"], row["headers"], row["available_at"])
            for row in table.rows()] == [
        (None, "1", None, None, None),
        ("7", None, b"\0", {"a": 1}, None),
        (None, "2", None, None, LATER),
    ]  # fmt: skip


async def test_a_moment_keeps_its_place_where_clocks_change(
    writer: Writer, module_url: str, table: MessageTable
) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    never = datetime(2026, 3, 29, 2, 30, tzinfo=berlin)

    await write(
        writer,
        module_url,
        *(Event("A", "7", "E", "1", available_at=at) for at in (twice, twice.replace(fold=1), never)),
    )

    assert [row["available_at"] for row in table.rows()] == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
        datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
    ]


@pytest.mark.parametrize("count", [2, 60])
async def test_ids_follow_the_order_of_the_events(
    writer: Writer, module_url: str, table: MessageTable, count: int
) -> None:
    await write(writer, module_url, *[Event("A", "7", "E", str(number)) for number in range(count)])

    assert [row["payload"] for row in table.rows()] == [str(number) for number in range(count)]


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("count", [1, 49, 50, 51, 1000])
async def test_any_number_of_events_is_written_by_every_driver(
    many: str, module_url: str, table: MessageTable, count: int
) -> None:
    events = [Event("A", "7", "E", str(number), headers={"n": number} if number % 2 else None)
              for number in range(count)]  # fmt: skip

    await write(MANY[many], module_url, *events)

    assert [(row["payload"], row["headers"]) for row in table.rows()] == [
        (event.payload, event.headers) for event in events
    ]


async def test_nobody_sees_an_event_before_the_commit(writer: Writer, module_url: str, table: MessageTable) -> None:
    async with writer(module_url) as transaction:
        event = issued()
        await transaction.add(event)
        before = table.rows()
        await transaction.commit()

        assert before == []
        assert table.row()["message_id"] == event.message_id


async def test_a_rollback_takes_back_the_event_with_the_rest(
    writer: Writer, module_url: str, table: MessageTable
) -> None:
    async with writer(module_url) as transaction:
        await transaction.execute("INSERT INTO invoice VALUES ('undone')")
        await transaction.add(issued(), issued())
        await transaction.rollback()
        await transaction.add(issued())
        await transaction.execute("INSERT INTO invoice VALUES ('kept')")
        await transaction.commit()

    assert len(table.rows()) == 1
    assert table.execute("SELECT id FROM invoice") == [{"id": "kept"}]


async def test_a_transaction_that_ends_without_a_commit_writes_nothing(
    writer: Writer, module_url: str, table: MessageTable
) -> None:
    async with writer(module_url) as transaction:
        await transaction.add(issued())

    assert table.rows() == []


async def test_adding_nothing_writes_nothing(writer: Writer, module_url: str, table: MessageTable) -> None:
    await write(writer, module_url)

    assert table.rows() == []


BAD = [
    Event("", "7", "E", "{}"),
    Event("A", "x" * 256, "E", "{}"),
    Event("A", "7", "E", "{'a': 1}"),
    Event("A", "7", "E", "{}", headers={"when": datetime(2031, 1, 1, tzinfo=UTC)}),
    Event("A", "7", "E", b"x" * (16 * 1024 * 1024 + 1), content_type="text/plain"),
]


async def test_a_bad_event_leaves_the_transaction_usable_and_empty(
    checked_writer: Writer, module_url: str, table: MessageTable
) -> None:
    async with checked_writer(module_url) as transaction:
        await transaction.execute("INSERT INTO invoice VALUES ('7')")
        for bad in BAD:
            with pytest.raises(EventError):
                await transaction.add(issued(), bad)
        await transaction.commit()

    assert table.rows() == []
    assert table.execute("SELECT id FROM invoice") == [{"id": "7"}]


@pytest.fixture
def tracer() -> Iterator[trace.Tracer]:
    provider = TracerProvider()
    yield provider.get_tracer("test")
    provider.shutdown()


async def test_the_current_span_goes_along_and_no_baggage(
    checked_writer: Writer, module_url: str, table: MessageTable, tracer: trace.Tracer
) -> None:
    state = trace.TraceState([("vendor", "value")])
    caller = trace.SpanContext(
        trace_id=7, span_id=8, is_remote=True, trace_state=state, trace_flags=trace.TraceFlags(1)
    )
    context = trace.set_span_in_context(trace.NonRecordingSpan(caller), baggage.set_baggage("user", "secret"))

    token = attach(context)
    with tracer.start_as_current_span("issue invoice") as span:
        await write(checked_writer, module_url, issued(), issued())
    detach(token)

    carried: dict[str, Any] = {
        "traceparent": f"00-{7:032x}-{span.get_span_context().span_id:016x}-01",
        "tracestate": "vendor=value",
    }
    assert [row["trace_context"] for row in table.rows()] == [carried, carried]
