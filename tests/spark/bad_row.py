"""The table of bad rows, made by the statement of docs/spark.md."""

import re
from pathlib import Path

import psycopg

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


def make_bad_row_table(connection: psycopg.Connection) -> None:
    """Make billing.bad_row."""
    found = re.search(r"```sql\n(CREATE TABLE billing\.bad_row .*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert found is not None
    connection.execute(found[1].encode())
