"""An owner edits a parked message in a form, sees what changed, and sends it as a new one."""

import html
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from relay.config.settings import Settings
from relay.operate.operation import Role
from tests.console.site import browser, log_in, post, running, users
from tests.operate.rows import Rows

FIELD = re.compile(
    r'<(?:textarea|input type="hidden") name="(\w+)"[^>]*?(?:value="([^"]*)">|>\n(.*?)</textarea>)', re.DOTALL
)
AUDIT = "SELECT command, why FROM outbox.operator_audit ORDER BY id"


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written


def form_of(page: httpx.Response) -> dict[str, str]:
    """Return what a browser would send of the page's form, apart from its button."""
    fields = page.text.partition('class="stack"')[2]
    return {name: html.unescape(value or text) for name, value, text in FIELD.findall(fields)}


async def test_an_edit_is_reviewed_and_sent_once(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked(payload='{"amount":100,"currency":"EUR"}', headers='{"tenant":"acme"}')
    behind = rows.parked(behind=row)
    path = f"/messages/{row}/edit"
    opened = await post(client, path, {"why": "a wrong amount"})
    form = form_of(opened)
    changed = {**form, "payload": form["payload"].replace("100", "10"), "act": "review"}
    reviewed = await post(client, path, {name: text.replace("\n", "\r\n") for name, text in changed.items()})
    last = {**form_of(reviewed), "why": "a wrong amount", "old": "discard", "act": "send"}
    done = await post(client, path, last)
    again = await post(client, path, last)
    page = await client.get(done.headers["Location"])
    old = await client.get(f"/messages/{row}")

    assert form["payload"] == '{\n  "amount": 100,\n  "currency": "EUR"\n}'
    assert "<del>-  &#34;amount&#34;: 100,</del>" in reviewed.text
    assert "<ins>+  &#34;amount&#34;: 10,</ins>" in reviewed.text
    assert "<h2>Headers</h2>" not in reviewed.text
    assert "The row of its key that waits behind it goes out now" in reviewed.text
    assert "an edited copy" in page.text
    assert f'href="{done.headers["Location"]}">sent as this message' in old.text
    assert again.status_code == 422
    states = rows.states()
    assert (states[row], states[behind], len(states)) == (("discarded", None), ("pending", None), 3)
    assert rows.connection.execute(AUDIT).fetchall() == [
        (command, "a wrong amount") for command in ("message reveal", "parked edit", "parked discard")
    ]


@pytest.mark.parametrize("act", ["review", "send"])
@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("payload", '{"amount": 1,}', "The payload is not JSON"),
        ("headers", '{"tenant": ', "the headers are not JSON"),
        ("headers", "[]", "the headers are a JSON object"),
    ],
)
async def test_what_cannot_be_sent_is_told_at_its_field_and_what_was_typed_stays(
    client: httpx.AsyncClient, rows: Rows, act: str, field: str, text: str, words: str
) -> None:
    row = rows.parked(payload='{"amount": 1}', headers='{"tenant": "acme"}')
    form = form_of(await post(client, f"/messages/{row}/edit", {}))

    refused = await post(client, f"/messages/{row}/edit", {**form, field: text, "act": act, "why": "x"})

    assert refused.status_code == 422
    assert words in refused.text
    assert re.search(rf'name="{field}"[^>]*aria-invalid="true" aria-describedby="{field}-problem"', refused.text)
    assert form_of(refused)[field] == text
    assert rows.states() == {row: ("parked", None)}


async def test_an_edit_that_changes_nothing_is_not_sent(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked(payload='{"amount":1}')
    form = form_of(await post(client, f"/messages/{row}/edit", {}))

    blanks = await post(
        client, f"/messages/{row}/edit", {**form, "payload": '{ "amount" : 1 }', "act": "send", "why": "x"}
    )
    silent = await post(client, f"/messages/{row}/edit", {**form, "payload": "[]", "act": "send", "why": " "})

    assert (blanks.status_code, silent.status_code) == (422, 422)
    assert "nothing is edited" in blanks.text
    assert "say why" in silent.text
    assert rows.states() == {row: ("parked", None)}


async def test_a_payload_for_no_form_is_left_to_the_command_and_its_headers_are_edited(
    client: httpx.AsyncClient, rows: Rows
) -> None:
    binary = rows.parked(payload=None, payload_bytes=b"\x00\x01", headers='{"n": 1}')
    long = rows.parked("2", payload='"' + "x" * 300_000 + '"')
    opened = await post(client, f"/messages/{binary}/edit", {})
    also = await post(client, f"/messages/{long}/edit", {})
    last = {**form_of(opened), "headers": '{"n": 2}', "act": "send", "why": "x"}
    done = await post(client, f"/messages/{binary}/edit", last)

    assert "relay parked edit" in opened.text
    assert "relay parked edit" in also.text
    assert "payload" not in form_of(opened)
    assert done.status_code == 303
    copy = rows.connection.execute("SELECT headers ->> 'n', payload_bytes FROM outbox.message WHERE state = 'pending'")
    assert copy.fetchall() == [("2", b"\x00\x01")]


async def test_text_keeps_the_ends_of_its_lines(client: httpx.AsyncClient, rows: Rows) -> None:
    row = rows.parked(payload=None, payload_bytes=b"\r\na;1\r\nb;2\r\n", content_type="text/csv")
    form = form_of(await post(client, f"/messages/{row}/edit", {}))
    typed = form["payload"].replace("\r\n", "\n")

    same = await post(client, f"/messages/{row}/edit", {**form, "payload": typed, "act": "review"})
    last = {**form, "payload": typed.replace("2", "3"), "act": "send", "why": "x"}
    done = await post(client, f"/messages/{row}/edit", last)

    assert "nothing is edited" in same.text
    assert done.status_code == 303
    (copy,) = rows.connection.execute("SELECT payload_bytes FROM outbox.message WHERE state = 'pending'")
    assert copy == (b"\r\na;1\r\nb;3\r\n",)


async def test_a_row_that_is_not_parked_is_not_edited(settings: Settings, rows: Rows, tmp_path: Path) -> None:
    row = rows.pending()
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        refused = await post(client, f"/messages/{row}/edit", {})

    assert refused.status_code == 422
    assert "cannot be edited: it is pending" in refused.text
