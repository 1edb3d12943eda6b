"""What a request orders is a job: a console runs it, and goes on with it after a death."""

import asyncio
from pathlib import Path

import aio_pika
import pytest
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.console import runner
from relay.operate.operation import Role
from relay.operate.parked import work as parked
from tests.console.api.program import Program
from tests.console.rows import sent
from tests.operate.rows import Rows
from tests.support.eventually import eventually


async def test_a_job_is_run_and_told(program: Program, rows: Rows) -> None:
    head = rows.parked()
    rows.parked(behind=head)

    answer = await program.post("/parked/archive", {"ids": [str(head)], "why": "known"})
    job = await program.job(answer)

    assert answer.status_code == 202
    assert (job["state"], job["kind"], job["done"], job["released"]) == ("done", "archive", 1, 1)
    assert (job["made_by"], job["why"], job["by_console"]) == ("program-owner", "known", True)
    assert rows.states()[head][0] == "archived"
    assert [each["id"] for each in (await program.get("/jobs", kind="archive")).json()["rows"]] == [job["id"]]


async def test_an_id_is_taken_as_lists_give_it(program: Program, rows: Rows) -> None:
    head = rows.parked()
    rows.parked("2")
    listed = (await program.get("/parked")).json()["rows"]

    answer = await program.post("/parked/archive", {"ids": [each["id"] for each in listed], "why": "known"})
    job = await program.job(answer)

    assert listed[0]["id"] == head
    assert (job["state"], job["done"]) == ("done", 2)


async def test_a_job_that_no_console_has_begun_waits(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def never(self: runner.Runner) -> None:
        await asyncio.to_thread(self._stopping.wait)

    monkeypatch.setattr(runner.Runner, "run", never)
    head = rows.parked()
    async with Program.running(settings, tmp_path) as program:
        ordered = await program.post("/parked/archive", {"ids": [head], "why": "known"})
        (listed,) = (await program.get("/jobs")).json()["rows"]

    assert ordered.json()["job"]["state"] == listed["state"] == "waiting"


@pytest.mark.parametrize("body", [b"{", b"{'ids': [1]}", b"\xff"])
async def test_a_body_that_is_no_json_is_a_bad_request(program: Program, body: bytes) -> None:
    headers = {**program.headers, "Content-Type": "application/json", "Idempotency-Key": "one"}

    answer = await program.client.post("/api/v1/parked/retry", content=body, headers=headers)

    assert (answer.status_code, answer.headers["Content-Type"]) == (400, "application/problem+json")
    assert "JSON" in answer.json()["detail"] or body == b"\xff"


async def test_what_is_not_there_is_told_with_the_order(program: Program, rows: Rows) -> None:
    pending = rows.pending()

    answer = await program.post("/parked/retry", {"ids": [str(pending)]})

    assert answer.json()["not_found"] == [f"{pending} is not parked: it is pending"]
    assert (await program.job(answer))["done"] == 0


async def test_a_job_goes_on_when_its_console_is_gone(
    program: Program,
    settings: Settings,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 1)
    monkeypatch.setattr(runner, "LOOK_INTERVAL", 0.1)
    for number in range(20):
        rows.parked(str(number))
    async with Program.running(settings, tmp_path_factory.mktemp("first")) as first:
        ordered = await first.post("/parked/retry", {"all": True, "rate": 20})
        await eventually(lambda: has_done(first, ordered.json()["job"]["id"], 2), "it has begun")
    state = rows.connection.execute("SELECT state, done FROM outbox.job").fetchone()

    assert state is not None
    assert state[0] == "open"
    assert state[1] < 20
    assert (await program.job(ordered))["done"] == 20
    audit = rows.connection.execute("SELECT count(*) FROM outbox.operator_audit WHERE command = 'parked retry'")
    assert audit.fetchone() == (20,)


async def test_a_job_is_paused_resumed_and_cancelled(
    program: Program, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 1)
    for number in range(20):
        rows.parked(str(number))
    ordered = await program.post("/parked/discard", {"all": True, "rate": 5, "why": "test"})
    job = ordered.json()["job"]["id"]
    await eventually(lambda: has_done(program, job, 1), "it has begun")

    paused = await program.post(f"/jobs/{job}/pause", {"why": "lunch"})
    await program.job(ordered, "paused")
    resumed = await program.post(f"/jobs/{job}/resume", {})
    await program.job(ordered, "running")
    refused = await program.as_(Role.VIEWER).post(f"/jobs/{job}/cancel", {"why": "enough"})
    cancelled = await program.post(f"/jobs/{job}/cancel", {"why": "enough"})

    assert [answer.status_code for answer in (paused, resumed, refused, cancelled)] == [200, 200, 403, 200]
    assert 0 < (await program.job(ordered))["done"] < 20


async def test_an_operator_lets_no_discard_of_an_owner_go_on(program: Program, rows: Rows) -> None:
    head = rows.parked()
    order = "INSERT INTO outbox.job (kind, source, state, made_by, why, filter, by_console)"
    rows.connection.execute(
        order + " VALUES ('discard', 'parked', 'paused', 'owner', 'old', %s, true)", [Jsonb({"ids": [head]})]
    )

    refused = await program.as_(Role.OPERATOR).post("/jobs/1/resume", {})
    resumed = await program.post("/jobs/1/resume", {"why": "looked at"})
    job = await program.job(resumed)

    assert (refused.status_code, resumed.status_code, job["done"]) == (403, 200, 1)
    named = rows.connection.execute("SELECT done_by FROM outbox.operator_audit WHERE command = 'parked discard'")
    assert named.fetchall() == [("owner, resumed by program-owner",)]


async def test_a_job_of_a_command_is_not_resumed(program: Program, rows: Rows) -> None:
    rows.connection.execute(
        "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'me', '{}')"
    )

    answer = await program.post("/jobs/1/resume", {})

    assert answer.status_code == 422
    assert "relay jobs resume 1" in answer.json()["detail"]


async def has_done(program: Program, job: int, rows: int) -> bool:
    return bool((await program.get(f"/jobs/{job}")).json()["job"]["done"] >= rows)


async def test_a_replay_is_run_and_told(program: Program, database_url: str, broker_url: str) -> None:
    sent(database_url, 20)
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("again")
        order = {"all": True, "to_exchange": "", "routing_key": "again", "why": "a new consumer"}

        answer = await program.post("/replay", order)
        job = await program.job(answer)
        declared = await channel.declare_queue("again", passive=True)
        await queue.delete(if_empty=False)

    assert answer.status_code == 202
    assert (job["state"], job["selected"], job["done"], job["made_by"]) == ("done", 20, 20, "program-owner")
    assert declared.declaration_result.message_count == 20


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"all": True, "event_type": "Paid"},
        {"all": True, "routing_key": "x"},
        {"all": True, "to_exchange": "nowhere"},
        {"all": True, "stages": [10, 1]},
        {"all": True, "stop_when_failing": 0.1},
    ],
)
async def test_a_replay_that_cannot_be_is_refused(program: Program, order: dict[str, object]) -> None:
    assert (await program.post("/replay", order)).status_code == 422
    assert (await program.get("/jobs")).json()["rows"] == []
