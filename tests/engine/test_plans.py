"""The hot statements keep their plans when the statistics say that the table is empty."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.read.floors import LOAD
from relay.engine.read.pending import CROWDED, DUE
from relay.engine.read.tail import Tail
from relay.engine.row import ROWS_PER_MOVE
from relay.engine.session.session import LaneSession, array_text
from relay.engine.settle.mark import PARK, POSTPONE, mark_statement
from relay.engine.settle.parking import FIND_PARKED, PARK_BEHIND
from relay.engine.settle.quarantine_table import FIND_BEHIND, LET_GO, SET_ASIDE, SET_ASIDE_BEHIND
from tests.engine.conftest import Outbox
from tests.engine.follower import IN_ORDER, unhurried
from tests.support.days import make_days
from tests.support.plans import EXPLAIN, Plan, scans

pytestmark = pytest.mark.every_postgres

LANES = list(range(16))
AVAILABLE_AT = "message_pending_available_at"
ROW = {"lane": 3, "id": 7, "attempts": 1, "reason": "", "seconds": 1.0}
FAULTS = {
    "lanes": array_text([3] * ROWS_PER_MOVE), "ids": array_text(range(100_000, 100_000 + ROWS_PER_MOVE)),
    "attempts": [1] * ROWS_PER_MOVE, "reasons": [""] * ROWS_PER_MOVE,
}  # fmt: skip


@pytest.fixture(params=["before the rows", "while they were written"])
async def session(
    request: pytest.FixtureRequest, database: DatabaseSettings, outbox: Outbox
) -> AsyncIterator[LaneSession]:
    """A relay's session on a table with 200,000 rows, of which the statistics know nothing.

    They were taken before the rows came, or while their transaction was open: then the table has pages, and no row.
    """
    await outbox.connection.execute(make_days("current_date - 10", "14"))
    await outbox.connection.execute("ALTER TABLE outbox.message_pending SET (autovacuum_enabled = off)")
    await outbox.connection.execute("ANALYZE outbox.message")
    async with outbox.connection.transaction():
        await outbox.insert_many(200_000, keys=5000)
        await outbox.connection.execute(
            "UPDATE outbox.message SET state = 'quarantined', quarantine = 1 WHERE id <= 20000 AND state = 'pending'"
        )
        if request.param == "while they were written":
            async with await AsyncConnection.connect(database.url.get_secret_value(), autocommit=True) as other:
                await other.execute("ANALYZE outbox.message")
    async with await LaneSession.open(database) as session:
        yield session


async def test_no_hot_statement_scans_more_than_the_pending_index(session: LaneSession) -> None:
    tail = Tail(session, RelaySettings(), IN_ORDER, unhurried(session))
    ids = {"lanes": array_text([3] * 1000), "ids": array_text(range(100_000, 101_000))}
    held = array_text(range(5000))
    reading = {"lanes": LANES, "floors": [0] * 16, "held": held, "rows": 500}
    reading |= {"bytes": [1 << 18] * 16, "after": [0] * 16, "largest": 1 << 24}
    ahead = {"floors": [190_000] * 16, "after": [199_500] * 16, "rows": 30}
    statements: dict[str, tuple[bytes, dict[str, Any]]] = {
        "read": (tail.statement, reading),
        "read ahead": (tail.ahead_statement, reading | ahead),
        "crowded": (session.sql(CROWDED), reading | ahead | {"most": 300}),
        "due": (session.sql(DUE), {"held": held}),
        "floors": (session.sql(LOAD), {"lanes": LANES}),
        "mark": (mark_statement(session), {**ids, "node": "relay-1"}),
        "postpone": (session.sql(POSTPONE), ROW),
        "park": (session.sql(PARK), FAULTS),
        "park behind": (session.sql(PARK_BEHIND), ids),
        "find parked": (
            session.sql(FIND_PARKED),
            {"kinds": ["customer"] * 500, "keys": [str(n) for n in range(500)], "roles": [None] * 500},
        ),
        "set aside": (session.sql(SET_ASIDE), {**ids, "routes": [1] * ROWS_PER_MOVE, "reasons": [""] * ROWS_PER_MOVE}),
        "find behind": (session.sql(FIND_BEHIND), ids),
        "set aside behind": (session.sql(SET_ASIDE_BEHIND), ids),
        "let go": (session.sql(LET_GO), {"routes": array_text(range(500)), "lanes": LANES, "each": 1}),
    }

    for name, (statement, values) in statements.items():
        plan = await explain(session, statement, values)

        read = [node for node in scans(plan) if node["Node Type"] != "ModifyTable"]
        read = [scan for scan in read if scan["Relation Name"] != "message_id_seq"]  # one row
        tables = {scan["Relation Name"] for scan in read}
        if name == "floors":  # the other index has an entry for each dead row
            assert {scan["Index Name"] for scan in read if scan["Relation Name"] == "message_pending"} == {AVAILABLE_AT}
        assert {scan["Node Type"] for scan in read} <= {"Index Scan", "Tid Scan"}, (name, read)
        assert tables <= {"message_pending", "message_parked", "message_quarantined", "lane_floor"}, (name, tables)
        assert sum(scan.get("Actual Rows", 0) * scan.get("Actual Loops", 1) for scan in read) <= 16 * 500, name


async def explain(session: LaneSession, statement: bytes, values: dict[str, Any]) -> Plan:
    async with session.use() as connection, connection.transaction(force_rollback=True):
        cursor = await connection.execute(EXPLAIN.encode() + statement, values)
        row = await cursor.fetchone()
    assert row is not None
    plan: Plan = row[0][0]["Plan"]
    return plan
