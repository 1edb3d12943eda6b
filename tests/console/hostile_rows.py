"""Rows as hostile as the tables take them: each column that a lesser role may write, with each value of its type.

The columns are those of config/roles.sql on this database, so that a new one is covered by itself.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from itertools import cycle
from typing import Any

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal

from tests.console.filled import fill
from tests.support.roles import NAMES, granted_roles

MOMENT = "timestamp with time zone"
TEXTS = [
    "", " ", "'\"`;--", "\x1b[2J\x1b]0;x\x07", "\r\n\t\x01\x7f", "x" * 3_000, "\u202eevil\u200f", "\u0301\u0301",
    "%s %(x)s {} {0.__class__} $1", "<script>alert(1)</script>", "\U0001f600", "../../x?a=b&c#d", "NULL", "infinity",
    "\ufeff", "9" * 50, "waits behind message " + "9" * 50,
]  # fmt: skip
ARRAYS = ["{}", "{NULL}", "{{1,2},{3,4}}", "[5:6]={1,2}", "{-32768,32767}", "{7,7}"]
VALUES: dict[str, Sequence[str]] = {
    MOMENT: [
        "infinity", "-infinity", "294276-12-31 23:59:59.999999+00", "4714-11-24 00:00:00+00 BC",
        "0001-01-01 00:00:00+14", "9999-12-31 23:59:59.999999-14", "10000-01-01 00:00:00+00", "1970-01-01 00:00:00+00",
    ],
    "date": ["infinity", "-infinity", "5874897-12-31", "4714-11-24 BC", "0001-01-01", "9999-12-31", "10000-01-01"],
    "text": TEXTS,
    "name": TEXTS,
    "smallint": ["-32768", "32767", "-1", "0"],
    "integer": ["-2147483648", "2147483647", "-1", "0"],
    "bigint": ["-9223372036854775808", "9223372036854775807", "-1", "0", "4294967296"],
    "numeric": ["NaN", "Infinity", "-Infinity", "1e1000", "-1", "0", "1e-100"],
    "double precision": ["NaN", "Infinity", "-Infinity", "1e308", "-1e308", "5e-324", "0", "-1"],
    "boolean": ["true", "false"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "bytea": ["\\x", "\\x00ff1b5b324a", "\\x" + "ff" * 3_000],
    "jsonb": [
        "{}", "[]", "null", "1", '"x"', "[" * 3_000 + "]" * 3_000,
        '{"a":' * 3_000 + "1" + "}" * 3_000, '{"a":' * 150 + "1" + "}" * 150,
        '{"n": 1e400}', '{"n": ' + "9" * 5_000 + "}",
        '{"since": "infinity", "until": 7, "ids": "x", "group": [], "key": {}, "event_type": null}',
        '{"rows": "x", "table": 7, "messages": -1, "seconds": 1e999, "repeats": []}',
        '{"rows": {}, "seconds": null, "x": "<script>"}', '{"": "\\u001b[2J", "traceparent": 7, "%s": {"{}": []}}',
        '{"since": "294276-01-01", "message_ids": [7, null], "ids": [1e30], "queue": 7, "route": "x"}',
    ],
    "text[]": ["{}", "{NULL}", '{{a,b},{c,d}}', '{"\x1b[2J","<script>"}', "{" + ",".join("x" * 300) + "}"],
    "smallint[]": ARRAYS,
    "bigint[]": [*ARRAYS, "{-9223372036854775808,9223372036854775807}"],
}  # fmt: skip
VALUES = {**VALUES, "json": VALUES["jsonb"]}
COPIED = ("pending", "sent", "parked", "quarantined")  # rows of other states are made of a parked one
STATES = (*COPIED, "archived", "discarded")

# A row of each table that `fill` leaves empty.
MORE = """
    INSERT INTO outbox.api_answer (done_by, key, request, begun_at) VALUES ('ada', 'k', '', now());
    INSERT INTO outbox.begun_message (consumer_name, message_id, begun, begun_at)
        VALUES ('billing', gen_random_uuid(), 1, now());
    INSERT INTO outbox.consumer_queue (consumer_name, queue) VALUES ('billing', 'billing');
    INSERT INTO outbox.job_row (job_id, id, lane) VALUES (1, 1, 1);
    INSERT INTO outbox.lane_floor (lane, floor, watermark, running, since) VALUES (3, 1, 1, '{}', '{}');
    INSERT INTO outbox.lane_pause (lane, paused_by, paused_why) VALUES (15, 'ada', 'a test');
    INSERT INTO outbox.published (node, messages) VALUES ('relay-1', 5);
"""
COLUMNS = """
    SELECT DISTINCT relname, attname, format_type(atttypid, NULL)
    FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid, unnest(%s::text[]) AS role
    WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
        AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
        AND (has_column_privilege(role, pg_class.oid, attnum, 'INSERT')
            OR has_column_privilege(role, pg_class.oid, attnum, 'UPDATE'))
    ORDER BY relname, attname
"""
TAKEN = """
    SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
    WHERE attrelid = format('outbox.%%I', %s::text)::regclass AND attnum > 0 AND NOT attisdropped
        AND attidentity = '' AND attgenerated = ''
    ORDER BY attnum
"""
KEYS = """
    SELECT DISTINCT attname FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)
    WHERE indrelid = format('outbox.%%I', %s::text)::regclass AND indisunique AND NOT EXISTS (
        SELECT FROM pg_constraint WHERE contype = 'f' AND conrelid = indrelid AND attnum = ANY (conkey)
    )
"""


FRESH = {
    "text": SQL("'fresh-' || {number}"),
    "name": SQL("'fresh-' || {number}"),
    "uuid": SQL("gen_random_uuid()"),
    "date": SQL("current_date - {number}"),
    MOMENT: SQL("now() - {number} * interval '1 second'"),
    **dict.fromkeys(("smallint", "integer", "bigint"), SQL("100 + {number}")),
}
FEW = ("lane_pause", "pool_master")  # they take no further row: each round of `change_few` writes over what they have


@dataclass(slots=True)
class Planted:
    """What a database took of it.

    Attributes:
        columns: those that lesser roles may write, by table, with their types.
        taken: how many values the table took of each column.
        refused: SQLSTATEs by which it refused others.
    """

    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[tuple[str, str], set[str]] = field(default_factory=dict)


def prepare(url: str) -> Planted:
    """Fill an outbox, without a hostile row."""
    fill(url)
    planted = Planted()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(MORE)
        with granted_roles(connection):
            for table, column, kind in connection.execute(COLUMNS, [list(NAMES)]).fetchall():
                planted.columns.setdefault(table, {})[column] = kind
    return planted


def plant(url: str) -> Planted:
    """Fill an outbox, and add a row for each column and value; what a table refuses is left out."""
    planted = prepare(url)
    with psycopg.connect(url, autocommit=True) as connection:
        for table, columns in planted.columns.items():
            if table not in FEW:
                _fill_table(connection, table, columns, planted)
    return planted


def change_few(url: str, planted: Planted, turn: int) -> bool:
    """Write the value of this turn into each column of the tables of few rows; return whether any is left."""
    is_left = False
    with psycopg.connect(url, autocommit=True) as connection:
        for table in FEW:
            for column, kind in planted.columns[table].items():
                if turn >= len(VALUES[kind]):
                    continue
                is_left = True
                change = SQL("UPDATE {} SET {} = {}").format(
                    Identifier("outbox", table), Identifier(column), Literal(VALUES[kind][turn])
                )
                try:
                    connection.execute(change)
                    planted.taken[table, column] += 1
                except psycopg.Error as error:
                    planted.refused.setdefault((table, column), set()).add(str(error.sqlstate))
    return is_left


def _fill_table(connection: psycopg.Connection[Any], table: str, columns: dict[str, str], planted: Planted) -> None:
    names = dict(connection.execute(TAKEN, [table]).fetchall())
    keys = {name for (name,) in connection.execute(KEYS, [table])} & names.keys()
    if len(keys) > 1:
        keys -= {"message_day"}  # there must be a partition for it
    states, numbers = cycle(STATES), counting()
    for column, kind in columns.items():
        kept = [name for name in names if name != column]
        for value, state in [(value, state) for value in VALUES[kind] for state in _states(table, kind, states)]:
            chosen = _chosen(names, keys, next(numbers), state)
            if column == "payload_bytes":
                chosen["payload"] = SQL("NULL")
            # A role that may insert into an identity column may override it.
            copy = SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {} WHERE {} LIMIT 1").format(
                Identifier("outbox", table),
                SQL(", ").join(map(Identifier, [*kept, column])),
                SQL(", ").join([*(chosen.get(name, Identifier(name)) for name in kept), Literal(value)]),
                Identifier("outbox", table),
                SQL("state = {}").format(Literal(state if state in COPIED else "parked")) if state else SQL("true"),
            )
            try:
                planted.taken[table, column] += connection.execute(copy).rowcount
            except psycopg.Error as error:
                planted.refused.setdefault((table, column), set()).add(str(error.sqlstate))


def _chosen(names: dict[str, str], keys: set[str], number: int, state: str | None) -> dict[str, Composable]:
    """Return what a copy has in place of the values of its row: a fresh key, and the state of a message."""
    fresh = {key: SQL("{number} % 16") if key == "partition" else FRESH[names[key]] for key in keys}
    chosen: dict[str, Composable] = {key: value.format(number=number) for key, value in fresh.items()}
    return chosen if state is None else {**chosen, **_of_message(state)}


def _states(table: str, kind: str, states: Iterator[str]) -> Sequence[str | None]:
    """Return the states in which a message gets a value: a moment decides something in each."""
    if table != "message":
        return [None]
    return STATES if kind == MOMENT else [next(states)]


def _of_message(state: str) -> dict[str, Composable]:
    return {
        "id": SQL("nextval('outbox.message_id_seq')"),
        "message_id": SQL("gen_random_uuid()"),
        "state": Literal(state),
        "aggregate_id": SQL("aggregate_id || '-' || currval('outbox.message_id_seq')"),
    }
