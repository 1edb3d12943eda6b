"""A message's page follows its row, offers what can be done with it, and shows what it says as text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest

from relay.config.settings import Settings
from relay.console.forms import new_token
from relay.operate.operation import Role
from tests.console.rows import parked, sent
from tests.console.site import browser, log_in, post, running, users
from tests.operate.held import held
from tests.operate.rows import Rows
from tests.support.eventually import eventually

POLL = re.compile(r'hx-get="([^"]*)"')
HOSTILE = "<script>alert('x')</script>\u202e"


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written


def message_id(rows: Rows, row: int) -> UUID:
    ((found,),) = rows.connection.execute("SELECT message_id FROM outbox.message WHERE id = %s", [row]).fetchall()
    return UUID(str(found))


def poll(page: httpx.Response) -> str:
    """Return what an open page asks for next."""
    found = POLL.search(page.text)
    assert found is not None
    return found[1].replace("&amp;", "&")


@pytest.mark.parametrize("state", ["pending", "parked", "quarantined", "archived", "discarded", "sent"])
@pytest.mark.parametrize("named", ["id", "message id"])
async def test_a_message_has_one_address_in_every_state(
    client: httpx.AsyncClient, rows: Rows, state: str, named: str
) -> None:
    row = rows.pending()
    change = "UPDATE outbox.message SET state = %s, sent_at = CASE %s WHEN 'sent' THEN now() END WHERE id = %s"
    rows.connection.execute(change, [state, state, row])

    page = await client.get(f"/messages/{row if named == 'id' else message_id(rows, row)}")

    assert page.status_code == 200
    assert f'<span class="tag {state}">{state}</span>' in page.text
    assert f'href="/messages/{message_id(rows, row)}' in page.text


async def test_an_open_page_follows_the_row_through_retry_and_sending(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked()
    page = await client.get(f"/messages/{message_id(rows, row)}")
    same = await client.get(poll(page))
    rows.connection.execute("UPDATE outbox.message SET state = 'pending', last_error = NULL WHERE id = %s", [row])
    going = await client.get(poll(page))
    rows.connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = %s", [row])
    gone = await client.get(poll(going))
    again = await client.get(poll(gone))

    assert (same.status_code, same.text) == (204, "")
    assert 'hx-swap-oob="innerHTML:#part-head"' in going.text
    assert 'class="tag pending"' in going.text
    assert "confirmed by the broker" in gone.text
    assert re.search(r"at=\d{8}\.\d+\.\d+", poll(gone))
    assert again.status_code == 204


async def test_only_the_parts_that_changed_are_sent(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked()
    page = await client.get(f"/messages/{row}")
    rows.connection.execute(
        "INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('message reveal', %s, 'bob')", [str(row)]
    )

    changed = await client.get(poll(page))

    assert re.findall(r"#part-(\w+)", changed.text) == ["way"]
    assert "message reveal, by bob" in changed.text


async def test_a_place_that_is_out_of_date_does_no_harm(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked()

    page = await client.get(f"/messages/{message_id(rows, row)}", params={"at": "20261129.3.4"})

    assert page.status_code == 200


async def test_a_message_without_a_row_says_so_and_who_holds_it(client: httpx.AsyncClient, rows: Rows) -> None:
    lost = uuid4()
    held(rows.connection, consumer="mail", error="the post office is closed")
    rows.connection.execute("UPDATE outbox.held_message SET message_id = %s", [lost])

    page = await client.get(f"/messages/{lost}")
    nowhere = await client.get(f"/messages/{uuid4()}")
    nonsense = await client.get("/messages/beef")

    assert (page.status_code, nowhere.status_code, nonsense.status_code) == (404, 404, 422)
    assert "held by mail after 3 tries" in page.text
    assert 'href="/failures/' in page.text
    assert "No row of the outbox has this id" in nowhere.text


async def test_rows_that_share_a_message_id_lead_to_each_other(client: httpx.AsyncClient, rows: Rows) -> None:
    shared = uuid4()
    first, second = rows.parked("1", message_id=shared), rows.parked("2", message_id=shared)

    page = await client.get(f"/messages/{shared}")
    other = await client.get(f"/messages/{second}")

    assert f"<dd>{first}</dd>" in page.text
    assert f'<a href="/messages/{second}">{second}</a>' in page.text
    assert f"<dd>{second}</dd>" in other.text


async def test_a_row_has_links_to_its_group_its_key_and_what_it_waits_for(
    client: httpx.AsyncClient, rows: Rows
) -> None:
    head = rows.parked("7 & 8")
    behind = rows.parked("7 & 8", behind=head)
    first, second = [await client.get(f"/messages/{row}") for row in (head, behind)]
    ((group,),) = rows.connection.execute("SELECT failure FROM outbox.parked_failure WHERE id = %s", [head]).fetchall()
    key = re.search(r'href="(/messages\?[^"]*)">All messages of its key', first.text)
    assert key is not None
    listed = await client.get(key[1].replace("&amp;", "&"))

    assert f'href="/failures/{group}"' in first.text
    assert (await client.get(f"/failures/{group}")).status_code == 200
    assert str(message_id(rows, head)) in listed.text
    assert str(message_id(rows, behind)) in listed.text
    assert f'<a href="/messages/{head}">' in second.text
    assert ">Retry</button>" in first.text
    assert ">Retry</button>" not in second.text
    assert 'href="/failures/' not in second.text


async def test_one_row_is_retried_and_the_page_follows_it(client: httpx.AsyncClient, rows: Rows) -> None:
    row, other = rows.parked("1"), rows.parked("2")
    done = await post(client, f"/messages/{row}/jobs", {"kind": "retry", "why": "the queue is back"})
    address = done.headers["Location"]

    async def is_pending() -> bool:
        return 'class="tag pending"' in (await client.get(address)).text

    await eventually(is_pending, "the row waits to be sent")
    page = await client.get(address)
    again = await post(client, f"/messages/{row}/jobs", {"kind": "retry"})

    assert (done.status_code, address) == (303, f"/messages/{message_id(rows, row)}")
    assert rows.states()[other] == ("parked", None)
    assert "the queue is back" in page.text
    assert 'href="/jobs/1"' in page.text
    assert again.status_code == 422
    assert "it is pending" in again.text


async def test_a_discard_of_one_row_asks_first(client: httpx.AsyncClient, rows: Rows) -> None:
    head = rows.parked()
    behind = rows.parked(behind=head)

    asked = await post(client, f"/messages/{head}/jobs", {"kind": "discard", "why": "test data"})
    asks = await client.get(asked.headers["Location"])
    refused = await post(client, f"/messages/{behind}/jobs", {"kind": "discard", "why": "test data"})

    assert asked.status_code == 303
    assert "Discard 1 row?" in asks.text
    assert 'value="test data"' in asks.text
    assert rows.states()[head] == ("parked", None)
    assert refused.status_code == 422
    assert f"it is parked behind {head}" in refused.text


async def test_a_form_over_one_row_that_is_sent_twice_makes_one_job(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked()
    sent = {"kind": "retry", "page": f"/messages/{row}", "form": "jobs", "once": new_token()}

    done = [await post(client, f"/messages/{row}/jobs", sent) for _ in range(2)]

    assert [each.status_code for each in done] == [303, 303]
    assert rows.connection.execute("SELECT count(*) FROM outbox.job").fetchall() == [(1,)]


async def test_what_a_role_may_do_is_offered_and_nothing_else(settings: Settings, rows: Rows, tmp_path: Path) -> None:
    row = rows.parked()
    offered = {}
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        for role in Role:
            await log_in(client, role)
            page = await client.get(f"/messages/{row}")
            offered[role] = re.findall(r"<button[^>]*>([^<]+)</button>", page.text.partition("<main")[2])
        await log_in(client, Role.OPERATOR)
        refused = [
            await post(client, f"/messages/{row}/jobs", {"kind": "discard", "why": "x"}),
            await post(client, f"/messages/{row}/edit", {}),
        ]

    assert offered[Role.VIEWER] == []
    assert offered[Role.OPERATOR] == ["Retry", "Archive", "Reveal", "Download the payload"]
    assert offered[Role.OWNER] == [
        "Retry", "Archive", "Discard", "Edit and send again", "Reveal", "Download the payload",
    ]  # fmt: skip
    assert [each.status_code for each in refused] == [403, 403]
    assert rows.states() == {row: ("parked", None)}


async def test_a_payload_is_shown_whole_indented_and_as_text(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked(payload=json.dumps({"lines": ["x" * 300_000], "note": HOSTILE}), headers=json.dumps({"n": 1}))

    page = await post(client, f"/messages/{row}/reveal", {})

    assert "x" * 300_000 in page.text
    assert "\n  &#34;note&#34;: &#34;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;\\u202e&#34;" in page.text
    assert "{\n  &#34;n&#34;: 1\n}" in page.text
    assert 'data-copies="payload" hidden' in page.text


async def test_bytes_are_shown_as_hex(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked(payload=None, payload_bytes=b"\x00\xff<b>")

    page = await post(client, f"/messages/{row}/reveal", {})

    assert "00000000  00 ff 3c 62 3e" in page.text
    assert "..&lt;b&gt;" in page.text


@pytest.mark.parametrize(
    ("columns", "kind", "ending", "body"),
    [
        ({"payload": '{"a":"<script>"}'}, "application/json", "json", b'{"a":"<script>"}'),
        ({"payload": None, "payload_bytes": b"<html>\0"}, "application/octet-stream", "bin", b"<html>\0"),
        (
            {"payload": None, "payload_bytes": b"<html>", "content_type": "text/html"},
            "application/octet-stream", "bin", b"<html>",
        ),
    ],
)  # fmt: skip
async def test_a_payload_is_downloaded_byte_for_byte_and_never_drawn(
    client: httpx.AsyncClient, rows: Rows, columns: dict[str, Any], kind: str, ending: str, body: bytes
) -> None:
    row = rows.parked(**columns)

    file = await post(client, f"/messages/{row}/download", {"why": "a ticket"})

    assert file.content == body
    assert file.headers["Content-Type"] == kind
    assert file.headers["Content-Disposition"] == f'attachment; filename="message-{message_id(rows, row)}.{ending}"'
    assert file.headers["X-Content-Type-Options"] == "nosniff"
    audit = "SELECT command, target, why FROM outbox.operator_audit"
    assert rows.connection.execute(audit).fetchall() == [("message reveal", str(row), "a ticket")]


async def test_what_was_done_with_a_job_of_the_same_number_is_on_no_messages_way(
    client: httpx.AsyncClient, database_url: str
) -> None:
    row = parked(database_url, "x")
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('jobs cancel', %s, 'ada')", [str(row)]
        )

    assert "jobs cancel" not in (await client.get(f"/messages/{row}")).text


async def test_a_search_of_sent_rows_that_takes_long_goes_on_when_asked(
    client: httpx.AsyncClient, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.operate.messages.look.BLOCKS", 2)
    monkeypatch.setattr("relay.operate.messages.look.STEP", 2)
    monkeypatch.setattr("relay.operate.messages.message.LOOK_FOR", -1.0)
    sent(database_url, 1_000)
    with psycopg.connect(database_url) as connection:
        (oldest,) = connection.execute("SELECT message_id FROM outbox.message ORDER BY ctid LIMIT 1").fetchone() or (0,)

    page, asked = await client.get(f"/messages/{oldest}"), 0
    while page.status_code == 404 and asked < 50:
        found = re.search(r'href="(/messages/[^"]*after=[^"]*)"', page.text)
        assert found is not None, page.text
        page, asked = await client.get(found[1].replace("&amp;", "&")), asked + 1

    assert page.status_code == 200
    assert asked > 1
