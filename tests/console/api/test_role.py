"""The API works with the rights of the role `outbox_console`."""

from pathlib import Path

import psycopg
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from tests.console.api.program import Program
from tests.consume.conftest import queue
from tests.dead_letters.conftest import letters
from tests.dead_letters.letters import DEAD, Letters
from tests.operate.batches import WRITE
from tests.operate.held import held
from tests.operate.rows import Rows
from tests.support.roles import granted_roles

__all__ = ["letters", "queue"]  # fixtures


async def test_the_role_may_do_what_operators_do(
    settings: Settings, tmp_path: Path, database_url: str, rows: Rows, *, letters: Letters
) -> None:
    await letters.put_all(3)
    held(rows.connection)
    row = rows.parked()
    rows.parked("2")
    aside = rows.quarantined("nowhere")
    rows.quarantined("nowhere", "2")
    rows.connection.execute(WRITE)
    url = SecretStr(f"{database_url}?options=-crole%3Doutbox_console")
    limited = settings.model_copy(update={"database": DatabaseSettings(url=url)})
    reads = (
        "/status",
        "/nodes",
        "/pool/status",
        "/parked",
        "/parked/preview",
        "/quarantine",
        "/lanes",
        "/batches",
    )
    letter: dict[str, object] = {"queue": DEAD, "message_ids": ["id-0"], "why": "mended"}
    writes: tuple[tuple[str, dict[str, object]], ...] = (
        (f"/parked/{row}/reveal", {}),
        ("/dead-letters/look", {"queue": DEAD}),
        ("/dead-letters/reveal", {"queue": DEAD, "message_id": "id-0"}),
        ("/dead-letters/export", {"queue": DEAD}),
        ("/failures/look", {"queue": [DEAD]}),
        ("/parked/retry", {"ids": [str(row)]}),
        ("/parked/discard", {"all": True, "why": "wrong"}),
        ("/quarantine/probe", {}),
        ("/quarantine/pause", {"exchange": "", "routing_key": "later", "why": "repair"}),
        ("/quarantine/resume", {"route": 3, "why": "repaired"}),
        ("/lanes/7/pause", {"why": "repair"}),
        ("/batches/give-up", {"app_id": "nightly", "version": 7, "why": "over"}),
        ("/lanes/7/resume", {}),
        ("/quarantine/reroute", {"route": 1, "ids": [str(aside)], "routing_key": "other", "why": "typo"}),
        ("/quarantine/discard", {"route": 1, "why": "wrong"}),
        ("/dead-letters/retry", letter),
        ("/dead-letters/discard", {"queue": DEAD, "message_ids": ["id-1"], "why": "wrong"}),
        ("/held/retry", {"all": True, "why": "mended"}),
    )

    with psycopg.connect(database_url, autocommit=True) as connection, granted_roles(connection):
        async with Program.running(limited, tmp_path) as program:
            read = [(await program.get(path)).status_code for path in (*reads, "/quarantine/1", "/jobs")]
            written = [await program.post(path, body) for path, body in writes]
            jobs = [await program.job(each) for each in written if each.status_code == 202]

    assert set(read) == {200}
    assert [each.text for each in written if not each.is_success] == []
    assert [(job["state"], job["done"]) for job in jobs] == [("done", 1)] * 5
