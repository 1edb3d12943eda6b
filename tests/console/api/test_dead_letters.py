"""Dead letters are listed, shown, saved, sent back and thrown away by the API."""

import signal
from pathlib import Path

import orjson
import pytest
from pamqp.commands import Basic

from relay.config.settings import DatabaseSettings, Settings
from relay.console import runner
from relay.jobs.job import Job, JobState, resume_job
from relay.jobs.runner import Run
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.work import order_letters
from relay.operate.operation import Role
from relay.operate.session import session
from relay.testing.servers.process import free_port
from tests.console.api.program import Program
from tests.consume.conftest import client, inbox, queue, table
from tests.dead_letters.changes import RETRY, Audit
from tests.dead_letters.conftest import audit, letters
from tests.dead_letters.letters import Letters
from tests.dead_letters.tried import consuming
from tests.replay.conftest import Commands
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

__all__ = ["audit", "client", "inbox", "letters", "queue", "table"]  # fixtures


async def test_letters_are_looked_at_and_revealed(program: Program, letters: Letters, audit: Audit) -> None:
    ids = await letters.put_all(3)
    name = letters.queue.name

    listed = (await program.post("/dead-letters/look", {"queue": name, "limit": 2})).json()
    shown = await program.post("/dead-letters/reveal", {"queue": name, "message_id": ids[1], "why": "a call"})
    saved = (await program.post("/dead-letters/export", {"queue": name, "why": "an archive"})).text

    assert [each["message_id"] for each in listed["letters"]] == ids[:2]
    assert (listed["messages"], listed["matched"]) == (3, 2)
    assert shown.json()["message_id"] == ids[1]
    assert [orjson.loads(line)["message_id"] for line in saved.splitlines()] == ids
    noted = audit.execute("SELECT target, done_by, why FROM outbox.operator_audit ORDER BY id").fetchall()
    assert [tuple(each.values()) for each in noted] == [
        (ids[1], "program-owner", "a call"),
        (f"{name}.dead", "program-owner", "an archive"),
    ]


@pytest.mark.parametrize("path", ["look", "preview", "reveal", "export"])
async def test_a_viewer_looks_at_no_letter(program: Program, path: str) -> None:
    answer = await program.as_(Role.VIEWER).post(f"/dead-letters/{path}", {"queue": "billing", "message_id": "1"})

    assert answer.status_code == 403


async def test_letters_are_sent_back_by_a_job_which_is_ordered_once(program: Program, letters: Letters) -> None:
    ids = await letters.put_all(3)
    body = {"queue": letters.queue.name, "message_ids": [*ids[:1], "nowhere"], "why": "fixed"}

    first = await program.post("/dead-letters/retry", body, key="one")
    sent_back = await program.job(first)
    again = await program.post("/dead-letters/retry", body, key="one")
    thrown = await program.post("/dead-letters/discard", {"queue": letters.queue.name, "all": True, "why": "old"})
    discarded = await program.job(thrown)

    assert first.status_code == again.status_code == 202
    assert first.json() == again.json()
    assert (sent_back["state"], sent_back["done"], sent_back["selected"]) == ("done", 1, 2)
    assert (discarded["kind"], discarded["done"], discarded["selected"]) == ("discard", 2, 2)
    assert await letters.waiting() == 0
    assert [each.message_id for each in await letters.consumed()] == ids[:1]


async def test_a_group_of_letters_is_sent_back(program: Program, letters: Letters) -> None:
    await letters.put(1, exception="OutOfPaper")
    other = await letters.put(2, exception="OutOfInk")
    groups = (await program.post("/failures/look", {"queue": [letters.queue.name]})).json()["groups"]
    (group,) = [each["id"] for each in groups if "OutOfPaper" in each["cause"]]

    job = await program.job(
        await program.post("/dead-letters/retry", {"queue": letters.queue.name, "group": group, "why": "paper"})
    )

    assert job["done"] == 1
    await eventually(lambda: letters.has(1), "the other is back")
    assert await letters.ids() == [other]


async def test_letters_of_a_queue_that_is_not_there_are_not_ordered(program: Program) -> None:
    refused = await program.post("/dead-letters/retry", {"queue": "nowhere", "all": True, "why": "typo"})

    assert refused.status_code == 404
    assert (await program.get("/jobs")).json()["rows"] == []


async def test_a_job_over_letters_is_paused_resumed_and_cancelled(program: Program, letters: Letters) -> None:
    await letters.put_all(40)
    order = {"queue": letters.queue.name, "all": True, "rate": 10, "why": "slowly"}
    ordered = await program.post("/dead-letters/retry", order)
    job = ordered.json()["id"]
    await eventually(lambda: has_done(program, job, 2), "it has begun")

    await program.post(f"/jobs/{job}/pause", {"why": "lunch"})
    paused = await program.job(ordered, "paused")
    await program.post(f"/jobs/{job}/resume", {})
    await eventually(lambda: has_done(program, job, paused["done"] + 2), "it goes on")
    await program.post(f"/jobs/{job}/cancel", {"why": "enough"})
    cancelled = await program.job(ordered)

    assert paused["paused_because"] == "paused by program-owner: lunch"
    assert 2 < cancelled["done"] < 40
    await eventually(lambda: letters.has(40 - cancelled["done"]), "the others are back")
    assert len(await letters.consumed()) == cancelled["done"]


async def test_a_job_that_is_resumed_while_its_run_ends_goes_on(
    program: Program, letters: Letters, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.run

    async def run_and_resume(this: Run) -> Job:
        ended = await run(this)
        if ended.state is JobState.PAUSED:
            with session(database) as tables:
                resume_job(tables, ended.id, by="ada")
        return ended

    monkeypatch.setattr(Run, "run", run_and_resume)
    monkeypatch.setattr(runner, "LOOK_INTERVAL", 0.1)
    await letters.put_all(20)
    order = {"queue": letters.queue.name, "all": True, "rate": 10, "why": "slowly"}
    ordered = await program.post("/dead-letters/retry", order)
    job = ordered.json()["id"]
    await eventually(lambda: has_done(program, job, 2), "it has begun")

    await program.post(f"/jobs/{job}/pause", {})
    ended = await program.job(ordered)

    assert (ended["state"], ended["done"]) == ("done", 20)
    assert len(await letters.consumed()) == 20


async def test_a_retry_in_stages_pauses_when_letters_fail_again(
    program: Program, letters: Letters, audit: Audit
) -> None:
    await letters.put_all(3)
    order = {"queue": letters.queue.name, "all": True, "stages": [2], "stop_when_failing": 0.6, "why": "mended"}

    async with consuming(letters, audit, fails=lambda _: True):
        job = await program.job(await program.post("/dead-letters/retry", order), "paused", "done")
    refused = await program.post("/dead-letters/discard", {**order, "why": "old"})

    assert (job["done"], job["stage"], job["failed"]) == (2, 1, 2)
    assert job["paused_because"].startswith("letters that failed while a stage of 2 was tried: 2, or 100%")
    assert refused.status_code == 422  # what is thrown away has no outcome


async def test_a_job_whose_letters_are_refused_is_paused_and_says_why(program: Program, letters: Letters) -> None:
    await letters.put_all(30)
    await letters.channel.queue_delete(letters.queue.name)
    await letters.queue.declare("quorum", **{"x-max-length": 3, "x-overflow": "reject-publish"})
    order = {"queue": letters.queue.name, "all": True, "rate": 500, "why": "mended"}

    job = await program.job(await program.post("/dead-letters/retry", order), "paused", "done")

    assert "letters were refused, and stay" in job["paused_because"]
    await eventually(lambda: letters.has(30 - job["done"]), "they are back")


async def test_a_console_that_is_killed_over_letters_is_followed_by_one_that_goes_on(
    letters: Letters, audit: Audit, settings: Settings, database: DatabaseSettings, tmp_path: Path
) -> None:
    """Killed behind the audit and before the acknowledgement, the worst moment: the counts are exact all the same."""
    sent = await letters.put_all(5)
    with session(database) as tables:
        job = order_letters(tables, RETRY, LetterSelection(), by_console=True)
    relay = Commands(tmp_path, RELAY_DATABASE_URL=database.url.get_secret_value())
    async with proxied(letters.broker) as (proxy, far):
        proxy.on_frame(Way.UP, Basic.Ack, 1, Act.HOLD)
        variables = {"RELAY_CONSOLE_LISTEN": f"127.0.0.1:{free_port()}"}
        console = relay.start("console", RELAY_BROKER_URL=far.url.get_secret_value(), **variables)
        await proxy.wait_seen(Way.UP, Basic.Ack, 1, within=60)
        console.stop(signal.SIGKILL)
    await eventually(lambda: letters.has(5), "all letters are back")

    async with Program.running(settings, tmp_path) as program:
        ended = await program.job(await program.get(f"/jobs/{job.id}"))

    assert (ended["state"], ended["done"], ended["failed"], ended["selected"]) == ("done", 5, 0, 5)
    assert [each.message_id for each in await letters.consumed()] == sent
    assert await letters.waiting() == 0
    assert audit.execute("SELECT count(*) AS count FROM outbox.dead_letter_audit").fetchone() == {"count": 5}


async def has_done(program: Program, job: int, letters: int) -> bool:
    return bool((await program.get(f"/jobs/{job}")).json()["job"]["done"] >= letters)
