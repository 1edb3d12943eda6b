"""A console that is killed in the middle of a job: another one goes on with it, and each row is done once."""

import signal
from pathlib import Path

import httpx

from relay.config.settings import Settings
from relay.operate.operation import Role
from relay.testing.servers.process import Process, free_port, is_listening
from tests.cli.command import RELAY, Command
from tests.console.api.program import Program, tokens
from tests.console.rows import waiting
from tests.console.site import users
from tests.operate.rows import Rows
from tests.support.eventually import eventually

ROWS, RATE = 2_000, 250  # rows, and how many a second
AUDIT = "SELECT count(*), count(DISTINCT target), count(DISTINCT job) FROM outbox.operator_audit"
JOB = "SELECT state, selected, done, failed, made_by FROM outbox.job WHERE id = %s"


async def test_another_console_goes_on_where_a_killed_one_was(
    settings: Settings, tmp_path: Path, database_url: str, rows: Rows
) -> None:
    waiting(database_url, "parked", ROWS)
    given = tokens(tmp_path)
    section = {"USERS": users(tmp_path)["users"], "TOKENS": str(tmp_path / "tokens"), "AUTHENTICATION": "password"}
    port = free_port()
    command = Command(
        tmp_path,
        RELAY_DATABASE_URL=settings.database.url.get_secret_value(),
        RELAY_BROKER_URL=settings.broker.url.get_secret_value(),
        RELAY_CONSOLE_LISTEN=f"127.0.0.1:{port}",
        **{f"RELAY_CONSOLE_{key}": value for key, value in section.items()},
    )
    log = tmp_path / "console.log"
    console = Process([RELAY, "console"], log=log, environment=command.environment({}), folder=tmp_path)
    try:
        await eventually(lambda: is_listening(port), "the console listens")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            first = Program(client, given, Role.OWNER)
            ordered = await first.post("/parked/archive", {"all": True, "rate": RATE, "why": "test"})
            assert ordered.status_code == 202, ordered.text
        job = ordered.json()["job"]["id"]

        def has_begun() -> bool:
            (done,) = rows.connection.execute("SELECT done FROM outbox.job WHERE id = %s", [job]).fetchone() or (0,)
            return bool(done)

        await eventually(has_begun, "some rows are done")
    finally:
        console.stop(signal.SIGKILL)
    between = rows.connection.execute(JOB, [job]).fetchone()
    async with Program.running(settings, tmp_path) as second:
        told = await second.job(ordered)

    assert between is not None
    assert between[0] == "open"
    assert 0 < between[2] < ROWS
    assert (told["state"], told["done"]) == ("done", ROWS)
    assert rows.connection.execute(JOB, [job]).fetchone() == ("done", ROWS, ROWS, 0, "program-owner")
    assert rows.connection.execute(AUDIT).fetchone() == (ROWS, ROWS, 1)
    assert {state for state, _ in rows.states().values()} == {"archived"}
