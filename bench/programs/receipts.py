"""`relay run` on a log of rows (bench/frame/receipts.py), with receipts as marks: `python -m bench.programs.receipts`.

Everything else is the relay's own. It carries plain rows only: no delay, no fault, no row that is too large for its
share of a read. It learns nothing from receipts, so the log must be empty when it starts.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import psycopg

from bench.frame.receipts import (
    BLOCK_BITS,
    MARK_RECEIPTS,
    PLAN_ONCE,
    Sight,
    Snapshot,
    read_log_statement,
    receipts,
    sight_parameters,
)
from relay.cli import main
from relay.config.settings import RelaySettings
from relay.engine import node
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.positions import Plan
from relay.engine.read.tail import DUE_INTERVAL, Tail
from relay.engine.row import Row, fetch_rows
from relay.engine.session.session import LaneSession, Retry, array_text
from relay.engine.settle import mark


class MarkByReceipts(mark.MarkSent):
    """How rows are marked as sent: receipts name them."""

    def __init__(self, session: LaneSession) -> None:
        self._statement = session.sql(MARK_RECEIPTS, bits=BLOCK_BITS)

    async def write(self, connection: psycopg.AsyncConnection, rows: Sequence[Row], node: str) -> int:
        """Name rows and count them for the node, in one transaction; return their number."""
        await connection.execute(self._statement, receipts([row.id for row in rows], node), prepare=True)
        return len(rows)


class LogTail(Tail):
    """The rows of the log that were not read yet: a row that is read is known by its lane's `Sight`, sent or not."""

    def __init__(self, session: LaneSession, settings: RelaySettings, policy: DeliveryPolicy, retry: Retry) -> None:
        super().__init__(session, settings, policy, retry)
        self.statement = read_log_statement(session, settings.max_message_bytes)
        self._sights = defaultdict[int, Sight](Sight)
        self._reads: list[tuple[Plan, Row, list[Row]]] = []
        self._is_planned_once = False

    async def _next_rows(self) -> list[Row]:
        self._reads.clear()
        rows = await super()._next_rows()
        plan, head, found = self._reads.pop()  # the plans before it were not far enough, and their rows are not used
        if any(row.left_out for row in found):
            raise NotImplementedError("a row is left out of a read: the log's tail carries small rows only")
        ids: defaultdict[int, list[int]] = defaultdict(list)
        for row in found:
            ids[row.lane].append(row.id)
        snapshot = Snapshot.of(head.message_id.decode())
        for lane, low in zip(plan.lanes, plan.floors, strict=True):
            self._sights[lane].note(ids[lane], plan.rows, low, position=head.id, snapshot=snapshot)
        return rows

    async def _select(self, plan: Plan) -> tuple[Row, list[Row]]:
        parameters = sight_parameters([self._sights[lane] for lane in plan.lanes], plan.floors) | {
            "lanes": array_text(plan.lanes),
            "rows": plan.rows,
            "bytes": array_text(plan.bytes[lane] for lane in plan.lanes),
        }
        if not self._is_planned_once:
            async with self._session.use() as connection:
                await connection.execute(PLAN_ONCE)
            self._is_planned_once = True
        async with self._session.use():
            asked_at = time.monotonic()
            await self._cursor.execute(self.statement, parameters, prepare=True)
            head, *rows = await fetch_rows(self._cursor)
        self._clock_offset = head.created_at - asked_at * 1e6
        self._due_at = max(time.monotonic() + head.backoff_ms / 1000, self._looked_at + DUE_INTERVAL)
        self._reads.append((plan, head, rows))
        return head, rows


if __name__ == "__main__":
    node.Tail = LogTail  # type: ignore[attr-defined]
    mark.MarkSent = MarkByReceipts  # type: ignore[misc]
    sys.exit(main(["run"]))
