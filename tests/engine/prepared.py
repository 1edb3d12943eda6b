"""The plan of a prepared statement, as the relay's session runs it: one plan for all values."""

import re
from typing import Any

from psycopg.sql import SQL, Literal

from relay.engine.session.session import LaneSession
from tests.support.plans import EXPLAIN, Plan

PLACEHOLDER = re.compile(r"%\((\w+)\)s")


async def explain(session: LaneSession, statement: bytes, values: dict[str, Any]) -> Plan:
    """Return the plan of a statement that is prepared, executed and rolled back."""
    text = statement.decode()
    names = list(dict.fromkeys(PLACEHOLDER.findall(text)))
    prepared = PLACEHOLDER.sub(lambda match: f"${names.index(match[1]) + 1}", text).replace("%%", "%")
    arguments = SQL(", ").join(Literal(values[name]) for name in names)
    async with session.use() as connection, connection.transaction(force_rollback=True):
        await connection.execute(f"PREPARE asked AS {prepared}".encode())
        cursor = await connection.execute(SQL(EXPLAIN) + SQL("EXECUTE asked ({})").format(arguments))
        row = await cursor.fetchone()
        await connection.execute("DEALLOCATE asked")
    assert row is not None
    plan: Plan = row[0][0]["Plan"]
    return plan
