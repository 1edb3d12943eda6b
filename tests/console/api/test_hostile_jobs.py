"""A job that cannot be done is paused with its reason, and the jobs behind it are done."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.console import background, runner
from relay.jobs import runner as jobs_runner
from tests.console.api.program import Program
from tests.console.rows import sent
from tests.console.site import browser, running
from tests.operate.rows import Rows
from tests.support.eventually import eventually

ORDERED = """
    INSERT INTO outbox.job (kind, source, made_by, filter, routing_key, by_console)
    VALUES (%s, %s, 'me', %s, %s, true) RETURNING id
"""

HOSTILE = {
    "a filter of rows that is none": ("retry", "parked", {"ids": {"a": 1}}, None),
    "a moment that is none": ("replay", "sent", {"since": "noon"}, None),
    "no trace": ("replay", "sent", {"trace": "all"}, None),
    "ids that are none": ("replay", "sent", {"message_ids": ["a"]}, None),
    "letters of no queue": ("retry", "dead letter", {}, None),
    "a queue that is consumed": ("discard", "dead letter", {"queue": "orders", "sent_to": None}, None),
    "letters for another queue": ("retry", "dead letter", {"queue": "orders.dead", "sent_to": "payroll"}, None),
    "a route that is none": ("discard", "quarantined", {"route": "a", "until": 1}, None),
}


def order(rows: Rows, kind: str, source: str, filter_: Any, routing_key: str | None = None) -> int:
    found = rows.connection.execute(ORDERED, [kind, source, Jsonb(filter_), routing_key]).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
async def test_a_job_that_cannot_be_done_stops_no_other(
    program: Program, rows: Rows, database_url: str, monkeypatch: pytest.MonkeyPatch, hostile: tuple[str, str, Any, str]
) -> None:
    monkeypatch.setattr(runner, "LOOK_INTERVAL", 0.1)
    sent(database_url, 3)
    wrong = order(rows, *hostile)

    head = rows.parked()
    others = [order(rows, "retry", "parked", {"ids": [head]}), order(rows, "replay", "sent", {"aggregate_type": "x"})]

    async def are_ended() -> bool:
        return await states(program, [wrong, *others]) == ["paused", "done", "done"]

    await eventually(are_ended, "it is paused, the others are done")
    shown = (await program.get(f"/jobs/{wrong}")).json()["job"]
    assert shown["paused_because"]


async def test_a_percent_sign_in_a_routing_key_is_sent_as_it_is(
    program: Program, rows: Rows, database_url: str
) -> None:
    sent(database_url, 3)
    job = order(rows, "replay", "sent", {}, "50%(x)s off")

    async def is_done() -> bool:
        return await states(program, [job]) == ["done"]

    await eventually(is_done, "it is done")


async def test_a_job_that_hardly_moves_is_cancelled_at_once(
    program: Program, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_runner, "LOOK_INTERVAL", 0.05)
    heads = [rows.parked(str(number)) for number in range(3)]
    ordered = await program.post("/parked/retry", {"ids": [str(head) for head in heads], "rate": 0.01, "why": "test"})
    slow = ordered.json()["job"]["id"]

    async def has_begun() -> bool:
        return bool((await program.get(f"/jobs/{slow}")).json()["job"]["done"] == 1)

    await eventually(has_begun, "its first row is done")
    await program.post(f"/jobs/{slow}/cancel", {"why": "too slow"})
    other = order(rows, "discard", "parked", {"ids": [heads[2]]})

    async def is_done() -> bool:
        return await states(program, [other]) == ["done"]

    await eventually(is_done, "the next job is done")
    refused = await program.post("/parked/retry", {"all": True, "rate": 0.001, "why": "test"})
    assert refused.status_code == 422


async def test_a_task_that_fails_is_told_and_begins_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN", 0.05)
    runs = 0

    async def fail_once(app: FastAPI) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ZeroDivisionError("a bug")

    async with running(settings) as app, browser(app) as client:
        task = asyncio.create_task(app.state.site.background.keep("looks", lambda: fail_once(app)))
        await asyncio.wait_for(task, 60)
        page = await client.get("/")

    assert runs == 2
    assert "the console&#39;s task &#39;looks&#39; has failed, and begins again: see its log" in page.text


async def states(program: Program, jobs: list[int]) -> list[str]:
    return [(await program.get(f"/jobs/{job}")).json()["job"]["state"] for job in jobs]
