"""Staging tables: one for each task attempt that brings rows, filled in one transaction.

A name is `staging_<made at, seconds>_<hash of the batch>_<token of the save>_<attempt id>`. So the commit takes
exactly the tables that the winning attempts told it, whatever else lies around; a batch that is committed leaves
nothing of its earlier, killed attempts; and what no rerun ever cleans goes by age.

The same name without an attempt is the pattern of a `save()`, an empty table that its attempts copy. Spark does not
wait for the tasks that it kills: dropping the pattern first waits for those that load, and the rest find it gone.
So do the tasks of a slower driver at the same batch, whose commit then finds the batch in the ledger.
A stream has no pattern, as nobody there could drop it: what its killed attempts leave goes with its next commit.
"""

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from outbox_spark.plan import Plan, Staging, of_outbox

NAME = re.compile(r"^staging_(?P<made_at>[0-9]{10})_(?P<batch>[0-9a-f]{12})_(?P<token>[0-9a-f]{10})(_[0-9]+)?$")

# Longer than Spark takes to kill the Python worker of a task (spark.python.task.killTimeout, 2 s).
KILLED_WITHIN = "10s"

LIST = SQL(r"""
    SELECT class.relname::text FROM pg_class AS class
    WHERE class.relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND class.relkind = 'r'
        AND class.relname LIKE 'staging\_%%' AND pg_has_role(class.relowner, 'MEMBER')
""")


def name_staging(schema: str, *, now: datetime, batch_hash: str, token: UUID, plan: Plan | None = None) -> Staging:
    """Give the names of one `save()`.

    Args:
        plan: of a stream, whose tables follow no pattern.
    """
    quoted_schema = Identifier(schema).as_string()
    prefix = f"staging_{int(now.timestamp()):010d}_{batch_hash}_{token.hex[:10]}"
    columns = f"LIKE {quoted_schema}.{prefix}" if plan is None else _columns(plan).as_string()
    return Staging(schema, quoted_schema, prefix, columns)


def make_pattern(connection: psycopg.Connection, staging: Staging, plan: Plan) -> None:
    """Make the table that the attempts copy."""
    pattern = Identifier(staging.schema, staging.prefix)
    connection.execute(SQL("CREATE UNLOGGED TABLE {} ({})").format(pattern, _columns(plan)))


def _columns(plan: Plan) -> Composed:
    # The types are as format_type() wrote them, hence SQL that needs no quoting.
    columns = [SQL("{} {}").format(Identifier(column.name), SQL(column.type)) for column in plan.columns]
    if plan.event is not None:
        types = {"message_id": "uuid NOT NULL", "payload": "json NOT NULL", "headers": "jsonb"}
        columns += [
            SQL("{} {}").format(Identifier(of_outbox(name)), SQL(types.get(name, "text")))
            for name in plan.event.columns
        ]
    return SQL(", ").join(columns)


def drop_leftovers(connection: psycopg.Connection, schema: str, *, batch_hash: str) -> list[str]:
    """Drop every staging table of a committed batch; tell the names."""
    return _drop(connection, schema, lambda name: name["batch"] == batch_hash)


def drop_attempts(connection: psycopg.Connection, staging: Staging, *, patience: str) -> list[str]:
    """Drop the staging tables of one `save()`; tell the names.

    Args:
        patience: how long to wait for attempts that still load; those that take longer go by age.
    """
    _drop_table(connection, staging.schema, staging.prefix, patience=patience)
    return _drop(connection, staging.schema, lambda name: name[0].startswith(staging.prefix))


def drop_tables(connection: psycopg.Connection, schema: str, tables: Iterable[str]) -> None:
    """Drop these staging tables, unless somebody holds them: those go by age."""
    for table in tables:
        _drop_table(connection, schema, table, patience="500ms")


def drop_aged(connection: psycopg.Connection, schema: str, *, now: datetime, max_age: float) -> list[str]:
    """Drop the staging tables made longer ago than `max_age` seconds, of whatever batch; tell the names."""
    return _drop(connection, schema, lambda name: int(name["made_at"]) < now.timestamp() - max_age)


def _drop(connection: psycopg.Connection, schema: str, is_dead: Callable[[re.Match[str]], bool]) -> list[str]:
    dropped = []
    for (relation,) in connection.execute(LIST, {"schema": schema}).fetchall():
        name = NAME.match(relation)
        if name is None or not is_dead(name):
            continue
        if _drop_table(connection, schema, relation, patience="500ms"):
            dropped.append(relation)
    return dropped


def _drop_table(connection: psycopg.Connection, schema: str, table: str, *, patience: str) -> bool:
    """Drop a table if it is there; False when somebody holds it for longer than `patience`."""
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [patience])
            connection.execute(SQL("DROP TABLE IF EXISTS {}").format(Identifier(schema, table)))
    except psycopg.errors.LockNotAvailable:
        return False
    return True
