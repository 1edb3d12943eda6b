"""Nothing is changed by a GET: no row of the database, no letter of a queue.

A browser sends a GET for anybody's page, and a viewer and a read-only console may send each. The routes and their
parameters are those of the app, so that a new one is asked, too.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
from fastapi import FastAPI
from psycopg.sql import SQL, Identifier

from relay.config.settings import Settings
from relay.console.app import make_app
from relay.operate.operation import Role
from tests.console.api.program import tokens
from tests.console.consumers import with_queue
from tests.console.filled import fill
from tests.console.routes import names, routes
from tests.console.site import serving, users
from tests.consume.conftest import queue
from tests.consume.effects import QUEUE
from tests.dead_letters.conftest import letters
from tests.dead_letters.letters import Letters

__all__ = ["letters", "queue"]  # fixtures

STREAM = "/live"
# A console with passwords has no provider, and no batch is there: tests/console/api/test_batches.py shows one.
ELSEWHERE = {"/login/provider", "/login/callback", "/api/v1/batches/show"}
SINCE = f"{datetime.now(UTC) - timedelta(hours=2):%Y-%m-%dT%H:%M:%SZ}"
# What is asked for; the rest of a route's parameters stays away.
ASKED = {
    "queue": QUEUE, "message_id": "id-0", "since": SINCE, "held": "true", "full": "true", "again": "true", "limit": "5",
    "route": "1", "event": "Paid", "state": "parked", "keep": "1 day", "kind": "restore", "job": "3",
}  # fmt: skip
OF_ROWS = "/failures/{group}/discard"  # with a queue it is of letters, which must be looked at first
RETURNS = "x-delivery-count", "x-acquired-count"
TABLES = """
    SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' ORDER BY relname
"""
ROWS = SQL("SELECT xmin::text, ctid::text, row::text FROM outbox.{} AS row ORDER BY ctid")
SEQUENCES = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'outbox' ORDER BY 1"


KEPT_BY_ITSELF = "console_history"  # its curves, which the console writes without a request


def written(connection: psycopg.Connection) -> dict[str, list[Any]]:
    """Return all versions of rows, and how far each sequence has come: also what wrote a row as it was is seen."""
    tables = [name for (name,) in connection.execute(TABLES).fetchall() if name != KEPT_BY_ITSELF]
    found = {name: connection.execute(ROWS.format(Identifier(name))).fetchall() for name in tables}
    return {**found, "sequences": connection.execute(SEQUENCES).fetchall()}


def addresses(app: FastAPI, places: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the path of each route that reads, and the address that is asked for."""
    for route in routes(app):
        if "GET" in (route.methods or ()):
            path = route.path or ""
            asked = ASKED | ({"queue": ""} if path == OF_ROWS else {})
            given = {name: value for name in names(route.dependant) if (value := asked.get(name))}
            yield path, str(httpx.URL(re.sub(r"\{(\w+)\}", lambda found: places[found[1]], path), params=given))


async def test_what_reads_changes_nothing(
    settings: Settings, tmp_path: Path, database_url: str, letters: Letters
) -> None:
    ids = await letters.put_all(3)
    pages = fill(database_url)
    known = tokens(tmp_path)
    console: dict[str, Any] = {**users(tmp_path), "tokens": str(tmp_path / "tokens")}
    answered: dict[str, int] = {}

    with psycopg.connect(database_url, autocommit=True) as connection:
        (group,) = connection.execute("SELECT failure FROM outbox.parked_failure LIMIT 1").fetchone() or ("",)
        places = {
            "row": pages[0].rpartition("/")[2],
            "job": "1",
            "route": "1",
            "group": group,
            "name": "1",
            "runbook": "OutboxParked",
            "mood": "ok",
        }
        asked = list(addresses(make_app(settings), places))
        before = written(connection)
        async with serving(with_queue(settings, QUEUE), **console) as address:
            for role in (None, *Role):
                headers = {} if role is None else {"Authorization": f"Bearer {known[role]}"}
                async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
                    for path, target in asked:
                        async with client.stream("GET", target) as answer:
                            if path != STREAM:
                                await answer.aread()
                            elif answer.is_success:
                                await anext(answer.aiter_bytes())
                        answered[path] = answer.status_code
        after = written(connection)

    assert after == before
    found = await letters.taken()
    assert [each.message_id for each in found] == ids
    assert [each.redelivered for each in found] == [False] * len(ids)
    assert [each.headers.get(name, 0) for each in found for name in RETURNS] == [0] * len(ids) * len(RETURNS)
    assert {path for path, status in answered.items() if status != 200} == ELSEWHERE
    assert {STREAM, "/failures", "/api/v1/parked"} <= answered.keys()
