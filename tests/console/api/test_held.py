"""Held messages are tried now by the API, once however often the request is sent."""

import pytest

from relay.operate.operation import Role
from tests.console.api.program import Program
from tests.operate.held import held
from tests.operate.rows import Rows


async def test_a_group_is_tried_now_once(program: Program, rows: Rows) -> None:
    held(rows.connection, "a", messages=2)
    (group,) = [each["id"] for each in (await program.get("/failures", held=True)).json()["groups"]]
    body = {"group": group, "why": "mended"}

    refused = await program.as_(Role.VIEWER).post("/held/retry", body)
    first = await program.as_(Role.OPERATOR).post("/held/retry", body, key="one")
    again = await program.as_(Role.OPERATOR).post("/held/retry", body, key="one")
    unknown = await program.post("/held/retry", {"group": "0123456789ab", "why": "mended"})

    assert (refused.status_code, unknown.status_code) == (403, 404)
    assert first.json() == again.json() == {"messages": 1}
    audit = rows.connection.execute("SELECT command, target, done_by, why FROM outbox.operator_audit").fetchall()
    assert audit == [("held retry", group, "program-operator", "mended")]


@pytest.mark.parametrize("body", [{"why": "x"}, {"all": True}, {"all": True, "group": "0123456789ab", "why": "x"}])
async def test_a_request_says_which_and_why(program: Program, body: dict[str, object]) -> None:
    assert (await program.post("/held/retry", body)).status_code == 422
