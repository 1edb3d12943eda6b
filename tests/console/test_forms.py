"""A form that cannot be done comes back with what was typed; a form that is sent twice makes one job."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from relay.config.settings import Settings
from relay.console import forms
from relay.console.templates import FOLDER
from relay.operate.operation import Role
from tests.console.rows import parked
from tests.console.site import browser, log_in, post, running, users
from tests.operate.rows import Rows

LONG = "because the ledger of the third quarter is closed and nobody may write to it"
# Forms that are not sent again: a login, which is the whole page; a logout; an edit, whose page brings it back itself.
WITHOUT = {"login.html": 1, "base.html": 1, "message_edit.html": 1}
TOKEN = re.compile(r'name="once" value="([^"]+)"')


@pytest.fixture
async def group(client: httpx.AsyncClient, database_url: str) -> str:
    """The path of a failure group with one row."""
    parked(database_url, "the broker says no")
    (found,) = {*re.findall(r'href="(/failures/[0-9a-f]{12})"', (await client.get("/failures")).text)}
    return str(found)


def filled(page: str, name: str, **fields: str) -> dict[str, str]:
    """Return a form as a browser sends it."""
    return {"page": page, "form": name, **fields}


def field(page: str, id_: str) -> str:
    """Return the element of this id."""
    (found,) = re.findall(rf'<input [^>]*id="{id_}"[^>]*>', page)
    return str(found)


def jobs(database_url: str) -> list[tuple[int, str]]:
    with Rows(database_url).connection as connection:
        return connection.execute("SELECT id, kind FROM outbox.job ORDER BY id").fetchall()


def test_every_form_of_the_console_can_come_back() -> None:
    for template in FOLDER.glob("*.html"):
        text = template.read_text()
        sent = len(re.findall(r'<form method="post"', text)) - WITHOUT.get(template.name, 0)
        assert text.count("fields.head(") == sent, template.name


def test_every_text_that_is_sent_keeps_what_was_typed() -> None:
    for template in FOLDER.glob("*.html"):
        for form in re.findall(r'<form method="post".*?</form>', template.read_text(), re.DOTALL):
            typed = re.findall(r'<input (?![^>]*type="(?:hidden|checkbox)")[^>]*>', form)
            assert all('value="' in each or 'type="password"' in each for each in typed), template.name


async def test_a_missing_field_is_told_next_to_it_and_what_was_typed_stays(
    client: httpx.AsyncClient, database_url: str
) -> None:
    page = (
        await post(client, "/routes/pause", filled("/routes", "pause", exchange="<b>", routing_key="paid", why=" "))
    ).text
    other = await post(client, "/routes/lanes/pause", filled("/routes", "pause-lane", lane="7", why=""))

    why = field(page, "pause-why")
    assert 'aria-invalid="true" aria-describedby="pause-why-error" autofocus' in why
    assert '<p class="error" id="pause-why-error">say why: the audit keeps it' in page
    assert 'value="&lt;b&gt;"' in field(page, "pause-exchange")
    assert 'value="paid"' in field(page, "pause-routing_key")
    assert "aria-invalid" not in field(page, "pause-lane-why")  # another form of the page
    assert page.count("autofocus") == 1
    assert "<title>Not done: Routes" in page
    assert other.status_code == 422
    assert "<option selected>7</option>" in other.text


async def test_a_field_that_nobody_types_is_told_above_the_form(client: httpx.AsyncClient) -> None:
    sent = filled("/routes", "pause-lane", lane="99", why=LONG)

    answer = await post(client, "/routes/lanes/pause", sent)

    assert answer.status_code == 422
    assert 'role="alert" tabindex="-1" autofocus>Input should be less than 16</p>' in answer.text
    assert f'value="{LONG}"' in field(answer.text, "pause-lane-why")


async def test_ticks_and_texts_of_a_part_stay(client: httpx.AsyncClient, group: str, database_url: str) -> None:
    await client.get(group)
    sent = filled(group, "part", kind="archive", part="true", id="1", type="order", why="")

    answer = await post(client, f"{group}/jobs", sent)

    assert answer.status_code == 422
    assert 'name="id" value="1" checked' in answer.text
    assert 'value="order"' in field(answer.text, "part-type")
    assert "say why: the audit keeps it" in answer.text
    assert jobs(database_url) == []


async def test_a_bad_rate_of_a_replay_is_told_and_the_rest_stays(client: httpx.AsyncClient, database_url: str) -> None:
    with Rows(database_url).connection as connection:
        connection.execute(
            "INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)"
            " VALUES ('order', 'Paid', '1', 'sent', now() - interval '1 minute')"
        )
    page = "/replay?type=order&since=1h"
    sent = filled(page, "order", type="order", since="1h", rate="fast", why=LONG, trace="keep")

    answer = await post(client, "/replay", sent)

    assert answer.status_code == 422
    assert 'value="fast"' in (rate := field(answer.text, "order-rate"))
    assert 'aria-invalid="true"' in rate
    assert f'value="{LONG}"' in field(answer.text, "order-why")
    assert '<option value="keep" selected>' in answer.text
    assert 'name="staged" value="true">' in answer.text  # it was not ticked


async def test_a_bad_filter_is_told_next_to_it(client: httpx.AsyncClient) -> None:
    replay = await client.get("/replay", params={"type": "order", "since": "yesterday"})
    interval = await client.get("/replay", params={"since": "1h", "until": "2h"})
    reconcile = await client.get("/reconcile", params={"since": "1d", "until": "soon", "key": "7"})

    assert [each.status_code for each in (replay, interval, reconcile)] == [422, 422, 422]
    assert 'aria-invalid="true"' in field(replay.text, "filters-since")
    assert 'value="order"' in field(replay.text, "filters-type")
    assert "is not before" in interval.text
    assert 'aria-invalid="true"' in field(reconcile.text, "filters-until")
    assert 'value="7"' in field(reconcile.text, "filters-key")


async def test_a_form_that_its_page_has_no_more_shows_what_was_sent(client: httpx.AsyncClient) -> None:
    gone = await post(client, "/jobs/7/cancel", filled("/jobs/7", "turn", why=LONG))
    elsewhere = await post(client, "/routes/9/discard", filled("/routes", "discard-9", why=LONG))

    assert [gone.status_code, elsewhere.status_code] == [404, 404]
    assert all(f"<dt>why</dt><dd>{LONG}</dd>" in each.text for each in (gone, elsewhere))


async def test_a_session_that_is_over_shows_what_was_sent_and_a_password_never(
    settings: Settings, tmp_path: Path
) -> None:
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OWNER)
        app.state.site.access.sessions.end(client.cookies.get("__Host-relay"))
        over = await post(client, "/routes/pause", filled("/routes", "pause", routing_key="paid", why=LONG))
        wrong = await log_in(client, "ada", "correct horse")

    assert over.status_code == 401
    assert f"<dt>why</dt><dd>{LONG}</dd>" in over.text
    assert 'value="ada"' in wrong.text
    assert "correct horse" not in wrong.text


@pytest.mark.parametrize("origin", ["https://evil.test", None])
async def test_what_another_site_has_sent_is_not_shown(client: httpx.AsyncClient, origin: str | None) -> None:
    headers = {"Origin": origin} if origin else {}

    answer = await client.post("/routes/pause", data=filled("/routes", "pause", why=LONG), headers=headers)

    assert answer.status_code == 403
    assert LONG not in answer.text


@pytest.mark.parametrize("page", ["https://evil.test/", "//evil.test", "/api/v1/status", "/live", "", "/nowhere"])
async def test_a_form_comes_back_on_a_page_of_this_console_alone(client: httpx.AsyncClient, page: str) -> None:
    answer = await post(client, "/routes/pause", filled(page, "pause", routing_key="paid", why=""))

    assert answer.status_code in (422, 404)
    assert "<dd>paid</dd>" in answer.text


async def token_of(client: httpx.AsyncClient, path: str) -> str:
    """Open a page, and return the token of its first form."""
    found = TOKEN.findall((await client.get(path)).text)
    return str(found[0])


async def test_a_form_that_is_sent_twice_makes_one_job(
    client: httpx.AsyncClient, group: str, database_url: str
) -> None:
    asks = f"{group}/discard"
    sent = filled(asks, "discard", once=await token_of(client, asks), why=LONG)

    twice = await asyncio.gather(*[post(client, asks, sent) for _ in range(4)])
    later = await post(client, asks, sent)

    assert {(each.status_code, each.headers["Location"]) for each in (*twice, later)} == {(303, "/jobs/1")}
    assert jobs(database_url) == [(1, "discard")]


async def test_a_job_that_is_ended_twice_by_one_form_is_ended(
    client: httpx.AsyncClient, group: str, database_url: str
) -> None:
    await post(client, f"{group}/jobs", {"kind": "retry", "staged": "true"})
    sent = filled("/jobs/1", "turn", once=forms.new_token(), why=LONG)

    twice = [await post(client, "/jobs/1/cancel", sent) for _ in range(2)]
    another = await post(client, "/jobs/1/cancel", {**sent, "once": forms.new_token()})

    assert [each.status_code for each in twice] == [303, 303]
    assert another.status_code == 422


async def test_two_tabs_with_the_same_form_make_two_jobs(
    client: httpx.AsyncClient, group: str, database_url: str
) -> None:
    tokens = [await token_of(client, group) for _ in range(2)]
    for once in tokens:
        await post(client, f"{group}/jobs", filled(group, "all", once=once, kind="retry", why=LONG))

    assert jobs(database_url) == [(1, "retry"), (2, "retry")]


async def test_a_form_that_was_sent_and_then_changed_says_so_and_keeps_the_change(
    client: httpx.AsyncClient, group: str, database_url: str
) -> None:
    sent = filled(group, "all", once=await token_of(client, group), kind="retry", why="one")
    await post(client, f"{group}/jobs", sent)
    parked(database_url, "the broker says no")

    changed = await post(client, f"{group}/jobs", {**sent, "why": LONG})
    (again, *_) = TOKEN.findall(changed.text)
    done = await post(client, f"{group}/jobs", {**sent, "why": LONG, "once": again})

    assert changed.status_code == 409
    assert "this form has made job 1 before it was changed" in changed.text
    assert f'value="{LONG}"' in field(changed.text, "all-why")
    assert done.headers["Location"] == "/jobs/2"


async def test_a_form_that_was_refused_can_be_sent_again(
    client: httpx.AsyncClient, group: str, database_url: str
) -> None:
    sent = filled(f"{group}/discard", "discard", once=await token_of(client, group), why="")

    refused = await post(client, f"{group}/discard", sent)
    done = await post(client, f"{group}/discard", {**sent, "why": LONG})

    assert (refused.status_code, done.status_code) == (422, 303)
    assert jobs(database_url) == [(1, "discard")]


@pytest.mark.parametrize("age", [timedelta(days=2), -timedelta(days=2), None], ids=["old", "to come", "no token"])
async def test_a_form_of_long_ago_makes_no_job(
    client: httpx.AsyncClient, group: str, database_url: str, age: timedelta | None
) -> None:
    moment = "x" if age is None else f"{(datetime.now(UTC) - age).timestamp():.0f}"
    once = f"{moment}.{forms.new_token().partition('.')[2]}"
    sent = filled(group, "all", once=once, kind="retry", why=LONG)

    answer = await post(client, f"{group}/jobs", sent)

    assert answer.status_code == 422
    assert "this page was opened long ago" in answer.text
    assert f'value="{LONG}"' in field(answer.text, "all-why")
    assert jobs(database_url) == []
