"""The plan that PostgreSQL chooses for a statement, and what the statement reads by it."""

from typing import Any

import psycopg
from psycopg.sql import Composable

Plan = dict[str, Any]

EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
OF_LOG = ("message_log", "receipt", "checkpoint")


def explain(connection: psycopg.Connection[Any], statement: Composable | str, values: Any = None) -> Plan:
    """Return the plan of a statement. The statement is executed and rolled back."""
    text = statement if isinstance(statement, str) else statement.as_string(connection)
    with connection.transaction(force_rollback=True):
        row = connection.execute((EXPLAIN + text).encode(), values).fetchone()
    assert row is not None
    plan: Plan = row[0][0]["Plan"]
    return plan


def nodes(plan: Plan) -> list[Plan]:
    """Return the root of a plan and all nodes below it."""
    return [plan, *(node for child in plan.get("Plans", ()) for node in nodes(child))]


def scans(plan: Plan) -> list[Plan]:
    """Return the nodes that name a table: the scans, and the change of a table."""
    return [node for node in nodes(plan) if "Relation Name" in node]


def tables(plan: Plan) -> set[str]:
    """Return the names of the tables that a plan reads or changes."""
    return {node["Relation Name"] for node in scans(plan)}


def tables_beside_log(plan: Plan) -> set[str]:
    """Return the tables that a plan names but those of the log, which is empty.

    Raises:
        AssertionError: a scan of the log has found a row.
    """
    of_log = [scan for scan in scans(plan) if scan["Relation Name"].startswith(OF_LOG)]
    assert [scan["Relation Name"] for scan in of_log if scan["Actual Rows"] > 0] == []
    return tables(plan) - {scan["Relation Name"] for scan in of_log}
