"""The reconciliation must be able to fail: each way in which the demo could lie is tried once."""

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from rich.console import Console

from demo.__main__ import TABLES, conclude
from demo.rates import read_clock, read_stages
from demo.reconcile import (
    Processes,
    Purchases,
    Reconciliation,
    count_purchases,
    count_tables,
)
from demo.report import Report

CONSUMER_SAYS = Processes(applied=3, duplicates=1, left_in_queue=0)

FILE = """ customer_id  date number_of_cds  dollar_value
 00001 19970101  1   11.77
 00002 19970112  1   12.00
 00002 19970112  5   77.10
 00003 19970199  what is this
"""

# As after a run: three invoices, all sent and projected, one of them replayed, and a line in quarantine.
AFTER_A_RUN = """
    INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts)
        VALUES ('cdnow', 1, 1, gen_random_uuid(), '{}');
    INSERT INTO billing.quarantine (app_id, version, file, line_number, reason, line)
        VALUES ('cdnow', 1, 'purchases.txt', 5, 'no date', ' 00003 19970199  what is this');
    INSERT INTO billing.invoice (invoice_id, customer_id, issued_on, quantity, amount) VALUES
        ('00001-1', '00001', '1997-01-01', 1, 11.77),
        ('00002-1', '00002', '1997-01-12', 1, 12.00),
        ('00002-2', '00002', '1997-01-12', 5, 77.10);
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, writer, batch_id, state, sent_at)
        SELECT 'customer', customer_id, 'InvoiceIssued', '{}', 'cdnow', 1, 'sent', now() FROM billing.invoice;
    INSERT INTO billing.invoice_projection SELECT * FROM billing.invoice;
    INSERT INTO outbox.node (name, backend_pid, published_total, version) VALUES ('demo', 1, 3, '0');
    INSERT INTO outbox.job (made_by, filter, state, selected, done) VALUES ('demo', '{}', 'done', 1, 1)
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connected:
        connected.execute(TABLES.read_bytes())
        yield connected


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "purchases.txt"
    path.write_bytes(FILE.replace("\n", "\r\n").encode())
    return path


def reconcile(connection: psycopg.Connection, database_url: str, file: Path, spoil: str = "") -> Reconciliation:
    """Do a run's work, then what spoils it, and count."""
    before = count_tables(database_url)
    connection.execute(AFTER_A_RUN.encode())
    connection.execute(spoil.encode())
    return Reconciliation(count_purchases(file, database_url), before, count_tables(database_url), CONSUMER_SAYS)


def test_a_good_run_adds_up(connection: psycopg.Connection, database_url: str, file: Path) -> None:
    found = reconcile(connection, database_url, file)

    assert found.problems() == []
    assert found.purchases.lines == 4
    assert found.after.projected_money == Decimal("100.87")


def test_a_file_may_have_no_header(connection: psycopg.Connection, database_url: str, file: Path) -> None:
    file.write_text(" 00001 19970101  1   11.77\n 00002 19970112  1   12.00\n")

    assert count_purchases(file, database_url) == Purchases(2, Decimal("23.77"))


@pytest.mark.parametrize(
    ("spoil", "problems"),
    [
        (
            "DELETE FROM billing.invoice_projection WHERE invoice_id = '00002-1'",
            [
                "everything sent is projected",
                "everything consumed was projected or known",
                "nothing is lost",
                "the money is the same at both ends",
            ],
        ),
        (
            "UPDATE billing.invoice_projection SET amount = amount + 0.01 WHERE invoice_id = '00002-1'",
            ["nothing is lost", "nothing is invented", "the money is the same at both ends"],
        ),
        (
            "UPDATE outbox.message SET state = 'pending', sent_at = NULL WHERE aggregate_id = '00001'",
            ["every outbox row is sent", "everything sent is projected"],
        ),
        (
            "UPDATE outbox.message SET state = 'parked', sent_at = NULL WHERE aggregate_id = '00001'",
            ["every outbox row is sent", "everything sent is projected"],
        ),
        ("UPDATE outbox.job SET done = 2", ["everything replayed was known"]),
        ("UPDATE outbox.node SET published_total = 2", ["nothing was sent that the broker did not confirm"]),
        (
            "DELETE FROM billing.quarantine",
            ["every purchase is an invoice or in quarantine"],
        ),
    ],
)
def test_what_does_not_add_up_is_named(
    connection: psycopg.Connection, database_url: str, file: Path, spoil: str, problems: list[str]
) -> None:
    if "quarantine" in spoil:
        file.write_text(file.read_text().replace("what is this", "1 0.00"))

    found = reconcile(connection, database_url, file, spoil)

    assert found.problems() == problems


def test_a_message_that_nobody_took_is_named(connection: psycopg.Connection, database_url: str, file: Path) -> None:
    found = replace(reconcile(connection, database_url, file), run=replace(CONSUMER_SAYS, left_in_queue=1))

    assert found.problems() == ["nothing is left in the queue"]


@pytest.mark.parametrize(
    ("spoil", "code", "last_line"),
    [
        ("", 0, "✓ It adds up: nothing lost, nothing doubled, the money is the same at both ends."),
        ("DELETE FROM billing.invoice_projection", 1, "✗ does not hold: the money is the same at both ends"),
    ],
)
@pytest.mark.usefixtures("connection")
def test_the_exit_code_says_whether_it_adds_up(
    database_url: str, file: Path, spoil: str, code: int, last_line: str
) -> None:
    output = StringIO()
    since = read_clock(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        found = reconcile(connection, database_url, file, spoil)

    concluded = conclude(Report(Console(file=output, width=120)), found, read_stages(database_url, since))

    assert concluded == code
    assert output.getvalue().splitlines()[-1] == last_line
