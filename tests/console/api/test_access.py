"""Each request names its user by a token, whose role decides; errors are problem documents."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from relay.config.settings import Settings
from relay.console.access.identity import Requirement
from relay.console.access.tokens import TokenFile
from relay.operate.operation import Role
from tests.console.api.program import PREFIX, Program
from tests.console.routes import routes
from tests.console.site import running
from tests.operate.rows import Rows

BELOW = {Role.OPERATOR: (None, Role.VIEWER), Role.OWNER: (None, Role.VIEWER, Role.OPERATOR), Role.VIEWER: (None,)}


def calls(app: FastAPI) -> Iterator[tuple[str, str, Role]]:
    """Yield method, path and least role of each route of the API."""
    for route in routes(app):
        if (route.path or "").startswith(PREFIX):
            roles = [each.call.role for each in route.dependant.dependencies if isinstance(each.call, Requirement)]
            for method in route.methods or ():
                yield method, re.sub(r"\{[^}]*\}", "1", route.path or ""), max(roles, key=list(Role).index)


async def test_a_role_below_that_of_the_route_is_refused(app: FastAPI, program: Program) -> None:
    found = list(calls(app))

    assert len(found) > 25
    for method, path, role in found:
        for lower in BELOW[role]:
            answer = await program.as_(lower).client.request(
                method, path, headers={**program.as_(lower).headers, "Idempotency-Key": "one"}
            )
            assert answer.status_code == (401 if lower is None else 403) or (method, lower) == ("POST", None), path
            assert answer.status_code in (401, 403), path
            assert answer.headers["Content-Type"] == "application/problem+json"


async def test_a_token_that_nobody_has_is_refused_also_without_authentication(settings: Settings) -> None:
    async with running(settings) as app, Program.open(app, {Role.OWNER: "x" * 43}) as program:
        reading = await program.as_(Role.OWNER).get("/status")
        writing = await program.as_(Role.OWNER).post("/quarantine/probe", {})

    assert (reading.status_code, writing.status_code) == (401, 401)
    assert reading.headers["WWW-Authenticate"] == writing.headers["WWW-Authenticate"] == 'Bearer realm="outbox relay"'


async def test_a_removed_token_counts_no_longer(settings: Settings, tmp_path: Path) -> None:
    async with Program.running(settings, tmp_path) as program:
        before = await program.as_(Role.VIEWER).get("/nodes")
        TokenFile(tmp_path / "tokens").remove("program-viewer")
        after = await program.as_(Role.VIEWER).get("/nodes")

    assert (before.status_code, after.status_code) == (200, 401)


async def test_nothing_is_changed_in_read_only_mode(settings: Settings, tmp_path: Path) -> None:
    async with Program.running(settings, tmp_path, read_only=True) as program:
        answer = await program.as_(Role.OWNER).post("/quarantine/probe", {})

    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("DELETE", "/parked", 405),
        ("GET", "/parked?limit=0", 422),
        ("GET", "/parked?limit=1001", 422),
        ("GET", "/parked?payload=x", 422),
        ("GET", "/parked?aggregate_id=%00", 422),
        ("GET", "/replay/99", 404),
        ("GET", "/quarantine/99", 404),
        ("GET", "/pool/status?pool=none", 404),
        ("GET", "/failures?queue=orders", 422),
        ("GET", "/replay/preview?since=yesterday", 422),
        ("GET", "/reconcile?since=1h", 404),
    ],
)
async def test_an_error_is_a_problem_document(program: Program, method: str, path: str, status: int) -> None:
    answer = await program.client.request(method, PREFIX + path, headers=program.headers)

    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json"), answer.text
    assert answer.json()["status"] == status
    assert answer.json()["detail"]


async def test_a_statement_that_takes_too_long_is_ended(settings: Settings, tmp_path: Path, rows: Rows) -> None:
    async with Program.running(settings, tmp_path, statement_timeout=0.2) as program:
        with rows.connection.transaction():
            rows.connection.execute("LOCK TABLE outbox.message")
            answer = await program.as_(Role.VIEWER).get("/parked")

    assert answer.status_code == 504


async def test_a_broker_that_is_not_there_is_told(settings: Settings, tmp_path: Path) -> None:
    broker = type(settings.broker)(url="amqp://guest:guest@127.0.0.1:1/")
    gone = settings.model_copy(update={"broker": broker})
    async with Program.running(gone, tmp_path) as program:
        answer = await program.post("/dead-letters/look", {"queue": "billing"})

    assert answer.status_code == 503
