"""A log of rows that stay where they were inserted, and receipts that name those that are sent.

It is not in the product. `bench.marks` measures it next to the product's tables: the same `INSERT INTO outbox.message`
writes into `message_pending` there, and into a segment of the log here.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from itertools import groupby
from typing import LiteralString, NamedTuple

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from bench.frame.error import BenchmarkError
from relay.engine.read.pending import read_statement
from relay.engine.session.session import LaneSession, array_text

SEGMENT = "message_log_0"  # takes the first 2^24 ids, more than a bench gives
SEGMENTS = 20
SEGMENT_BITS = 24
BLOCK_BITS = 12
LAST = (1 << 63) - 1  # above every id and transaction


class TransactionId(StrEnum):
    """The default of `xid` in a row of the log, by which a later read tells what an earlier snapshot could not see."""

    MISSING = "NULL"
    XID8 = "pg_current_xact_id()"
    BIGINT = "pg_current_xact_id()::text::bigint"


# As small as it can be with the costs of the real one: two steps of routing, two indexes, a DEFAULT partition.
MAKE_LOG: LiteralString = """
    ALTER TABLE outbox.message ADD COLUMN xid {type};
    ALTER TABLE ONLY outbox.message ALTER COLUMN xid SET DEFAULT {xid};
    ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written';
    CREATE TABLE outbox.message_log PARTITION OF outbox.message FOR VALUES IN ('written') PARTITION BY RANGE (id);
    CREATE UNIQUE INDEX message_log_lane_id ON outbox.message_log (lane, id);
    CREATE TABLE outbox.message_log_far PARTITION OF outbox.message_log DEFAULT;
    CREATE TABLE outbox.receipt (
        block bigint NOT NULL,
        n integer NOT NULL,
        sent_at timestamptz NOT NULL DEFAULT now(),
        node text,
        ids bigint[] NOT NULL,
        CONSTRAINT receipt_ids CHECK (
            n > 0 AND n = cardinality(ids) AND ids[1] >> {bits} = block AND ids[n] >> {bits} = block
        )
    ) PARTITION BY RANGE (block);
    CREATE INDEX receipt_block ON outbox.receipt (block);
    CREATE TABLE outbox.receipt_far PARTITION OF outbox.receipt DEFAULT;
"""
# For xid8, BRIN has no class of operators.
MAKE_XID_INDEX: LiteralString = """
    CREATE INDEX message_log_xid ON outbox.message_log USING brin (({xid}) int8_minmax_multi_ops)
        WITH (pages_per_range = 32)
"""
MAKE_SEGMENT: LiteralString = """
    CREATE TABLE outbox.{log} PARTITION OF outbox.message_log FOR VALUES FROM ({first}) TO ({past});
    CREATE TABLE outbox.{receipts} PARTITION OF outbox.receipt FOR VALUES FROM ({first_block}) TO ({past_block});
"""

# As today's mark, it counts in its own transaction. A receipt has the ids of one block, ascending.
MARK_RECEIPTS = SQL("""
    WITH counted AS (
        INSERT INTO {schema}.published (node, messages) VALUES (%(node)s, %(messages)s)
    )
    INSERT INTO {schema}.receipt (block, n, node, ids)
    SELECT ids[1] >> {bits}, cardinality(ids), %(node)s, ids
    FROM (SELECT text::bigint[] AS ids FROM unnest(%(receipts)s::text[]) AS text) AS named
""")

# READ's places of the lanes and of the rows, as they are in the log: first the rows that the last read's snapshot could
# not see, all of them, then those above the floor. One segment by its name, and never joined with receipts.
LANES_OF_READ = "unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(bytes)s::bigint[]) AS owned (lane, floor, bytes)"
LANES_OF_LOG = """(
        SELECT lane, low, floor, ahead, bytes, seen_to, unseen::bigint[], until, running::bigint[]
        FROM unnest(%(lanes)s::smallint[], %(lows)s::bigint[], %(floors)s::bigint[], %(ahead)s::bigint[],
            %(bytes)s::bigint[], %(seen_to)s::bigint[], %(unseen)s::text[], %(until)s::bigint[], %(running)s::text[])
            AS given (lane, low, floor, ahead, bytes, seen_to, unseen, until, running)
        OFFSET 0
    ) AS owned"""
ROWS_OF_READ = re.compile(
    r"FROM \S+\.message\s+WHERE state = 'pending' AND lane = owned\.lane .*?LIMIT %\(rows\)s", re.DOTALL
)
ROWS_OF_LOG = f"""FROM (
                            (
                                SELECT * FROM outbox.{SEGMENT}
                                WHERE lane = owned.lane AND id > owned.low AND id <= owned.floor
                                    AND (xid >= owned.seen_to OR xid = ANY (owned.unseen))
                                    AND xid < owned.until AND xid <> ALL (owned.running)
                                ORDER BY id
                                LIMIT %(rows)s
                            ) UNION ALL (
                                SELECT * FROM outbox.{SEGMENT}
                                WHERE lane = owned.lane AND id > owned.ahead
                                ORDER BY id
                                LIMIT %(rows)s
                            )
                        ) AS found
                        ORDER BY id
                        LIMIT %(rows)s"""
# Planning by values costs more than the read itself when there is little to read.
PLAN_ONCE = "SET plan_cache_mode = force_generic_plan"


def make_log(database_url: str, xid: TransactionId = TransactionId.BIGINT) -> None:
    """Add the log to a migrated database, and let writers write into it."""
    kind = "xid8" if xid is TransactionId.XID8 else "bigint"
    with psycopg.connect(database_url) as connection:
        connection.execute(
            SQL(MAKE_LOG).format(type=SQL(kind), xid=SQL(xid.value), bits=Literal(BLOCK_BITS)),
        )
        if xid is not TransactionId.MISSING:
            expression = SQL("xid::text::bigint" if xid is TransactionId.XID8 else "xid")
            connection.execute(SQL(MAKE_XID_INDEX).format(xid=expression))
        for number in range(SEGMENTS):
            bounds = {"first": number << SEGMENT_BITS, "past": (number + 1) << SEGMENT_BITS}
            blocks = {f"{name}_block": bound >> BLOCK_BITS for name, bound in bounds.items()}
            tables = {"log": Identifier(f"message_log_{number}"), "receipts": Identifier(f"receipt_{number}")}
            values = {name: Literal(bound) for name, bound in (bounds | blocks).items()}
            connection.execute(SQL(MAKE_SEGMENT).format(**tables, **values))


def receipts(ids: Collection[int], node: str) -> dict[str, str | int]:
    """Return the parameters of MARK_RECEIPTS."""
    blocks = groupby(sorted(ids), lambda id_: id_ >> BLOCK_BITS)
    return {"node": node, "messages": len(ids), "receipts": _texts(array_text(of_block) for _, of_block in blocks)}


class Snapshot(NamedTuple):
    """What a statement could see: transactions below `until` except the running ones, an array of PostgreSQL."""

    until: int
    running: str

    @classmethod
    def of(cls, text: str) -> "Snapshot":
        _, until, running = text.split(":")
        return cls(int(until), f"{{{running}}}")


NOTHING, EVERYTHING = Snapshot(0, "{}"), Snapshot(LAST, "{}")


class Sight:
    """What a reader knows of a lane: it has read the rows up to `floor` that the snapshot `seen` could see.

    Below the floor, a long transaction may leave more rows than a read brings. Until they are read, in the order of
    their ids, nothing above is. Each read then looks only for what the first of these reads could see (`until`).
    """

    def __init__(self) -> None:
        self.floor = 0
        self.seen = NOTHING
        self.until: Snapshot | None = None
        self._read_to = 0  # of the rows below the floor, until all of them are read
        self._low = LAST  # from where to look below the floor when they are

    def low(self, asked: int) -> int:
        """Return the id above which to look below the floor; the caller asks for `asked`."""
        return self._read_to if self.until else min(asked, self._low)

    def note(self, ids: Sequence[int], rows: int, low: int, *, position: int, snapshot: Snapshot) -> None:
        """Note a read that brought these ids, `rows` at most, and was asked to look above `low`."""
        is_full = len(ids) >= rows
        if is_full and ids[-1] <= self.floor:
            self._low = min(self._low, low) if self.until else LAST
            self.until, self._read_to = self.until or snapshot, ids[-1]
        elif self.until:
            self.seen, self.until, self._low = self.until, None, min(self._low, low)
        else:
            self.floor, self.seen, self._low = ids[-1] if is_full else position, snapshot, LAST


def sight_parameters(sights: Sequence[Sight], lows: Sequence[int]) -> dict[str, str]:
    """Return the parameters of the log's READ that today's has not, or other ones; the lanes in its order."""
    until = [sight.until or EVERYTHING for sight in sights]
    return {
        "lows": array_text(sight.low(low) for sight, low in zip(sights, lows, strict=True)),
        "floors": array_text(sight.floor for sight in sights),
        "ahead": array_text(LAST if sight.until else sight.floor for sight in sights),
        "seen_to": array_text(sight.seen.until for sight in sights),
        "unseen": _texts(sight.seen.running for sight in sights),
        "until": array_text(each.until for each in until),
        "running": _texts(each.running for each in until),
    }


def _texts(arrays: Iterable[str]) -> str:
    """Return an array of texts that are arrays of numbers."""
    return "{" + ",".join(f'"{each}"' for each in arrays) + "}"


def read_log_statement(session: LaneSession, max_message_bytes: int) -> bytes:
    """Return the tail's READ, of the log: the same columns, sizes and head.

    Raises:
        BenchmarkError: READ no longer has the places that are changed.
    """
    statement = read_statement(session, max_message_bytes).decode()
    statement, rows = ROWS_OF_READ.subn(lambda _: ROWS_OF_LOG, statement)
    if rows != 1 or statement.count(LANES_OF_READ) != 1:
        raise BenchmarkError("the relay reads otherwise than bench/frame/receipts.py knows")
    return statement.replace(LANES_OF_READ, LANES_OF_LOG).encode()
