"""What failed is grouped by its cause, whichever release parked it, and a group chooses rows for every command."""

from typing import Any

import psycopg
import pytest

from relay.errors import NotFoundError
from relay.jobs.job import Kind
from relay.operate.failures import PARKED, Group, list_groups, list_held_groups, list_parked_groups, read_group
from relay.operate.parked.read import ARCHIVED, ParkedSelection, composed, list_parked
from relay.operate.parked.work import READ_HEADS
from relay.operate.routes.quarantine import routes_of_group
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.bulk import change_rows
from tests.support.plans import explain
from tests.support.plans import tables as tables_of

MANY = 50_000
PARK_MANY = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at, last_error)
    SELECT 'invoice', n::text, 'InvoiceIssued', to_json(repeat('x', 600)), 'parked', now(),
        CASE n %% 1000 WHEN 0 THEN 'timeout of ' || n ELSE 'refused: 312 NO_ROUTE for ' || n END
    FROM generate_series(1, %s) AS n
"""
HOLD = """
    INSERT INTO outbox.held_message (consumer_name, key, message_id, event_type, exchange, routing_key, envelope, body,
        attempts, first_failed_at, last_failed_at, due_at, exception, error)
    VALUES ('billing', %(key)s, gen_random_uuid(), 'InvoiceIssued', 'outbox', 'invoice', '', '', %(attempts)s,
        CASE WHEN %(attempts)s > 0 THEN now() END, CASE WHEN %(attempts)s > 0 THEN now() END, 'infinity',
        %(exception)s, %(error)s)
"""


def fail(rows: Rows, row: int, words: str) -> None:
    rows.connection.execute("UPDATE outbox.message SET last_error = %s WHERE id = %s", [words, row])


def test_rows_of_one_cause_are_one_group(rows: Rows, tables: Tables) -> None:
    for number, key in enumerate("abc"):
        fail(rows, rows.parked(key), f"message of {1000 + number} bytes is larger than 999")
    fail(rows, rows.parked("d", event_type="Paid"), "message of 7 bytes is larger than 999")
    fail(rows, rows.parked("e", exchange="other"), "message of 7 bytes is larger than 999")

    groups = list_groups(tables)

    assert {group.cause for group in groups} == {"message of * bytes is larger than *"}
    assert (groups[0].count, groups[0].event_type, groups[0].place) == (3, "InvoiceIssued", "")
    assert {(group.count, group.event_type, group.place) for group in groups[1:]} == {
        (1, "Paid", ""),
        (1, "InvoiceIssued", "other"),
    }
    assert len({group.id for group in groups}) == 3


def test_a_group_tells_its_times_and_what_is_held_behind_it(rows: Rows, tables: Tables) -> None:
    first, second = rows.parked("a"), rows.parked("b")
    rows.connection.execute("UPDATE outbox.message SET parked_at = parked_at - interval '1 day' WHERE id = %s", [first])
    fail(rows, first, "returned: no queue is bound")  # the trigger looks at the words, and takes the time along
    for _ in range(2):
        rows.parked("a", behind=first)

    (group,) = list_parked_groups(tables)

    assert (group.count, group.keys_held, group.rows_held, group.retried) == (2, 1, 2, 0)
    assert group.first_at is not None
    assert group.last_at is not None
    assert (group.last_at - group.first_at).days == 1
    assert rows.states()[second] == ("parked", None)


def test_a_row_whose_head_has_gone_is_a_failure_itself(rows: Rows, tables: Tables) -> None:
    rows.parked(behind=10_000)

    (group,) = list_parked_groups(tables)

    assert (group.cause, group.count) == ("waits behind message *", 1)


def test_what_has_gone_from_the_parked_rows_is_in_no_group(rows: Rows, tables: Tables) -> None:
    retried, deleted = rows.parked("a"), rows.parked("b")

    rows.connection.execute("UPDATE outbox.message SET state = 'pending' WHERE id = %s", [retried])
    rows.connection.execute("DELETE FROM outbox.message WHERE id = %s", [deleted])

    assert list_groups(tables) == []


def test_a_group_knows_how_often_it_was_retried(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    row = rows.parked()
    (group,) = list_groups(tables)

    for _ in range(3):
        change_rows(connection, Kind.RETRY, ParkedSelection(group=group.id))
        rows.connection.execute(
            "UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'returned: no queue is bound'"
            " WHERE id = %s",
            [row],
        )

    assert [each.retried for each in list_groups(tables)] == [3]


@pytest.mark.parametrize("kind", [Kind.RETRY, Kind.DISCARD, Kind.ARCHIVE])
def test_a_group_chooses_its_rows(kind: Kind, rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    chosen, other = rows.parked("a"), rows.parked("b", event_type="Paid")
    groups = list_groups(tables)
    (group,) = [each for each in groups if each.event_type == "InvoiceIssued"]

    done = change_rows(connection, kind, ParkedSelection(group=group.id), by="ada", why="test")

    state = {Kind.RETRY: "pending", Kind.DISCARD: "discarded", Kind.ARCHIVE: "archived"}[kind]
    assert done.chosen == 1
    assert rows.states() == {chosen: (state, None), other: ("parked", None)}


def test_archived_rows_are_chosen_by_the_group_that_they_had(
    rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    chosen = rows.parked("a")
    (group,) = list_groups(tables)
    other = rows.parked("b", event_type="Paid")
    change_rows(connection, Kind.ARCHIVE, ParkedSelection(), by="ada", why="later")

    listed, _ = list_parked(tables, ParkedSelection(group=group.id, limit=9), with_held=False, state=ARCHIVED)
    change_rows(connection, Kind.RESTORE, ParkedSelection(group=group.id))

    assert [row.id for row in listed] == [chosen]
    assert rows.states() == {chosen: ("parked", None), other: ("archived", None)}
    assert [each.id for each in list_groups(tables)] == [group.id]


def test_routes_of_one_cause_and_exchange_are_one_group(rows: Rows, tables: Tables) -> None:
    for key in ("orders.1", "orders.2"):
        rows.quarantined(key, key)

    (group,) = list_groups(tables)

    assert (group.source, group.cause, group.count) == ("quarantine", "312 NO_ROUTE", 2)
    assert [each.routing_key for each in routes_of_group(tables, group.id)] == [
        "orders.1",
        "orders.2",
    ]
    with pytest.raises(NotFoundError, match="no route of failure group none"):
        routes_of_group(tables, "none")


def test_held_messages_are_grouped_by_exception_and_consumer(rows: Rows, tables: Tables) -> None:
    def hold(key: str, attempts: int, exception: str | None = None, error: str | None = None) -> None:
        values: dict[str, Any] = {"key": key, "attempts": attempts, "exception": exception, "error": error}
        rows.connection.execute(HOLD, values)

    hold("a", 3, "ValueError", "no customer 17")
    hold("a", 0)
    hold("b", 1, "ValueError", "no customer 18")
    hold("c", 1, "TimeoutError", "no answer")

    groups = list_held_groups(tables)

    assert [(each.cause, each.place, each.count, each.keys_held, each.rows_held) for each in groups] == [
        ("ValueError: no customer *", "billing", 2, 1, 1),
        ("TimeoutError: no answer", "billing", 1, 0, 0),
    ]


def test_a_group_that_is_not_there_is_named(tables: Tables) -> None:
    with pytest.raises(NotFoundError, match="there is no failure group abc now"):
        read_group(list_groups(tables), "abc")


@pytest.mark.every_postgres
def test_many_rows_are_grouped_without_reading_one_and_chosen_by_an_index(
    rows: Rows, connection: psycopg.Connection
) -> None:
    rows.connection.execute(PARK_MANY, [MANY])
    rows.connection.execute("ANALYZE outbox.message_parked, outbox.parked_failure")
    groups: list[Group] = list_parked_groups(Tables(connection, "outbox"))

    grouped = explain(connection, PARKED.format(schema=psycopg.sql.Identifier("outbox")))
    values = {
        **dict.fromkeys(ParkedSelection.__dataclass_fields__),
        "group": groups[1].id,
        "after": 0,
        "until": "infinity",
        "batch": 500,
    }
    by_group = ParkedSelection(group=groups[1].id)
    chosen = explain(connection, composed("outbox", READ_HEADS, selection=by_group), values)

    assert [group.count for group in groups] == [MANY - MANY // 1000, MANY // 1000]
    assert tables_of(grouped) == {"parked_failure", "failure"}
    assert chosen["Actual Rows"] == MANY // 1000
    assert chosen["Shared Hit Blocks"] + chosen["Shared Read Blocks"] < 1000
