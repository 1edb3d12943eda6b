"""The search for messages, and one message."""

import re
from contextlib import suppress
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.settings import DatabaseSettings, Settings
from relay.errors import UsageError
from relay.operate.messages import look as messages
from relay.operate.messages.look import MessageState, Place, Search, search
from relay.operate.operation import Role
from relay.operate.session import session
from relay.outbox.identity import id_of_writer
from tests.console.rows import parked, sent, waiting
from tests.console.site import browser, log_in, post, running, users

HOSTILE = "<script>alert('x')</script> \" onload=alert(1) \u202e{{ 7777 * 7777 }}"
CELL = re.compile(r'<a href="(/messages/[^"?]+(?:\?at=[^"]*)?)">(\d+)</a>')


def every(database: DatabaseSettings, wanted: Search) -> list[int]:
    """Return the ids of all pages."""
    found: list[int] = []
    after: str | None = None
    with session(database) as tables:
        while True:
            page = search(tables, wanted, after=after)
            found += [line.id for line in page.lines]
            if (after := page.next) is None:
                return found


@pytest.mark.parametrize("state", list(MessageState))
@pytest.mark.parametrize("event", [None, "Paid", "Shipped"])
def test_the_pages_have_each_row_once(
    database: DatabaseSettings,
    database_url: str,
    state: MessageState,
    event: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "SCANNED", 60)
    monkeypatch.setattr(messages, "BLOCKS", 3)
    monkeypatch.setattr(messages, "STEP", 2)
    if state is MessageState.SENT:
        sent(database_url, 700)
    else:
        waiting(database_url, state, 170)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT id FROM outbox.message WHERE state = %s AND (%s::text IS NULL OR event_type = %s) ORDER BY id",
            [state, event, event],
        ).fetchall()

    found = every(database, Search(state=state, event_type=event))

    assert sorted(found) == [row for (row,) in rows]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("event", [None, "Paid", "Shipped"])
def test_rows_of_any_state_are_found_unless_one_is_named(
    database: DatabaseSettings, database_url: str, event: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "SCANNED", 60)
    monkeypatch.setattr(messages, "BLOCKS", 3)
    monkeypatch.setattr(messages, "STEP", 2)
    for state in messages.WAITING:
        waiting(database_url, state, 40)
    sent(database_url, 200)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT id FROM outbox.message WHERE %s::text IS NULL OR event_type = %s", [event, event]
        ).fetchall()

    found = every(database, Search(event_type=event))

    assert sorted(found) == sorted(row for (row,) in rows)
    assert len(found) == len(set(found))


def test_a_page_that_ends_between_what_waits_and_what_was_sent_goes_on(
    database: DatabaseSettings, database_url: str
) -> None:
    waiting(database_url, "parked", messages.ROWS)
    sent(database_url, 3)

    assert len(every(database, Search())) == messages.ROWS + 3


def test_a_key_has_its_rows_of_any_state(database: DatabaseSettings, database_url: str) -> None:
    for state in messages.WAITING:
        waiting(database_url, state, 70)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE state = 'archived'")

    found = every(database, Search(aggregate_type="order", aggregate_id="order-3"))

    assert len(found) == 10 * len(MessageState) - 10


@pytest.mark.parametrize("state", [MessageState.PARKED, MessageState.QUARANTINED, MessageState.SENT])
def test_a_key_has_its_rows(database: DatabaseSettings, database_url: str, state: MessageState) -> None:
    sent(database_url, 70)
    waiting(database_url, "parked", 70)
    waiting(database_url, "quarantined", 70)
    kind = "customer" if state is MessageState.SENT else "order"

    found = every(database, Search(state=state, aggregate_type=kind, aggregate_id=f"{kind}-3"))

    assert len(found) == 10


def test_a_time_has_the_rows_that_were_sent_then(database: DatabaseSettings, database_url: str) -> None:
    for _ in range(3):
        sent(database_url, 400)
    with psycopg.connect(database_url) as connection:
        times = [at for (at,) in connection.execute("SELECT DISTINCT sent_at FROM outbox.message ORDER BY 1")]

    assert len(every(database, Search(since=times[1], until=times[2]))) == 400
    assert len(every(database, Search(until=times[1]))) == 400
    assert len(every(database, Search(since=times[2]))) == 400


@pytest.mark.parametrize("state", list(MessageState))
def test_a_message_is_found_by_either_id_in_whatever_state(
    database: DatabaseSettings, database_url: str, state: MessageState
) -> None:
    if state is MessageState.SENT:
        sent(database_url, 3)
    else:
        waiting(database_url, state, 3)
    with psycopg.connect(database_url) as connection:
        row, message_id = connection.execute("SELECT id, message_id FROM outbox.message LIMIT 1").fetchone() or (0, "")

    assert every(database, Search(row=row)) == [row]
    assert every(database, Search(row=message_id)) == [row]
    assert every(database, Search(row=uuid4())) == []


def test_a_page_that_finds_little_says_how_far_it_has_looked(
    database: DatabaseSettings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "BLOCKS", 2)
    monkeypatch.setattr(messages, "STEP", 2)
    sent(database_url, 1000)

    with session(database) as tables:
        page = search(tables, Search(event_type="Nothing"))

    assert page.lines == []
    assert page.next is not None
    assert page.looked_until is not None


@given(st.text(max_size=40) | st.from_regex(r"\A\d{8}\.\d{1,12}\.\d{1,8}\Z"))
def test_what_is_no_place_is_refused(text: str) -> None:
    with suppress(UsageError):
        assert str(Place.of(text)).split(".", 1)[0] == text.split(".", 1)[0]


@pytest.mark.parametrize(
    ("since", "until", "number"),
    [
        ("2h", "", 3),
        ("5m", "", 0),
        ("2h ago", "30m", 3),
        ("{at:%Y-%m-%d %H:%M:%S}", "", 3),
        ("{at:%Y-%m-%d %H:%M:%S} UTC", "", 3),
        ("{at:%Y-%m-%d %H:%M:%S}Z", "{at:%Y-%m-%d %H:%M:%S}", None),
        ("yesterday", "", None),
    ],
)
async def test_times_are_taken_as_the_console_prints_them_and_as_lengths(
    client: httpx.AsyncClient, database_url: str, since: str, until: str, number: int | None
) -> None:
    waiting(database_url, "parked", 3)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE outbox.message SET created_at = now() - interval '1 hour'")
        (at,) = connection.execute("SELECT max(created_at) AT TIME ZONE 'UTC' FROM outbox.message").fetchone() or (0,)

    page = await client.get("/messages", params={"since": since.format(at=at), "until": until.format(at=at)})

    assert page.status_code == (422 if number is None else 200)
    assert len(CELL.findall(page.text)) == (number or 0)
    if number is None:
        assert "From " in page.text


async def test_the_pages_show_the_rows_and_lead_to_each(client: httpx.AsyncClient, database_url: str) -> None:
    sent(database_url, 60)
    listed = await client.get("/messages")
    found = CELL.findall(listed.text)
    one = await client.get(found[0][0])

    assert len(found) == messages.ROWS
    assert f"<dd>{found[0][1]}</dd>" in one.text
    assert UUID(found[0][0].rpartition("/")[2].partition("?")[0])
    assert "confirmed by the broker" in one.text
    assert "no inbox here has it" in one.text


async def test_what_consumers_and_operators_did_is_part_of_its_way(
    client: httpx.AsyncClient, database_url: str
) -> None:
    sent(database_url, 1)
    with psycopg.connect(database_url) as connection:
        (found,) = connection.execute("SELECT id, message_id, written_as FROM outbox.message")
        row, message_id, role = found
        connection.execute(
            "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)"
            " SELECT name, id, (now() AT TIME ZONE 'UTC')::date"
            " FROM unnest(ARRAY['billing', 'mail', 'other'], %s::uuid[]) AS applied (name, id)",
            [[message_id, id_of_writer(message_id, role), id_of_writer(message_id, "another")]],
        )
        connection.execute(
            "INSERT INTO outbox.dead_letter_audit (command, queue, done_by, why, message_id)"
            " VALUES ('discard', 'q.dead', 'ada', 'a poison message', %s)",
            [str(message_id)],
        )
    listed = await client.get("/messages", params={"id": str(row)})
    page = await client.get(CELL.findall(listed.text)[0][0])

    for words in ("applied by billing", "applied by mail", "dead-letters discard, by ada", "a poison message"):
        assert words in page.text
    assert "applied by other" not in page.text


async def test_what_a_message_says_is_hidden_until_revealed_and_each_reveal_is_audited(
    settings: Settings, database_url: str, tmp_path: Path
) -> None:
    row = parked(database_url, "a secret", headers={"tenant": "acme"})
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        hidden = await client.get(f"/messages/{row}")
        shown = await post(client, f"/messages/{row}/reveal", {"at": "", "why": "a complaint"})

    assert "acme" not in hidden.text
    assert "{&#34;note&#34;" not in hidden.text
    assert "acme" in shown.text
    assert "note" in shown.text
    with psycopg.connect(database_url) as connection:
        audited = connection.execute("SELECT done_by, command, target, why FROM outbox.operator_audit").fetchall()
    assert audited == [("operator", "message reveal", str(row), "a complaint")]


async def test_a_viewer_is_shown_no_way_to_reveal(settings: Settings, database_url: str, tmp_path: Path) -> None:
    row = parked(database_url, "a secret")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get(f"/messages/{row}")

    assert "/reveal" not in page.text


async def test_hostile_texts_are_shown_and_not_run(client: httpx.AsyncClient, database_url: str) -> None:
    row = parked(database_url, HOSTILE, headers={HOSTILE: HOSTILE})
    listed = await client.get("/messages", params={"state": "parked"})
    page = await client.get(f"/messages/{row}")
    shown = await post(client, f"/messages/{row}/reveal", {"why": HOSTILE})
    asked = await client.get("/messages", params={"key": HOSTILE, "type": HOSTILE, "event": HOSTILE})

    for answer in (listed, page, shown, asked):
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
        assert '" onload' not in answer.text
        assert str(7777 * 7777) not in answer.text
    assert "&lt;script&gt;" in listed.text


PARAMETERS = ("state", "id", "type", "key", "event", "since", "until", "after", "at", "again", "next")
ODD = (
    "", "0", "-1", "9" * 30, "x", "\0", "\ud800", "é" * 500, "a" * 5000, "' OR 1=1 --", "%s", "{}", "2026-13-45",
    "0001-01-01", "9999-12-31T23:59:59.999999", "2026-11-26T08:30+23:59", "20261126.0.0", "00010101.1.1",
    "20261126.4294967294.65535", "99991231.0.1", str(2**63 - 1), str(uuid4()),
)  # fmt: skip


@pytest.mark.parametrize("parameter", PARAMETERS)
async def test_no_parameter_makes_a_page_fail(client: httpx.AsyncClient, database_url: str, parameter: str) -> None:
    sent(database_url, 5)
    for value in ODD:
        encoded = value.encode("utf-8", "surrogatepass")
        for path in ("/messages", "/messages/1", "/", "/nodes", "/login"):
            for state in ("sent", "parked", "pending"):
                query = httpx.QueryParams({"state": state}) if parameter != "state" else httpx.QueryParams()
                text = "&".join(
                    filter(None, [str(query), f"{parameter}={''.join(f'%{byte:02X}' for byte in encoded)}"])
                )
                answer = await client.get(f"{path}?{text}")
                assert answer.status_code < 500, (path, parameter, value, answer.text)
                if path != "/messages":
                    break
