"""Dead letters are looked at when an operator asks, grouped by cause, and a whole group is sent back or thrown away."""

import re
from pathlib import Path
from urllib.parse import parse_qsl

import httpx
import pytest
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console import looks
from relay.console.looks import Look, Looks
from relay.operate.letters.queue import MOST_RETURNS
from relay.operate.operation import Role
from tests.console.groups import group_page
from tests.console.rows import waiting
from tests.console.site import browser, log_in, post, running, users
from tests.consume.conftest import queue
from tests.dead_letters.changes import Audit
from tests.dead_letters.conftest import audit, letters
from tests.dead_letters.letters import DEAD, Letters
from tests.dead_letters.tried import LATER, consuming
from tests.operate.held import held
from tests.operate.rows import Rows
from tests.support.eventually import eventually

__all__ = ["audit", "letters", "queue"]  # fixtures

HOSTILE = "<script>alert('x')</script> \" onload=alert(1) {{ 7 * 7 }}"


async def looked(app: FastAPI, client: httpx.AsyncClient, name: str = DEAD) -> tuple[Look, httpx.Response]:
    """Press the button, and return what the look saw, and the page."""
    done = await post(client, "/failures/looks", {"queue": name})
    assert done.status_code == 303, done.text
    found: Looks = app.state.site.looks
    await eventually(lambda: name not in found.running, "the console has looked")
    return found.latest[name], await client.get(done.headers["Location"])


async def job_of(client: httpx.AsyncClient, ordered: httpx.Response, *, state: str = "done") -> str:
    """Return the page of the job that was ordered once it is in this state."""
    assert ordered.status_code == 303, ordered.text
    page = ""

    async def is_so() -> bool:
        nonlocal page
        page = (await client.get(ordered.headers["Location"])).text
        return f'">{state}</span>' in page

    await eventually(is_so, f"the job is {state}")
    return page


async def test_a_group_is_found_and_sent_back(
    settings: Settings, tmp_path: Path, letters: Letters, audit: Audit
) -> None:
    sent = [await letters.put(number, exception="OutOfPaper") for number in range(3)]
    other = await letters.put(9, exception="OutOfInk", body=b'{"card": "a secret"}')
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        look, listed = await looked(app, client)
        (group,) = [each for each in look.groups if "OutOfPaper" in each.cause]
        page = await client.get(f"/failures/{group.id}")
        form = {"queue": DEAD, "kind": "retry", "why": "paper is here"}
        done = await job_of(client, await post(client, f"/failures/{group.id}/jobs", form))

    assert (look.letters, look.read, group.count) == (4, 4, 3)
    assert "s ago" in listed.text
    assert all(f"/failures/{each.id}" in listed.text for each in look.groups)
    assert all(message_id in page.text for message_id in sent)
    assert "counter/a" in page.text
    assert "a secret" not in listed.text + page.text
    assert "Discard all" not in page.text  # it takes the owner
    assert "3 of 3" in done
    assert [each.message_id for each in await letters.consumed()] == sent
    assert await letters.ids() == [other]
    assert {(row["done_by"], row["why"]) for row in audit.execute("SELECT * FROM outbox.dead_letter_audit")} == {
        ("operator", "paper is here")
    }


async def test_a_group_is_sent_back_in_stages(
    settings: Settings, tmp_path: Path, letters: Letters, audit: Audit
) -> None:
    await letters.put_all(3)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        look, _ = await looked(app, client)
        page = await client.get(f"/failures/{look.groups[0].id}")
        form = {"queue": DEAD, "kind": "retry", "why": "paper is here", "staged": "true"}
        async with consuming(letters, audit, fails=lambda _: True) as tried:
            ordered = await post(client, f"/failures/{look.groups[0].id}/jobs", form)
            paused = await job_of(client, ordered, state="paused")

    assert 'name="staged" value="true" checked' in page.text
    assert "letters that failed while a stage of 1 was tried: 1, or 100%, and at most 5% may" in paused
    assert tried.ids == ["id-0"]


async def test_the_page_of_a_job_lists_the_letters_that_failed_again(
    settings: Settings, tmp_path: Path, letters: Letters
) -> None:
    sent = await letters.put_all(3)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        look, _ = await looked(app, client)
        ordered = await post(
            client, f"/failures/{look.groups[0].id}/jobs", {"queue": DEAD, "kind": "retry", "why": "paper is here"}
        )
        done = await job_of(client, ordered)
        found: Looks = app.state.site.looks
        await eventually(lambda: DEAD not in found.running and found.latest[DEAD] is not look, "it looks again")
        await letters.put(message_id=sent[1], failed_at=LATER)
        await letters.put(message_id="another", failed_at=LATER)
        asked = await post(client, "/jobs/1/look", {})
        await eventually(lambda: DEAD not in found.running, "the console has looked")
        page = await client.get(asked.headers["Location"])

    assert "not watched" in done
    assert "3 of 3" in done
    assert found.latest[DEAD].letters == 2
    assert re.search(rf"1 letter\s+that this job sent back is in {DEAD} again", page.text)
    assert re.findall(r"/messages\?id=([\w-]+)", page.text) == [sent[1]]


@pytest.mark.parametrize("chosen", ["ticked", "by a key"])
async def test_a_part_of_a_group_is_sent_back(
    settings: Settings, tmp_path: Path, letters: Letters, chosen: str
) -> None:
    first, other = await letters.put(1, key="a"), await letters.put(2, key="b")
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        look, _ = await looked(app, client)
        page = await client.get(f"/failures/{look.groups[0].id}")
        form = {"queue": DEAD, "kind": "retry", "why": "paper is here", "part": "true"}
        part = {"id": first} if chosen == "ticked" else {"type": "counter", "key": "a"}
        done = await job_of(client, await post(client, f"/failures/{look.groups[0].id}/jobs", {**form, **part}))

    assert f'value="{first}" aria-label="Choose {first}"' in page.text
    assert "1 of 1" in done
    assert [each.message_id for each in await letters.consumed()] == [first]
    assert await letters.ids() == [other]


async def test_a_dead_letter_that_was_seen_is_part_of_its_messages_way(
    settings: Settings, letters: Letters, database_url: str
) -> None:
    waiting(database_url, "parked", 2)
    with Rows(database_url).connection as connection:
        rows = connection.execute("SELECT id, message_id::text FROM outbox.message_parked ORDER BY id").fetchall()
    await letters.put(message_id=rows[0][1], exception="OutOfPaper")
    async with running(settings) as app, browser(app) as client:
        before = await client.get(f"/messages/{rows[0][0]}")
        await looked(app, client)
        seen, other = [await client.get(f"/messages/{row}") for row, _ in rows]

    assert [f"in {DEAD}, when it was looked at" in page.text for page in (before, seen, other)] == [False, True, False]
    assert "OutOfPaper" in seen.text


async def test_the_letter_of_one_message_is_thrown_away_once_the_owner_has_been_asked(
    settings: Settings, letters: Letters, database_url: str
) -> None:
    waiting(database_url, "parked", 1)
    with Rows(database_url).connection as connection:
        ((row, message_id),) = connection.execute("SELECT id, message_id::text FROM outbox.message_parked").fetchall()
    await letters.put(message_id=message_id, exception="OutOfPaper")
    other = await letters.put(exception="OutOfPaper")
    async with running(settings) as app, browser(app) as client:
        await looked(app, client)
        form = {"queue": DEAD, "kind": "discard", "why": "test data"}
        asked = await post(client, f"/messages/{row}/letters", form)
        asks = await client.get(asked.headers["Location"])
        _, _, part = asked.headers["Location"].partition("?")
        sent = {**dict(parse_qsl(part)), "why": "test data"}
        elsewhere = await post(client, f"/messages/{row}/letters", {**form, "queue": "another.dead"})
        here_still = await letters.ids()
        await job_of(client, await post(client, asked.headers["Location"].partition("?")[0], sent))
        await eventually(lambda: letters.has(1), "it is gone")

    assert "Discard 1 letter?" in asks.text
    assert 'value="test data"' in asks.text
    assert other not in asks.text
    assert set(here_still) == {message_id, other}
    assert await letters.ids() == [other]
    assert elsewhere.status_code == 422
    assert "look at another.dead again" in elsewhere.text


async def test_an_owner_throws_a_group_away_and_says_why(settings: Settings, tmp_path: Path, letters: Letters) -> None:
    await letters.put(1)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.OPERATOR)
        look, _ = await looked(app, client)
        path = f"/failures/{look.groups[0].id}"
        form = {"queue": DEAD, "why": "test data"}
        refused = await post(client, f"{path}/discard", form)
        await log_in(client, Role.OWNER)
        asks = await client.get(f"{path}/discard?queue={DEAD}")
        without_reason = await post(client, f"{path}/discard", {**form, "why": " "})
        archived = await post(client, f"{path}/jobs", {**form, "kind": "archive"})
        await job_of(client, await post(client, f"{path}/discard", form))
        await eventually(lambda: letters.has(0), "it is gone")

    assert [each.status_code for each in (refused, without_reason, archived)] == [403, 422, 422]
    assert "Discard 1 letter?" in asks.text
    assert "do not come back" in asks.text
    assert await letters.consumed() == []


async def test_a_look_ends_after_so_many_letters_and_says_how_many_are_left(
    settings: Settings, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "MOST_LETTERS", 200)
    await letters.put_all(450)
    async with running(settings) as app, browser(app) as client:
        look, page = await looked(app, client)
        group = await client.get(f"/failures/{look.groups[0].id}")

    assert (look.letters, look.read) == (450, 200)
    assert re.search(r'<td class="number">250</td>', page.text)
    assert "in the first 200 of 450 letters" in group.text
    assert await letters.ids() == [f"id-{number}" for number in range(450)]  # in their places


async def test_a_long_queue_is_not_written_again_for_a_look(
    settings: Settings, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "MOST_LETTERS", 5)
    await letters.put_all(6)
    async with running(settings) as app, browser(app) as client:
        seen = [(await looked(app, client))[0] for _ in range(MOST_RETURNS)]
        refused, page = await looked(app, client)

    assert [(each.error, each.returns) for each in seen] == [(None, 1), (None, 2), (None, 3)]
    assert "another look would write 6 letters again" in (refused.error or "")
    assert refused.groups == seen[-1].groups
    assert "another look would write" in page.text
    assert await letters.waiting() == 6


async def test_no_page_reads_a_queue_and_a_viewer_begins_no_look(
    settings: Settings, tmp_path: Path, letters: Letters
) -> None:
    await letters.put(1)
    async with running(settings, **users(tmp_path)) as app, browser(app) as client:
        await log_in(client, Role.VIEWER)
        page = await client.get("/failures", params={"queue": "billing"})
        latest = dict(app.state.site.looks.latest)

    assert latest == {}
    assert app.state.site.looks.running == set()
    assert DEAD in page.text
    assert "/failures/looks" not in page.text


async def test_a_queue_has_one_look_at_a_time(settings: Settings, letters: Letters) -> None:
    async with running(settings) as app:
        found: Looks = app.state.site.looks
        for _ in range(3):
            found.begin(DEAD)
        assert found._wanted.qsize() == 1
        await eventually(lambda: not found.running, "the console has looked")


async def test_a_queue_that_is_not_there_is_told(settings: Settings) -> None:
    async with running(settings) as app, browser(app) as client:
        _, page = await looked(app, client, "nowhere.dead")

    assert "queue &#39;nowhere.dead&#39; does not exist" in page.text


@pytest.mark.parametrize("name", ["", "é", "x" * 201, "<b>"])
async def test_what_no_queue_is_called_is_refused(client: httpx.AsyncClient, name: str) -> None:
    shown = await client.get("/failures", params={"queue": name})
    asked = await post(client, "/failures/looks", {"queue": name})

    assert (shown.status_code, asked.status_code) == (422, 422)


async def test_hostile_letters_are_shown_and_not_run(settings: Settings, letters: Letters) -> None:
    await letters.put(1, exception=HOSTILE, event_type=HOSTILE, key=HOSTILE, message_id=HOSTILE, consumer=HOSTILE)
    async with running(settings) as app, browser(app) as client:
        look, page = await looked(app, client)
        group = await client.get(f"/failures/{look.groups[0].id}")

    for text in (page.text, group.text):
        assert "<script>alert" not in text
        assert '" onload' not in text
        assert "&lt;script&gt;" in text


async def test_held_messages_are_tried_now_by_a_button(settings: Settings, tmp_path: Path, database_url: str) -> None:
    rows = Rows(database_url)
    with rows.connection as connection:
        held(connection, messages=3)
        async with running(settings, **users(tmp_path)) as app, browser(app) as client:
            await log_in(client, Role.VIEWER)
            path, shown = await group_page(client)
            await log_in(client, Role.OPERATOR)
            path, _ = await group_page(client)
            without_reason = await post(client, f"{path}/held", {"why": " "})
            tried = await post(client, f"{path}/held", {"why": "it is open again"})

        due = connection.execute("SELECT count(*) FROM outbox.held_message WHERE due_at <= now()").fetchone()
        audit = connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert "Try now" not in shown.text
    assert (without_reason.status_code, tried.status_code, tried.headers["Location"]) == (422, 303, "/failures")
    assert due == (1,)
    assert audit == [("held retry", path.rpartition("/")[2], "operator", "it is open again")]
