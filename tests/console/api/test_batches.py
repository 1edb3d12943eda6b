"""A program gives up a batch of Spark once, and sees what stays."""

from relay.operate.operation import Role
from tests.console.api.program import Program
from tests.operate.batches import AUDIT, WRITE
from tests.operate.rows import Rows

NIGHTLY = {"app_id": "nightly", "version": 7}


async def test_a_batch_is_given_up_once_and_stays_listed(program: Program, rows: Rows) -> None:
    rows.connection.execute(WRITE)
    operator, viewer = program.as_(Role.OPERATOR), program.as_(Role.VIEWER)

    listed = (await viewer.get("/batches")).json()
    done = await operator.post("/batches/give-up", {**NIGHTLY, "why": "over"}, key="one")
    again = await operator.post("/batches/give-up", {**NIGHTLY, "why": "over"}, key="one")
    other = await operator.post("/batches/give-up", {**NIGHTLY, "why": "over"}, key="two")
    shown = (await viewer.get("/batches/show", **NIGHTLY)).json()
    missing = await viewer.get("/batches/show", app_id="nightly", version=8)

    assert [(each["app_id"], each["version"], each["state"]) for each in listed] == [
        ("nightly", 7, "begun"),
        ("daily", 1, "committed"),
        ("daily", 2, "committed"),
    ]
    assert done.json() == again.json() == shown
    assert (shown["state"], shown["pieces"], shown["rows"]) == ("given_up", 2, 11)
    assert (other.status_code, "is given up already" in other.json()["detail"]) == (422, True)
    assert missing.status_code == 404
    assert rows.connection.execute(AUDIT).fetchall() == [("batches give-up", "nightly 7", "program-operator", "over")]
