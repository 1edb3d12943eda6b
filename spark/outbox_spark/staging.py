"""Staging tables: one for each task attempt that brings rows, filled in one transaction.

A name is `staging_<made at, seconds>_<hash of the batch>_<token of the save>_<attempt id>`. So the commit takes
exactly the tables that the winning attempts told it, whatever else lies around; a batch that is committed leaves
nothing of its earlier, killed attempts; and what no rerun ever cleans goes by age.
"""

import re
from collections.abc import Callable
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Identifier

from outbox_spark.plan import AGGREGATE_ID, HEADERS, MESSAGE_ID, PAYLOAD, Plan, Staging

NAME = re.compile(r"^staging_(?P<made_at>[0-9]{10})_(?P<batch>[0-9a-f]{12})_(?P<token>[0-9a-f]{10})_[0-9]+$")

LIST = SQL(r"""
    SELECT class.relname::text FROM pg_class AS class
    WHERE class.relnamespace = to_regnamespace(quote_ident(%(schema)s)) AND class.relkind = 'r'
        AND class.relname LIKE 'staging\_%%' AND pg_has_role(class.relowner, 'MEMBER')
""")


def new_staging(plan: Plan, schema: str, *, now: datetime, batch_hash: str, token: UUID) -> Staging:
    """Give the staging of one `save()`."""
    # The types are as format_type() wrote them, hence SQL that needs no quoting.
    columns = [SQL("{} {}").format(Identifier(column.name), SQL(column.type)) for column in plan.columns]
    columns += [
        SQL("{} uuid NOT NULL").format(Identifier(MESSAGE_ID)),
        SQL("{} text").format(Identifier(AGGREGATE_ID)),
        SQL("{} json NOT NULL").format(Identifier(PAYLOAD)),
    ]
    if plan.headers is not None:
        columns.append(SQL("{} jsonb").format(Identifier(HEADERS)))
    return Staging(
        schema=schema,
        quoted_schema=Identifier(schema).as_string(),
        prefix=f"staging_{int(now.timestamp()):010d}_{batch_hash}_{token.hex[:10]}",
        columns=SQL(", ").join(columns).as_string(),
    )


def drop_leftovers(connection: psycopg.Connection, schema: str, *, batch_hash: str) -> list[str]:
    """Drop every staging table of a committed batch; tell the names."""
    return _drop(connection, schema, lambda name: name["batch"] == batch_hash)


def drop_attempts(connection: psycopg.Connection, staging: Staging) -> list[str]:
    """Drop the staging tables of one `save()`; tell the names."""
    return _drop(connection, staging.schema, lambda name: name[0].startswith(f"{staging.prefix}_"))


def drop_aged(connection: psycopg.Connection, schema: str, *, now: datetime, max_age: float) -> list[str]:
    """Drop the staging tables made longer ago than `max_age` seconds, of whatever batch; tell the names."""
    return _drop(connection, schema, lambda name: int(name["made_at"]) < now.timestamp() - max_age)


def _drop(connection: psycopg.Connection, schema: str, is_dead: Callable[[re.Match[str]], bool]) -> list[str]:
    dropped = []
    for (relation,) in connection.execute(LIST, {"schema": schema}).fetchall():
        name = NAME.match(relation)
        if name is None or not is_dead(name):
            continue
        try:
            with connection.transaction():
                # A twin that is still loading holds its table: it is left, and goes by age.
                connection.execute("SET LOCAL lock_timeout = '500ms'")
                connection.execute(SQL("DROP TABLE IF EXISTS {}").format(Identifier(schema, relation)))
        except psycopg.errors.LockNotAvailable:
            continue
        dropped.append(relation)
    return dropped
