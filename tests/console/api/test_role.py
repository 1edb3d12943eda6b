"""The API works with the rights of the role `outbox_console`."""

from pathlib import Path

import psycopg
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from tests.console.api.program import Program
from tests.operate.rows import Rows
from tests.support.roles import granted_roles


async def test_the_role_may_do_what_operators_do(
    settings: Settings, tmp_path: Path, database_url: str, rows: Rows
) -> None:
    row = rows.parked()
    rows.parked("2")
    rows.quarantined("nowhere")
    rows.quarantined("nowhere", "2")
    url = SecretStr(f"{database_url}?options=-crole%3Doutbox_console")
    limited = settings.model_copy(update={"database": DatabaseSettings(url=url)})
    reads = ("/status", "/nodes", "/pool/status", "/parked", f"/parked/{row}", "/parked/preview", "/quarantine")
    writes: tuple[tuple[str, dict[str, object]], ...] = (
        ("/parked/retry", {"ids": [str(row)]}),
        ("/parked/discard", {"all": True, "why": "wrong"}),
        ("/quarantine/probe", {}),
        ("/quarantine/reroute", {"route": 1, "routing_key": "other", "why": "typo"}),
        ("/quarantine/discard", {"route": 1, "why": "wrong"}),
    )

    with psycopg.connect(database_url, autocommit=True) as connection, granted_roles(connection):
        async with Program.running(limited, tmp_path) as program:
            read = [(await program.get(path)).status_code for path in (*reads, "/quarantine/1", "/replay")]
            written = [(await program.post(path, body)).text for path, body in writes]

    assert set(read) == {200}
    assert [text for text in written if '"status"' in text] == []
