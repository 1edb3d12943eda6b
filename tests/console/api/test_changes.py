"""Routes are rerouted, given up and tried, and jobs ended, each once; a repeat gets the same answer."""

import asyncio
from pathlib import Path

import pytest

from relay.cli.command import run_command
from relay.console.access.tokens import TokenFile
from relay.operate.operation import Role
from tests.console.api.program import Program
from tests.console.rows import YESTERDAY
from tests.operate.rows import Rows

JOBS = """
    INSERT INTO outbox.job (kind, source, made_by, filter)
    SELECT 'replay', 'sent', 'ada', '{}' FROM generate_series(1, 3) RETURNING id
"""


async def test_a_route_is_shown_page_by_page(program: Program, rows: Rows) -> None:
    written = [rows.quarantined("nowhere", str(number)) for number in range(3)]

    first = (await program.get("/quarantine/1", limit=2)).json()
    second = (await program.get("/quarantine/1", limit=2, cursor=first["next"])).json()

    assert first["route"]["routing_key"] == "nowhere"
    assert [row["id"] for page in (first, second) for row in page["rows"]] == written
    assert second["next"] is None


async def test_a_reroute_is_done_once(program: Program, rows: Rows) -> None:
    rows.quarantined("nowhere")
    body = {"route": 1, "routing_key": "other", "why": "typo"}

    first = await program.post("/quarantine/reroute", body, key="one")
    again = await program.post("/quarantine/reroute", body, key="one")
    another = await program.post("/quarantine/reroute", body, key="two")

    assert first.json() == again.json() == {"route": 1, "rows": 1, "left_out": []}
    assert another.json() == {"route": 1, "rows": 0, "left_out": []}


@pytest.mark.parametrize(
    "body",
    [
        {"route": 1, "why": "typo"},
        {"route": 1, "routing_key": "é" * 200, "why": "typo"},
        {"route": 1, "routing_key": "other", "why": " "},
        {"route": 1, "routing_key": "nowhere", "to_exchange": "", "why": "the same"},
    ],
    ids=["nowhere to go", "too long", "no reason", "where they are"],
)
async def test_a_reroute_that_cannot_be_is_refused(program: Program, rows: Rows, body: dict[str, object]) -> None:
    row = rows.quarantined("nowhere")

    refused = await program.post("/quarantine/reroute", body)

    assert refused.status_code == 422
    assert rows.states()[row][0] == "quarantined"


async def test_a_request_whose_console_has_died_is_not_begun_again(program: Program, rows: Rows) -> None:
    rows.quarantined("nowhere")
    body = {"route": 1, "routing_key": "other", "why": "wrong"}
    await program.post("/quarantine/reroute", body, key="one")
    rows.connection.execute("UPDATE outbox.api_answer SET status = NULL, body = NULL")

    repeated = await program.post("/quarantine/reroute", body, key="one")

    assert repeated.status_code == 409
    assert rows.connection.execute("SELECT count(*) FROM outbox.operator_audit").fetchone() == (1,)


async def test_the_rows_of_a_route_are_discarded_by_a_job(program: Program, rows: Rows) -> None:
    ids = [rows.quarantined("nowhere", str(key)) for key in range(3)]
    body = {"route": 1, "ids": [str(ids[0]), "999"], "why": "wrong"}

    some = await program.post("/quarantine/discard", body)
    named = await program.job(some)
    rest = await program.job(await program.post("/quarantine/discard", {"route": 1, "why": "wrong"}))

    assert (some.status_code, [words[:3] for words in some.json()["not_found"]]) == (202, ["999"])
    assert [(job["state"], job["source"], job["done"]) for job in (named, rest)] == [
        ("done", "quarantined", 1),
        ("done", "quarantined", 2),
    ]
    assert {state for state, _ in rows.states().values()} == {"discarded"}
    audit = rows.connection.execute("SELECT command, job FROM outbox.operator_audit ORDER BY id").fetchall()
    assert audit == [("quarantine discard", 1), ("quarantine discard", 2), ("quarantine discard", 2)]


async def test_of_the_same_request_at_the_same_time_one_does_the_work(program: Program, rows: Rows) -> None:
    for number in range(20):
        rows.parked(str(number))

    answers = await asyncio.gather(*(program.post("/parked/retry", {"all": True}, key="one") for _ in range(8)))

    assert len({answer.text for answer in answers}) == 1
    assert (await program.job(answers[0]))["done"] == 20
    (audit,) = rows.connection.execute("SELECT count(*) FROM outbox.operator_audit").fetchone() or (0,)
    assert audit == 20


async def test_an_answer_is_forgotten_after_a_day(program: Program, rows: Rows) -> None:
    await program.post("/quarantine/probe", {}, key="one")
    rows.connection.execute("UPDATE outbox.api_answer SET begun_at = now() - interval '25 hours'")

    await program.post("/quarantine/probe", {}, key="two")

    kept = rows.connection.execute("SELECT key, done_by FROM outbox.api_answer").fetchall()
    assert kept == [("two", "program-owner")]


async def test_jobs_are_listed_shown_and_ended(program: Program, rows: Rows) -> None:
    ids = [row[0] for row in rows.connection.execute(JOBS)]

    first = (await program.get("/jobs", limit=2)).json()
    second = (await program.get("/jobs", limit=2, cursor=first["next"])).json()
    ended = await program.as_(Role.OPERATOR).post(f"/jobs/{ids[0]}/cancel", {"why": "wrong"}, key="one")
    again = await program.as_(Role.OPERATOR).post(f"/jobs/{ids[0]}/cancel", {"why": "wrong"}, key="one")
    late = await program.post(f"/jobs/{ids[0]}/cancel", {"why": "wrong"})
    shown = (await program.get(f"/jobs/{ids[0]}")).json()

    assert [row["id"] for page in (first, second) for row in page["rows"]] == ids[::-1]
    assert ended.json() == again.json()
    assert (late.status_code, shown["job"]["cancelled_by"]) == (422, "program-operator")


async def test_a_preview_of_a_replay_counts_by_day(program: Program, rows: Rows) -> None:
    rows.connection.execute(YESTERDAY)

    preview = await program.get("/replay/preview", since="1h", event_type="InvoiceIssued")

    assert preview.json() == {"rows": 0, "days": [], "left_out": []}


def test_the_command_makes_lists_and_removes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    token = ("console", "token")

    assert run_command((*token, "add", "billing", "--role", "operator", "--file", str(file))) == 0
    made = capsys.readouterr().out.strip()
    assert run_command((*token, "list", "--file", str(file))) == 0
    listed = capsys.readouterr().out

    owner = TokenFile(file).owner_of(made)
    assert (owner and owner.name, owner and owner.role) == ("billing", Role.OPERATOR)
    assert listed == "name\trole\nbilling\toperator\n"
    assert made not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert run_command((*token, "remove", "billing", "--file", str(file))) == 0
    assert TokenFile(file).owner_of(made) is None
