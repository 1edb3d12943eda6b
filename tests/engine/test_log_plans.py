"""The statements on the log keep their plans, whatever the statistics say and for all values."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read import positions
from relay.engine.read.tail import MOVE_OUT, Tail
from relay.engine.row import ROWS_PER_MOVE, Row
from relay.engine.session.session import LaneSession, array_text
from relay.engine.settle.mark import MARK_LOGGED, PARK, POSTPONE, receipts
from relay.engine.settle.quarantine import PARK_BEHIND
from relay.engine.settle.quarantine_table import SET_ASIDE, SET_ASIDE_BEHIND
from tests.engine.conftest import Outbox
from tests.engine.follower import IN_ORDER, unhurried
from tests.engine.prepared import explain
from tests.support.plans import Plan, nodes, scans

pytestmark = pytest.mark.every_postgres

ROWS, SENT = 100_000, 90_000
SENT_ROWS = """
    INSERT INTO outbox.receipt (block, n, ids) SELECT id >> 12, count(*), array_agg(id ORDER BY id)
    FROM outbox.message_log WHERE id <= %s GROUP BY 1
"""
UNWATCHED = """
    DO $$ DECLARE log regclass; BEGIN
        FOR log IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'outbox.message_log'::regclass LOOP
            EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', log);
        END LOOP;
    END $$
"""


@pytest.fixture(params=["one segment", "20 segments"])
async def segments(request: pytest.FixtureRequest, outbox: Outbox) -> str:
    """The log in one segment that takes all rows, or in 20 of which they fill twelve."""
    number, size = (1, 1 << 18) if request.param == "one segment" else (20, 8192)
    for _ in range(number):
        await outbox.connection.execute("SELECT outbox.ensure_segments(%s, %s)", [number, size])
    await outbox.connection.execute(UNWATCHED)
    return str(request.param)


@pytest.fixture(params=["before the rows", "while they were written"])
async def session(
    request: pytest.FixtureRequest, database: DatabaseSettings, outbox: Outbox, segments: str
) -> AsyncIterator[LaneSession]:
    """A relay's session on a log of 100,000 rows, most of them sent, of which the statistics know nothing.

    They were taken before the rows came, or while their transaction was open: then the table has pages, and no row.
    """
    await outbox.connection.execute("ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written'")
    await outbox.connection.execute("ANALYZE outbox.message")
    async with outbox.connection.transaction():
        await outbox.insert_many(ROWS, keys=5000)
        if request.param == "while they were written":
            async with await AsyncConnection.connect(database.url.get_secret_value(), autocommit=True) as other:
                await other.execute("ANALYZE outbox.message")
    await outbox.connection.execute(SENT_ROWS, [SENT])
    async with await LaneSession.open(database) as session:
        session.lanes.take(await lock_lanes(session))
        yield session


@pytest.fixture
def asked(session: LaneSession) -> "Asked":
    return Asked(Tail(session, RelaySettings(), IN_ORDER, unhurried(session)))


class Asked:
    """A tail, and the last statement that it has asked."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self._cursor: Any = tail._cursor
        tail._cursor = cast(Any, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    async def execute(self, statement: bytes, values: Any, **options: Any) -> Any:
        self.statement, self.values = statement, values
        return await self._cursor.execute(statement, values, **options)

    async def read(self) -> list[int]:
        return [row.id for row in await self.tail._next_rows()]

    async def read_all(self) -> None:
        """Read all rows, and write as marks do: otherwise each read goes back to where nothing was written yet."""
        quiet = 0
        while quiet < 3:
            async with self.tail._session.write() as connection:
                await connection.execute("SELECT pg_current_xact_id()")
            rows = await self.tail._next_rows()
            self.tail.forget(rows)
            quiet = 0 if rows or self.tail._positions.has_more else quiet + 1


async def test_the_first_reads_compare_with_receipts_by_one_hash(session: LaneSession, asked: Asked) -> None:
    while not (ids := await asked.read()):
        pass

    assert min(ids) > SENT
    plan = await explain(session, asked.statement, asked.values)
    check(plan)
    assert {scan["Index Name"].split("_", 2)[2] for scan in of_receipts(plan)} == {"block_idx"}
    assert sum(scan["Actual Loops"] for scan in of_receipts(plan)) <= 22, "receipts are read row by row"


async def test_a_read_at_the_head_touches_only_what_is_new(
    session: LaneSession, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "GAP", 0.0)
    await asked.read_all()

    await asked.read()

    plan = await explain(session, asked.statement, asked.values)
    check(plan)
    assert len(of_log(plan)) <= 2, "it reads segments behind it"
    assert not of_receipts(plan)
    assert sum(scan["Actual Rows"] * scan["Actual Loops"] for scan in of_log(plan)) == 0


async def test_a_read_from_far_back_goes_by_the_index_through_all_segments(
    session: LaneSession, asked: Asked, segments: str
) -> None:
    await asked.read_all()
    for lane in session.lanes.held:
        asked.tail._positions._log._lanes[lane].low = 0

    await asked.read()

    plan = await explain(session, asked.statement, asked.values)
    check(plan)
    assert len(of_log(plan)) >= (1 if segments == "one segment" else 12)


async def test_marks_and_moves_touch_one_segment(session: LaneSession, asked: Asked) -> None:
    rows: list[Row] = []
    while len(rows) < ROWS_PER_MOVE:
        rows += await asked.tail._next_rows()
    rows = [row for row in rows if row.id >> 13 == rows[0].id >> 13][:ROWS_PER_MOVE]
    ids = {"lanes": array_text(row.lane for row in rows), "ids": array_text(row.id for row in rows)}
    one = {"lane": rows[0].lane, "id": rows[0].id, "attempts": 1, "reason": "", "seconds": 1.0}
    faults = {"attempts": [1] * len(rows), "reasons": [""] * len(rows)}
    ((place, _),) = session.segments.places(rows, session.schema)
    statements: dict[str, tuple[bytes, dict[str, Any]]] = {
        "mark": (session.sql(MARK_LOGGED), receipts(row.id for row in rows) | {"node": "relay-1"}),
        "move out": (session.sql(MOVE_OUT, **place), ids),
        "postpone": (session.sql(POSTPONE, **place), one),
        "park": (session.sql(PARK, **place), ids | faults),
        "park behind": (session.sql(PARK_BEHIND, **place), ids),
        "set aside": (session.sql(SET_ASIDE, **place), ids | {"route": 1, "reason": ""}),
        "set aside behind": (session.sql(SET_ASIDE_BEHIND, **place), ids),
    }

    for name, (statement, values) in statements.items():
        plan = await explain(session, statement, values)

        read = [node for node in scans(plan) if node["Node Type"] != "ModifyTable"]
        assert {scan["Node Type"] for scan in read} <= {"Index Scan", "Tid Scan"}, (name, read)
        assert len({scan["Relation Name"] for scan in of_log(plan)}) <= 1, name
        assert sum(scan["Actual Rows"] * scan["Actual Loops"] for scan in read) <= 3 * ROWS_PER_MOVE, name


def of_log(plan: Plan) -> list[Plan]:
    return [scan for scan in scans(plan) if scan["Relation Name"].startswith("message_log_")]


def of_receipts(plan: Plan) -> list[Plan]:
    return [scan for scan in scans(plan) if scan["Relation Name"].startswith("receipt_")]


def check(plan: Plan) -> None:
    """Each table is read by its index. What was read of a lane and fits is sorted once, as without the log."""
    read = [scan for scan in scans(plan) if scan["Relation Name"] not in ("message_id_seq", "segment")]  # few rows
    assert {scan["Node Type"] for scan in read} <= {"Index Scan", "Index Only Scan"}, read
    assert [node["Sort Key"] for node in nodes(plan) if "Sort Key" in node and "Sort" in node["Node Type"]] == [
        ["with_decimals.id"]
    ]
    assert {scan["Index Name"] for scan in of_log(plan)} <= {
        f"{scan['Relation Name']}_lane_id_idx" for scan in of_log(plan)
    }
