"""The rule by which the log is read, with the relay's own statements on a real server: each committed row once.

Writers leave transactions open for long, roll back to savepoints, and take ids long before they insert.
The reader is killed now and then, and goes on from its last checkpoint.
"""

from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack, suppress
from random import Random
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from psycopg.errors import LockNotAvailable
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read import log_positions, log_sweep, pending, positions
from relay.engine.read.checkpoints import Checkpoints
from relay.engine.read.log_positions import Checkpoint, LogLane, LogPositions, Snapshot
from relay.engine.read.positions import OpenTransactions
from relay.engine.read.tail import Tail
from relay.engine.row import Row
from relay.engine.session.session import LaneSession
from relay.engine.settle import mark
from relay.engine.settle.mark import Delivered, Marker
from tests.engine.follower import IN_ORDER, unhurried

STEPS = 500
SEGMENT = 4096  # ids
UNNAMED = """
    SELECT id FROM outbox.message_log AS row
    WHERE NOT EXISTS (SELECT FROM outbox.receipt WHERE block = row.id >> 12 AND row.id = ANY (ids))
"""
INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', key, 'Issued', '1' FROM unnest(%s::text[]) AS key
"""
INSERT_ID = """
    INSERT INTO outbox.message (id, aggregate_type, aggregate_id, event_type, payload)
    VALUES (%s, 'customer', %s, 'Issued', '1')
"""


class Course:
    """Writers and one reader, step by step in one task.

    Attributes:
        read: the ids of all rows that were read, in that order, without those in flight at a kill.
        by_hand: ids that were taken long before their transaction began; no read foresees them.
    """

    def __init__(self, database: DatabaseSettings, seed: int, *, marks_at_once: bool = False) -> None:
        self.database = database
        self.random = Random(seed)
        self.marks_at_once = marks_at_once
        self.resources = ExitStack()
        self.session: LaneSession
        self.tail: Tail
        self.under_way: dict[int, Row] = {}
        self.read: list[int] = []
        self.by_hand: set[int] = set()
        self.taken: list[int] = []
        self.kills = 0

    async def run(self) -> None:
        url = self.database.url.get_secret_value()
        with self.resources:
            self.operator = self.resources.enter_context(psycopg.connect(url, autocommit=True))
            self.writers = [self.resources.enter_context(psycopg.connect(url)) for _ in range(6)]
            while self.operator.execute("SELECT outbox.ensure_segments(4, %s)", [SEGMENT]).fetchone() != (None,):
                pass
            self.operator.execute("ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written'")
            async with AsyncExitStack() as self.sessions:
                await self._start()
                await self._read_on()  # a sequence that was never used says that it stands at 1
                await self._read_on()
                for _ in range(STEPS):
                    await self._step(self.random.random())
                for writer in self.writers:
                    writer.commit()
                await self._read_on()
                self.read_by_rule = set(self.read)
                self.tail._sweep.begin(self.tail._positions.read_to())
                while self.tail._sweep.is_running:
                    await self.tail._tend_log()
                await self._read_on()

    async def _read_on(self) -> None:
        """Read until nothing more comes."""
        quiet = 0
        while quiet < 4:
            came = await self._read()
            quiet = 0 if came or self.under_way or self.tail._positions.has_more else quiet + 1
            await self._mark(list(self.under_way.values()))

    async def _step(self, chance: float) -> None:
        number = self.random.randrange(6)
        writer = self.writers[number]
        if chance < 0.35:
            writer.execute(INSERT, [[self._key() for _ in range(self.random.randint(1, 4))]])
        elif chance < 0.40:
            with writer.transaction(force_rollback=self.random.random() < 0.5):
                writer.execute(INSERT, [[self._key()]])
        elif chance < 0.54:
            if number > 1 or self.random.random() < 0.05:  # the first two stay open for long
                (writer.rollback if self.random.random() < 0.15 else writer.commit)()
        elif chance < 0.55:
            self.taken += [id_ for (id_,) in self.operator.execute("SELECT nextval('outbox.message_id_seq')")]
        elif chance < 0.56:
            if self.taken:
                self.by_hand.add(self.taken[0])
                self.operator.execute(INSERT_ID, [self.taken.pop(0), self._key()])
        elif chance < 0.57:
            with suppress(LockNotAvailable):  # a writer has written to the log, and is open
                self.operator.execute("SELECT outbox.cut_segment()")
                self.operator.execute("SELECT outbox.ensure_segments(4, %s)", [SEGMENT])
        elif chance < 0.90:
            await self._read()
            if self.random.random() < 0.3:
                await self.checkpoints.note()
        elif chance < 0.98:
            await self._mark([row for row in self.under_way.values() if self.random.random() < 0.6])
        else:
            await self._kill()

    def _key(self) -> str:
        return str(self.random.randrange(30))

    async def _start(self) -> None:
        self.session = await self.sessions.enter_async_context(await LaneSession.open(self.database))
        while len(self.session.lanes.held) < 16:
            self.session.lanes.take(await lock_lanes(self.session))
        retry = unhurried(self.session)
        # A window of few rows, so that reads end at their limit.
        settings = RelaySettings(max_window_rows=120, sweep_interval=3600)
        self.tail = Tail(self.session, settings, IN_ORDER, retry)
        self.checkpoints = Checkpoints(self.session, self.tail.checkpoints, retry)
        nothing: Any = None
        self.marker = Marker(
            self.session,
            self.tail,
            nothing,
            nothing,
            quarantine=nothing,
            policy=IN_ORDER,
            delivered=Delivered(),
            retry=retry,
            settings=settings,
        )

    async def _kill(self) -> None:
        """What was in flight may go out again."""
        self.kills += 1
        await self.sessions.aclose()
        self.read = [id_ for id_ in self.read if id_ not in self.under_way]
        self.under_way.clear()
        await self._start()

    async def _read(self) -> int:
        await self.tail._tend_log()
        if not self.tail._positions.has_room():
            return 0
        rows = await self.tail._next_rows()
        for row in rows:
            self.read.append(row.id)
            self.under_way[row.id] = row
        assert [row.id for row in rows] == [id_ for lane in by_lane(rows) for id_ in sorted(lane)]
        if self.marks_at_once and rows:
            await self.marker._write_sent(rows)
        return len(rows)

    async def _mark(self, rows: list[Row]) -> None:
        if not rows:
            async with self.session.write() as connection:
                await connection.execute("SELECT pg_current_xact_id()")
            return
        await self.marker._write_sent(rows)
        for row in rows:
            del self.under_way[row.id]
        self.tail.forget(rows)


def by_lane(rows: list[Row]) -> list[list[int]]:
    lanes: dict[int, list[int]] = {}
    for row in rows:
        lanes.setdefault(row.lane, []).append(row.id)
    return list(lanes.values())


async def check(database: DatabaseSettings, seed: int, **planted: bool) -> None:
    # Small ones, so that transactions grow old, and reads compare in slices, within a few rows. One task writes and
    # reads, so no time passes between a transaction id and the row's id.
    course = Course(database, seed, **planted)
    with (
        patch.multiple(positions, NEAR=60, FAR=200, GAP=0.0),
        patch.object(log_positions, "SLICE", 1000),
        patch.object(log_sweep, "SLICE", 1000),
    ):
        await course.run()
    url = database.url.get_secret_value()
    with psycopg.connect(url) as connection:
        unnamed = {id_ for (id_,) in connection.execute(UNNAMED)}
        written = {id_ for (id_,) in connection.execute("SELECT id FROM outbox.message")}
    missed = sorted(written - course.read_by_rule - course.by_hand)
    assert course.kills
    assert len(written) > 200
    assert not missed, f"{len(missed)} of {len(written)} rows are not read, first {missed[:3]}"
    assert len(course.read) == len(set(course.read)), "rows are read twice"
    assert set(course.read) == written, "the sweep has not found all"
    assert not unnamed, f"{len(unnamed)} rows have no receipt, first {sorted(unnamed)[:3]}"


@pytest.mark.parametrize("seed", range(3))
async def test_every_row_of_the_log_is_read_once_whatever_the_order_of_commits(
    database: DatabaseSettings, seed: int
) -> None:
    await check(database, seed)


def floor_past_the_limit(lane: LogLane, read_to: int, seen: Snapshot, *, low: int, base: int) -> None:
    NOTE(lane, read_to + 20, seen, low=low, base=base)


def checkpoint_at_the_floor(log: LogPositions, lane: int, _: int | None) -> Checkpoint | None:
    return CHECKPOINT(log, lane, None)


def range_over_a_gap(ids: Iterable[int]) -> dict[str, Any]:
    named = sorted(ids)
    return RECEIPTS(range(named[0], named[-1] + 1))


NOTE, CHECKPOINT, RECEIPTS = LogLane.note, LogPositions.checkpoint, mark.receipts
IS_CALLED_FORGOTTEN = SQL(pending.READ.as_string().replace("last_value - (NOT is_called)::integer", "last_value"))
BUGS: dict[str, tuple[object, str, object]] = {
    "floor by ids alone": (OpenTransactions, "floor", lambda *_: 1 << 62),
    "floor past the limit": (LogLane, "note", floor_past_the_limit),
    "checkpoint at the floor": (LogPositions, "checkpoint", checkpoint_at_the_floor),
    "no far read": (LogLane, "go_back", lambda *_: None),
    "is_called forgotten": (pending, "READ", IS_CALLED_FORGOTTEN),
    "range over a gap": (mark, "receipts", range_over_a_gap),
}


@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_is_seen(database: DatabaseSettings, bug: str) -> None:
    owner, name, planted = BUGS[bug]
    with patch.object(owner, name, planted), pytest.raises(AssertionError, match="rows are not read"):
        await check(database, 2)


async def test_a_receipt_before_the_confirm_is_seen(database: DatabaseSettings) -> None:
    with pytest.raises(AssertionError, match="rows are not read"):
        await check(database, 2, marks_at_once=True)
