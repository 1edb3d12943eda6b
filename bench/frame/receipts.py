"""A log of rows that stay where they were inserted, and receipts that name those that are sent.

It is not in the product. `bench.marks` measures it next to the product's tables: the same `INSERT INTO outbox.message`
writes into `message_pending` there, and into a segment of the log here.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import LiteralString

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from bench.frame.error import BenchmarkError
from relay.engine.read.pending import read_statement
from relay.engine.session.session import LaneSession, array_text

SEGMENT = "message_log_0"  # takes the first 2^24 ids, more than a bench gives
SEGMENTS = 20
SEGMENT_BITS = 24
BLOCK_BITS = 12


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
        SELECT lane, low, floor, bytes, seen_to, unseen::bigint[]
        FROM unnest(%(lanes)s::smallint[], %(lows)s::bigint[], %(floors)s::bigint[], %(bytes)s::bigint[],
            %(seen_to)s::bigint[], %(unseen)s::text[]) AS given (lane, low, floor, bytes, seen_to, unseen)
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
                                ORDER BY id
                            ) UNION ALL (
                                SELECT * FROM outbox.{SEGMENT}
                                WHERE lane = owned.lane AND id > owned.floor
                                ORDER BY id
                                LIMIT %(rows)s
                            )
                        ) AS found
                        ORDER BY id"""


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
    texts = (",".join(map(str, of_block)) for _, of_block in blocks)
    return {"node": node, "messages": len(ids), "receipts": "{" + ",".join(f'"{{{text}}}"' for text in texts) + "}"}


@dataclass(slots=True)
class Sight:
    """What a reader knows of a lane: its rows up to `floor` that the snapshot could see were read.

    Attributes:
        seen_to: the snapshot: it could see transactions below.
        unseen: but not these, as they were running; an array of PostgreSQL.
    """

    floor: int = 0
    seen_to: int = 0
    unseen: str = "{}"

    def advance(self, floor: int, snapshot: bytes) -> None:
        """Note that the lane was read up to there, by a statement with that snapshot."""
        _, seen_to, unseen = snapshot.decode().split(":")
        self.floor, self.seen_to, self.unseen = floor, int(seen_to), f"{{{unseen}}}"


def sight_parameters(sights: Sequence[Sight]) -> dict[str, str]:
    """Return the parameters of the log's READ that today's has not, or other ones; the lanes in its order."""
    return {
        "floors": array_text(sight.floor for sight in sights),
        "seen_to": array_text(sight.seen_to for sight in sights),
        "unseen": "{" + ",".join(f'"{sight.unseen}"' for sight in sights) + "}",
    }


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
