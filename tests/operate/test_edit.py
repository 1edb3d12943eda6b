"""An edited copy of a parked row is sent once, with what becomes of the old row, or nothing is."""

import uuid
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.errors import NotFoundError, UsageError
from relay.operate.parked.edit import Edit, Edited, EditRefusedError, parse_headers, send_edited
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows

READ = """
    SELECT state, aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type, written_as,
        trace_context, payload::text, payload_bytes, headers, attempts, last_error
    FROM outbox.message WHERE id = %s
"""
AUDIT = "SELECT command, target, done_by, why, sent_as FROM outbox.operator_audit ORDER BY id"
KEPT = slice(1, 9)  # columns that a copy has of the old row


def edited(tables: Tables, row: int, edit: Edit, *, discard: bool = True, **more: Any) -> Edited:
    given = {"by": "ada", "why": "a wrong amount", "most_bytes": 1000, **more}
    return send_edited(tables, row, edit, discard=discard, **given)


def read(rows: Rows, row: int) -> tuple[Any, ...]:
    found = rows.connection.execute(READ, [row]).fetchone()
    assert found is not None
    return tuple(found)


def test_a_copy_is_sent_behind_its_key_and_names_the_old_message(rows: Rows, tables: Tables) -> None:
    old = rows.parked(headers=Jsonb({"tenant": "acme"}), routing_key="r", exchange="e", trace_context=Jsonb({"a": "b"}))
    behind = rows.parked(behind=old)
    rows.connection.execute("UPDATE outbox.message SET written_as = 'billing' WHERE id = %s", [old])

    done = edited(tables, old, Edit(payload='{"amount": 1.10}'))

    assert (done.old_id, done.discarded, done.released) == (old, True, 1)
    assert done.id > behind
    before, copy = read(rows, old), read(rows, done.id)
    assert copy[KEPT] == before[KEPT]
    assert copy[7] == "billing"
    assert (copy[0], copy[9], copy[12], copy[13]) == ("pending", '{"amount": 1.10}', 0, None)
    assert copy[11] == {"tenant": "acme", "x-edit-of": str(done.edit_of)}
    assert rows.states() == {old: ("discarded", None), behind: ("pending", None), done.id: ("pending", None)}
    assert before[13] == "returned: no queue is bound"
    assert rows.connection.execute(AUDIT).fetchall() == [
        ("parked edit", str(old), "ada", "a wrong amount", done.message_id),
        ("parked discard", str(old), "ada", "a wrong amount", None),
    ]


def test_the_old_row_may_stay_parked(rows: Rows, tables: Tables) -> None:
    old = rows.parked()
    behind = rows.parked(behind=old)

    done = edited(tables, old, Edit(headers={"tenant": "b"}), discard=False)

    assert rows.states() == {old: ("parked", None), behind: ("parked", old), done.id: ("pending", None)}
    assert (done.discarded, done.released) == (False, 0)
    assert read(rows, done.id)[9] == read(rows, old)[9]
    assert read(rows, done.id)[11] == {"tenant": "b", "x-edit-of": str(done.edit_of)}


@pytest.mark.parametrize("content_type", [None, "text/plain"])
def test_bytes_stay_bytes(rows: Rows, tables: Tables, content_type: str | None) -> None:
    old = rows.parked(payload=None, payload_bytes=b"\x00old", content_type=content_type)

    done = edited(tables, old, Edit(payload=b"\xffnew"))

    assert read(rows, done.id)[9:11] == (None, b"\xffnew")
    assert read(rows, done.id)[6] == content_type


@pytest.mark.parametrize(
    ("edit", "field", "words"),
    [
        (Edit(payload='{"amount": 1,}'), "payload", "payload is not JSON"),
        (Edit(payload="NaN"), "payload", "NaN is no JSON value"),
        (Edit(payload=b"\xff"), "payload", "not UTF-8"),
        (Edit(payload='"' + "x" * 1000 + '"'), "payload", "1002 bytes"),
        (Edit(headers={"n": 2**70}), "headers", "headers.n does not fit into 64 bits"),
        (Edit(headers={"x" * 200: 1}), "headers", "name of 200 bytes"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_changes_nothing(
    rows: Rows, tables: Tables, edit: Edit, field: str, words: str
) -> None:
    old = rows.parked()

    with pytest.raises(EditRefusedError, match=words) as refused:
        edited(tables, old, edit)

    assert refused.value.field == field
    assert rows.states() == {old: ("parked", None)}
    assert rows.connection.execute(AUDIT).fetchall() == []


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"a": NaN}', "[" * 100_000])
def test_headers_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(EditRefusedError, match="the headers are"):
        parse_headers(text)


def test_only_a_parked_row_that_waits_behind_no_other_is_edited(rows: Rows, tables: Tables) -> None:
    head = rows.parked()
    behind, pending, archived = rows.parked(behind=head), rows.pending("2"), rows.parked("3")
    rows.connection.execute("UPDATE outbox.message SET state = 'archived' WHERE id = %s", [archived])
    before = rows.states()
    edit = Edit(payload="{}")

    with pytest.raises(UsageError, match=f"is held behind {head}: choose that one"):
        edited(tables, behind, edit)
    with pytest.raises(NotFoundError, match="is not parked: it is pending"):
        edited(tables, pending, edit)
    with pytest.raises(UsageError, match="is archived"):
        edited(tables, archived, edit)
    with pytest.raises(UsageError, match="nothing is edited"):
        edited(tables, head, Edit())

    assert rows.states() == before


def test_a_form_that_is_sent_twice_sends_one_copy(rows: Rows, tables: Tables) -> None:
    old, copy = rows.parked(), uuid.uuid4()
    edit = Edit(payload="{}")
    edited(tables, old, edit, discard=False, message_id=copy)

    with pytest.raises(UsageError, match=f"message {copy} was sent already"):
        edited(tables, old, edit, discard=False, message_id=copy)

    assert len(rows.states()) == 2


def test_a_copy_of_a_copy_names_the_copy(rows: Rows, tables: Tables) -> None:
    first = edited(tables, rows.parked(), Edit(payload="{}"))
    rows.connection.execute("UPDATE outbox.message SET state = 'parked', parked_at = now() WHERE id = %s", [first.id])

    second = edited(tables, first.id, Edit(payload="[]"))

    assert read(rows, second.id)[11] == {"x-edit-of": str(first.message_id)}


def test_a_failure_in_the_middle_leaves_neither_copy_nor_discard(rows: Rows, tables: Tables) -> None:
    old = rows.parked()
    rows.connection.execute(
        "ALTER TABLE outbox.operator_audit ADD CONSTRAINT no_discard CHECK (command <> 'parked discard')"
    )

    with pytest.raises(psycopg.errors.CheckViolation):
        edited(tables, old, Edit(payload="{}"))

    assert rows.states() == {old: ("parked", None)}
    assert rows.connection.execute(AUDIT).fetchall() == []
