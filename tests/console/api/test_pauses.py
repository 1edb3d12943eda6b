"""Routes and lanes are paused and resumed by programs, each once."""

import pytest

from relay.operate.operation import Role
from tests.console.api.program import Program
from tests.operate.rows import Rows

PAUSE = {"exchange": "", "routing_key": "later", "why": "billing is restored"}
AUDIT = "SELECT command, done_by, why FROM outbox.operator_audit ORDER BY id"


async def test_a_route_is_paused_and_resumed_once(program: Program, rows: Rows) -> None:
    operator = program.as_(Role.OPERATOR)
    paused = await operator.post("/quarantine/pause", PAUSE, key="one")
    again = await operator.post("/quarantine/pause", PAUSE, key="one")
    other = await operator.post("/quarantine/pause", PAUSE, key="two")
    (listed,) = (await program.as_(Role.VIEWER).get("/quarantine")).json()
    resumed = await operator.post("/quarantine/resume", {"route": listed["id"]}, key="three")

    assert paused.json() == again.json() == listed
    assert (listed["paused_by"], listed["next_probe_by"]) == ("program-operator", None)
    assert (other.status_code, "is paused already" in other.json()["detail"]) == (422, True)
    assert resumed.json()["paused_at"] is None
    assert rows.connection.execute(AUDIT).fetchall() == [
        ("quarantine pause", "program-operator", "billing is restored"),
        ("quarantine resume", "program-operator", None),
    ]


async def test_a_lane_is_paused_and_resumed_once(program: Program, rows: Rows) -> None:
    operator = program.as_(Role.OPERATOR)
    paused = await operator.post("/lanes/7/pause", {"why": "test"}, key="one")
    again = await operator.post("/lanes/7/pause", {"why": "test"}, key="one")
    listed = (await program.as_(Role.VIEWER).get("/lanes")).json()
    status = (await program.get("/status")).json()
    resumed = await operator.post("/lanes/7/resume", {"why": "over"})

    assert paused.json() == again.json() == listed[7]
    assert [each["lane"] for each in listed] == list(range(16))
    assert [each["lane"] for each in status["paused_lanes"]] == [7]
    assert resumed.json()["paused_at"] is None
    assert rows.connection.execute(AUDIT).fetchall() == [
        ("lanes pause", "program-operator", "test"),
        ("lanes resume", "program-operator", "over"),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/quarantine/pause", {**PAUSE, "why": " "}),
        ("/quarantine/pause", {**PAUSE, "routing_key": "é" * 200}),
        ("/quarantine/pause", {"routing_key": "later", "why": "x"}),
        ("/quarantine/resume", {"route": 1}),
        ("/lanes/7/pause", {}),
        ("/lanes/16/pause", {"why": "x"}),
        ("/lanes/7/resume", {}),
    ],
)
async def test_what_cannot_be_is_refused(program: Program, rows: Rows, path: str, body: dict[str, object]) -> None:
    rows.quarantined("gone")

    refused = await program.post(path, body)

    assert refused.status_code == 422
    assert rows.connection.execute(AUDIT).fetchall() == []
