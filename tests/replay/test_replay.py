"""`relay replay` on rows that were sent: what arrives, where, in which order, and what is said about it."""

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import aio_pika
import pytest
from psycopg.sql import SQL, Identifier
from psycopg.types.json import Jsonb

from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults, ids_of, repeats
from tests.support.cloud_events import by_rabbitmq


async def test_a_replay_is_the_same_message_with_two_headers_more(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    (row,) = await sent.add(1)
    message_id = await sent.value("SELECT message_id FROM outbox.message WHERE id = %s", row)

    ended = await relay("replay", "--all")

    (copy,) = await copies.read()
    assert ended.code == 0, ended.said
    assert "replay 1 is done: 1 rows replayed" in ended.said
    assert (copy.message_id, copy.type, copy.content_type) == (str(message_id), "InvoiceIssued", "application/json")
    assert (copy.exchange, copy.routing_key) == ("outbox", "customer.InvoiceIssued")
    assert copy.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert json.loads(copy.body)["n"] == row
    assert copy.headers["x-replay-id"] == 1
    replayed_at = datetime.fromisoformat(str(copy.headers["x-replayed-at"]))
    assert timedelta(0) <= datetime.now(UTC) - replayed_at < timedelta(minutes=2)
    assert set(copy.headers) == {
        *("x-aggregate-type", "x-aggregate-id", "x-outbox-id", "x-outbox-lane", "x-outbox-writer"),
        *("x-replay-id", "x-replayed-at"),
    }


@pytest.mark.parametrize("form", ["binary", "structured"])
async def test_a_replayed_event_has_the_id_and_the_time_of_its_row(
    form: str, relay: Commands, sent: SentRows, copies: Copies
) -> None:
    (row,) = await sent.add(1)
    message_id = await sent.value("SELECT message_id FROM outbox.message WHERE id = %s", row)
    routes = json.dumps([{"exchange": "outbox", "cloudevents": form}])

    for _ in range(2):
        ended = await relay("replay", "--all", RELAY_ROUTES=routes)
        assert ended.code == 0, ended.said

    events = [by_rabbitmq(copy) for copy in await copies.read()]
    assert [event.get_id() for event in events] == 2 * [str(message_id)]
    written_at = await sent.value("SELECT created_at FROM outbox.message WHERE id = %s", row)
    assert [event.get_time() for event in events] == 2 * [written_at]


PARENT, STATE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1"
LINKED = {"x-link-traceparent": PARENT}
KEPT = {"traceparent": PARENT, "tracestate": STATE}


@pytest.mark.parametrize("column", ["trace_context", "headers"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], LINKED), (["--trace", "link"], LINKED), (["--trace", "keep"], KEPT), (["--trace", "drop"], {})],
)
async def test_a_replay_begins_a_trace_unless_it_is_to_keep_the_first_one(
    relay: Commands, sent: SentRows, copies: Copies, column: str, flags: list[str], expected: dict[str, str]
) -> None:
    await sent.add(1)
    statement = SQL("UPDATE outbox.message SET {} = %s").format(Identifier(column))
    await sent.connection.execute(statement, [Jsonb(KEPT)])

    ended = await relay("replay", "--all", *flags)

    (copy,) = await copies.read()
    assert ended.code == 0, ended.said
    assert {name: value for name, value in copy.headers.items() if "trace" in name} == expected


async def test_a_traceparent_of_another_form_is_no_link(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(1)
    await sent.connection.execute("UPDATE outbox.message SET trace_context = %s", [Jsonb({"traceparent": "00-ä"})])

    await relay("replay", "--all")

    (copy,) = await copies.read()
    assert not [name for name in copy.headers if "trace" in name]


async def test_keys_come_in_order_over_days_and_wherever_the_rows_lie(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    # The later days hold the lower ids, as after a retry of parked rows.
    ids = [*await sent.add(2000), *await sent.add(2000, days_ago=1), *await sent.add(2000, days_ago=2)]

    assert (await relay("replay", "--all")).code == 0

    messages = await copies.read()
    assert faults(ids, messages) == []
    assert repeats(messages) == 0


async def test_each_filter_selects_and_all_of_them_together(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(100, keys=10)
    other = await sent.add(5, keys=10, event_type="InvoicePaid")
    message_ids = [
        str(await sent.value("SELECT message_id FROM outbox.message WHERE id = %s", row)) for row in (ids[3], ids[7])
    ]
    old = await sent.add(4, days_ago=3)
    since = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    cases: list[tuple[list[str], list[int]]] = [
        ([message_ids[0], message_ids[1]], [ids[3], ids[7]]),
        (["--aggregate-id", "3", "--since", "1d"], [id_ for id_ in [*ids, *other] if id_ % 10 == 3]),
        (["--event-type", "InvoicePaid"], other),
        (["--until", since], old),
        (["--since", since, "--event-type", "InvoiceIssued", "--aggregate-type", "customer"], ids),
        (["--aggregate-type", "order"], []),
    ]

    for arguments, wanted in cases:
        counted = await relay.ask("replay", *arguments, "--dry-run")
        ended = await relay("replay", *arguments)

        assert f"would replay {len(wanted)} rows" in counted.said
        assert (counted.code, ended.code) == (0, 0)
        assert sorted(ids_of(await copies.read())) == wanted, arguments
    assert "no sent row matches: nothing to replay" in ended.said


async def test_only_what_was_sent_is_replayed_and_the_rest_is_told(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    (row,) = await sent.add(1)
    await sent.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, event_type, payload, state)"
        " SELECT 'a', 'e', '1', state FROM unnest(ARRAY['pending', 'pending', 'parked', 'discarded']) AS state"
    )

    ended = await relay("replay", "--all")

    assert ids_of(await copies.read()) == [row]
    assert "2 more rows match and are pending" in ended.said
    assert "1 more rows match and are parked" in ended.said


async def test_it_says_from_which_day_on_rows_are_kept(relay: Commands, sent: SentRows) -> None:
    await sent.add(1, days_ago=2)
    first = await sent.value("SELECT ((now() AT TIME ZONE 'UTC')::date - 3)::text")

    assert f"sent rows are kept from {first} (UTC) on" in (await relay.ask("replay", "--since", "9d", "--dry-run")).said
    assert "are kept from" not in (await relay.ask("replay", "--since", "1d", "--dry-run")).said


async def test_a_dry_run_counts_by_day_and_makes_no_job(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(30)
    await sent.add(12, days_ago=2)

    ended = await relay.ask("replay", "--all", "--dry-run", "--output", "json")

    counted = json.loads(ended.said.splitlines()[-1])
    assert counted["rows"] == 42
    assert [day["rows"] for day in counted["days"]] == [12, 30]
    assert await copies.read() == []
    assert await relay.jobs() == []


async def test_another_exchange_and_routing_key(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(10)
    exchange = await copies.channel.declare_exchange("again", aio_pika.ExchangeType.TOPIC, durable=True)
    await copies.queue.bind(exchange, "#")

    kept = await relay("replay", "--all", "--to-exchange", "again")
    named = await relay("replay", "--all", "--to-exchange", "again", "--routing-key", "over.there")
    queued = await relay("replay", "--all", "--to-exchange", "", "--routing-key", "copies")

    messages = await copies.read()
    assert (kept.code, named.code, queued.code) == (0, 0, 0)
    addresses = [(message.exchange, message.routing_key) for message in messages]
    assert addresses[:10] == [("again", "customer.InvoiceIssued")] * 10
    assert addresses[10:20] == [("again", "over.there")] * 10
    assert addresses[20:] == [("", "copies")] * 10
    assert faults(ids, messages) == []


async def test_a_row_that_nobody_takes_is_counted_with_its_reason(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    await copies.queue.unbind("outbox", "#")
    await copies.queue.bind("outbox", "customer.InvoiceIssued")
    good = await sent.add(200, keys=5)
    bad = await sent.add(3, keys=5, event_type="Nobody")
    later = await sent.add(200, keys=5)

    ended = await relay("replay", "--all")
    shown = json.loads((await relay.ask("jobs", "show", "1", "--output", "json")).said)

    assert ended.code == 1
    assert "3 rows could not be sent: `relay jobs show 1` tells which" in ended.said
    assert [failure["id"] for failure in shown["failures"]] == bad
    assert "NO_ROUTE" in shown["failures"][0]["reason"]
    assert [shown["job"][name] for name in ("state", "selected", "done", "failed")] == ["done", 403, 400, 3]
    assert faults([*good, *later], await copies.read()) == []


async def test_what_refuses_everything_stops_the_job(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(4000)
    await copies.channel.declare_exchange("deaf", aio_pika.ExchangeType.TOPIC, durable=True)

    ended = await relay("replay", "--all", "--to-exchange", "deaf")

    (job,) = await relay.jobs()
    assert ended.code == 3
    assert "rows were refused" in ended.said
    assert job["state"] == "interrupted"
    assert 1000 <= job["failed"] < 4000


async def test_who_gives_the_command_is_kept_with_the_job(relay: Commands, sent: SentRows, copies: Copies) -> None:
    by_flag = await relay("replay", str(UUID(int=7)), "--by", "ada", RELAY_OPERATOR="team billing")
    by_variable = await relay("replay", str(UUID(int=8)), RELAY_OPERATOR="team billing")

    assert (by_flag.code, by_variable.code) == (0, 0)
    assert [job["made_by"] for job in await relay.jobs()] == ["team billing", "ada"]


async def test_jobs_are_listed_with_who_made_them(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(5)
    message_id = str(UUID(int=7))

    await relay("replay", "--since", "1h")
    await relay("replay", message_id)

    newer, older = await relay.jobs()
    assert (older["id"], older["state"], older["selected"], older["done"]) == (1, "done", 5, 5)
    assert list(older["filter"]) == ["since"]
    assert "@" in older["made_by"]
    assert older["made_as"] == "postgres"
    assert newer["filter"] == {"message_ids": [message_id]}
    lines = (await relay.ask("jobs", "list")).said.splitlines()
    assert lines[1].split("\t")[:4] == ["2", "replay", "sent", "done"]


async def test_a_refused_row_is_listed_that_is_settled_before_the_last_read(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    """The pace gives no room then, so the step that counts it cannot know that it is the last."""
    ids = await sent.add(3)
    (bad,) = await sent.add(1, event_type="x" * 250)  # longer than a routing key may be

    await relay("replay", "--all", "--rate", "40")
    shown = await relay.ask("jobs", "show", "1")

    assert f"{bad}\t" in shown.said
    assert faults(ids, await copies.read()) == []
