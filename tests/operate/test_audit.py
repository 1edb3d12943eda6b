"""The list of the audit does not read the rows of jobs: there may be millions."""

from typing import LiteralString

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from relay.operate.audit import LETTERS, READ, ROWS, SOURCES
from tests.support.plans import explain, scans

OUTBOX = Identifier("outbox")
WRITE_ROWS = """
    INSERT INTO outbox.operator_audit (command, target, done_by, job)
    SELECT 'parked retry', '1', 'ada', %s FROM generate_series(1, %s)
"""
WRITE_LETTERS = """
    INSERT INTO outbox.dead_letter_audit (command, queue, done_by, why, job)
    SELECT 'retry', 'billing', 'ada', 'mended', %s FROM generate_series(1, %s)
"""


@pytest.mark.parametrize(("source", "write"), [(ROWS, WRITE_ROWS), (LETTERS, WRITE_LETTERS)], ids=["rows", "letters"])
def test_rows_of_jobs_are_not_read_where_they_are_not_shown(
    connection: psycopg.Connection, source: SQL, write: LiteralString
) -> None:
    (listed,) = [listed for each, listed, _ in SOURCES if each is source]
    connection.execute(write, [None, 50])
    connection.execute(write, [7, 5000])
    connection.execute("ANALYZE outbox.operator_audit, outbox.dead_letter_audit")
    statement = READ.format(source=source.format(schema=OUTBOX), is_listed=listed)
    values = dict.fromkeys(("by", "command", "job", "since", "until")) | {"before": 10**9, "limit": 101}

    (scan,) = scans(explain(connection, statement, values))

    assert scan["Actual Rows"] == 50
    assert scan["Index Name"].endswith("_listed")
    assert "Rows Removed by Filter" not in scan
