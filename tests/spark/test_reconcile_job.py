"""`outbox-spark reconcile`: a world in which all is well, and one with a fault of each kind."""

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import Identifier
from pyspark.sql import SparkSession

from outbox_spark.archiving.archive import archive_day
from outbox_spark.errors import ReadError
from outbox_spark.jobs import reconcile as job
from outbox_spark.jobs.reconcile import reconcile
from outbox_spark.reconciling.ends import Question
from relay.outbox.identity import id_of_writer
from tests.spark.running import refused, run_job

pytestmark = pytest.mark.jobs

# Two days of sending, the events of 40 invoices, some of them corrected later; and other types, some unsent.
WORLD = """
    SELECT outbox.make_day('message_sent', %(day)s::date)
    WHERE outbox.attached_day('message_sent', %(day)s::date) IS NULL;
    INSERT INTO billing.invoice
        SELECT 'INV-' || n, 'C' || n %% 5, date '2026-01-01' + n %% 4, 1, n + 0.10 FROM generate_series(1, 40) AS n;
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, sent_at)
        SELECT 'customer', customer_id, kind,
            json_build_object('invoice_id', invoice_id, 'issued_on', issued_on, 'amount',
                CASE WHEN n %% 10 = 0 AND kind = 'InvoiceIssued' THEN 0.01 ELSE amount END),
            'sent', %(day)s::date::timestamp AT TIME ZONE 'UTC' + interval '1 second' * n
        FROM billing.invoice CROSS JOIN LATERAL (SELECT substr(invoice_id, 5)::integer AS n) AS number
        CROSS JOIN (VALUES (1, 'InvoiceIssued'), (2, 'InvoiceCorrected')) AS kinds (step, kind)
        WHERE (step = 1 OR n %% 10 = 0) AND n <= 38
        ORDER BY step, n;
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'customer', customer_id, 'InvoiceIssued', row_to_json(invoice) FROM billing.invoice
        WHERE invoice_id IN ('INV-39', 'INV-40');
    INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('shop', 'Opened', '{}');
"""
APPLY = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, processed_at)
    VALUES (%s, %s, '1970-01-01', %s)
"""
# The last event of the world once more, under its message id, by a role with a name that is not ASCII.
ANOTHER_WRITER = """
    INSERT INTO outbox.message
        (message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at, written_as)
    SELECT message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at, 'Jörg'
    FROM outbox.message WHERE state = 'sent' ORDER BY id DESC LIMIT 1
"""
YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
DROP_YESTERDAY = f"DROP TABLE outbox.message_sent_{YESTERDAY:%Y%m%d}".encode()

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def inbox(inbox_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the consumer's database."""
    with psycopg.connect(inbox_url, autocommit=True) as connected:
        yield connected


@pytest.fixture
def world(connection: psycopg.Connection, inbox: psycopg.Connection) -> psycopg.Connection:
    """All is well: each invoice has its event, and what was sent was applied. Invoices are of four days."""
    values = {"day": YESTERDAY}
    for statement in WORLD.split(";\n"):
        connection.execute(statement.encode(), values)
    sent = connection.execute("SELECT message_id, sent_at FROM outbox.message WHERE state = 'sent'").fetchall()
    for message_id, sent_at in sent:
        inbox.execute(APPLY, ["billing", message_id, sent_at + timedelta(hours=1)])
    return connection


@pytest.fixture
def ask(spark: SparkSession, database_url: str, inbox_url: str) -> Ask:
    """Reconcile billing.invoice."""

    def reconciled(
        *, archive: str | None = None, folder: str | None = None, key_column: str = "invoice_id"
    ) -> dict[str, Any]:
        question = Question(
            url=database_url,
            outbox_schema="outbox",
            table=Identifier("billing", "invoice"),
            key_column=key_column,
            amount_column="amount",
            day_column="issued_on",
            event_types=["InvoiceIssued", "InvoiceCorrected"],
            payload_key="invoice_id",
            payload_amount="amount",
            payload_day="issued_on",
            since=None,
            until=None,
            archive=archive,
            inbox_url=inbox_url,
            inbox_schema="outbox",
            consumer="billing",
            grace=60,
        )
        return reconcile(spark, question, limit=20, folder=folder)

    return reconciled


def test_a_world_in_which_all_is_well_has_no_difference(world: psycopg.Connection, ask: Ask) -> None:
    report = ask()

    assert report["differences"] == dict.fromkeys(["without_event", "without_row", "unequal", "missing", "lost"], 0)
    assert [(each["rows"], each["events"], each["difference"]) for each in report["days"]] == [(10, 10, "0.000000")] * 4
    assert sum(float(each["amount_of_rows"]) for each in report["days"]) == pytest.approx(824.0)


def test_a_fault_of_each_kind_is_found_and_nothing_else(
    world: psycopg.Connection, inbox: psycopg.Connection, ask: Ask, spark: SparkSession, tmp_path: Path
) -> None:
    gone = "DELETE FROM outbox.message WHERE payload->>'invoice_id' = 'INV-39' RETURNING message_id"
    assert world.execute(gone).rowcount == 1
    world.execute("DELETE FROM billing.invoice WHERE invoice_id = 'INV-2'")
    world.execute("UPDATE billing.invoice SET amount = amount + 1.25 WHERE invoice_id = 'INV-3'")
    find = "SELECT message_id FROM outbox.message WHERE payload->>'invoice_id' = 'INV-4'"
    ((missing,),) = world.execute(find).fetchall()
    inbox.execute("DELETE FROM outbox.processed_message WHERE message_id = %s", [missing])
    lost = "11111111-2222-4333-8444-555555555555"
    noon = datetime(YESTERDAY.year, YESTERDAY.month, YESTERDAY.day, 12, tzinfo=UTC)
    inbox.execute(APPLY, ["billing", lost, noon])
    inbox.execute(APPLY, ["another", "99999999-2222-4333-8444-555555555555", noon])

    report = ask(folder=str(tmp_path))

    assert report["differences"] == dict.fromkeys(["without_event", "without_row", "unequal", "missing", "lost"], 1)
    first = {kind: rows[0] for kind, rows in report["first"].items()}
    assert first["without_event"] == {"key": "INV-39", "day": "2026-01-04", "amount": "39.100000"}
    assert (first["without_row"]["key"], first["without_row"]["event_amount"]) == ("INV-2", "2.100000")
    assert (first["unequal"]["amount"], first["unequal"]["event_amount"]) == ("4.350000", "3.100000")
    assert (first["missing"]["message_id"], first["lost"]["message_id"]) == (str(missing), lost)
    assert first["lost"]["at"] == f"{YESTERDAY} 12:00:00Z"
    assert {each["day"]: each["difference"] for each in report["days"]} == {
        "2026-01-01": "0.000000",
        "2026-01-02": "0.000000",
        "2026-01-03": "2.100000",
        "2026-01-04": "-40.350000",
    }
    written = spark.read.parquet(str(tmp_path / "differences"))
    assert {row["kind"] for row in written.collect()} == set(report["differences"])


def test_days_that_retention_has_dropped_come_from_the_archive(
    world: psycopg.Connection, ask: Ask, spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    archive_day(spark, world, YESTERDAY, str(tmp_path), url=database_url, outbox_schema="outbox")
    world.execute("DELETE FROM outbox.message WHERE state = 'sent'")
    world.execute(DROP_YESTERDAY)

    with_it, without = ask(archive=str(tmp_path)), ask()

    assert not any(with_it["differences"].values())
    # What was applied before the days that are known is not judged: nobody can tell.
    assert without["differences"] == {"without_event": 38, "without_row": 0, "unequal": 0, "missing": 0, "lost": 0}


def test_an_inbox_by_writer_is_compared_by_writer_also_from_the_archive(
    world: psycopg.Connection,
    inbox: psycopg.Connection,
    ask: Ask,
    spark: SparkSession,
    database_url: str,
    tmp_path: Path,
) -> None:
    world.execute(ANOTHER_WRITER)
    sent = world.execute(
        "SELECT message_id, written_as, sent_at FROM outbox.message WHERE state = 'sent' ORDER BY id"
    ).fetchall()
    inbox.execute("DELETE FROM outbox.processed_message WHERE message_id <> %s", [sent[0][0]])  # applied before
    for message_id, written_as, sent_at in sent[1:]:
        inbox.execute(APPLY, ["billing", id_of_writer(message_id, written_as), sent_at + timedelta(hours=1)])

    all_is_well = ask()

    assert not any(all_is_well["differences"].values())

    by_another = id_of_writer(sent[-1][0], "Jörg")
    forged = id_of_writer(sent[1][0], "nobody has written it")
    assert inbox.execute("DELETE FROM outbox.processed_message WHERE message_id = %s", [by_another]).rowcount == 1
    inbox.execute(APPLY, ["billing", forged, sent[1][2] + timedelta(hours=1)])
    archive_day(spark, world, YESTERDAY, str(tmp_path), url=database_url, outbox_schema="outbox")

    report = ask()
    world.execute(DROP_YESTERDAY)
    from_archive = ask(archive=str(tmp_path))

    for each in (report, from_archive):
        assert {kind: count for kind, count in each["differences"].items() if count} == {"missing": 1, "lost": 1}
        ((missing,), (lost,)) = (each["first"][kind] for kind in ("missing", "lost"))
        assert (missing["message_id"], missing["written_as"]) == (str(sent[-1][0]), "Jörg")
        assert lost["message_id"] == str(forged)


def test_an_archive_that_has_lost_files_or_lies_elsewhere_is_told(
    world: psycopg.Connection, ask: Ask, spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    archive_day(spark, world, YESTERDAY, str(tmp_path / "a"), url=database_url, outbox_schema="outbox")
    world.execute(DROP_YESTERDAY)

    assert not any(ask(archive=str(tmp_path))["differences"].values())
    with pytest.raises(ReadError, match=rf"{YESTERDAY} was archived below {tmp_path}/a, not below {tmp_path}/b"):
        ask(archive=str(tmp_path / "b"))
    shutil.rmtree(tmp_path / "a" / f"day={YESTERDAY}" / "event_type=InvoiceCorrected")
    with pytest.raises(ReadError, match=rf"{YESTERDAY} below {tmp_path}/a has 38 rows, and 41 are noted"):
        ask(archive=str(tmp_path))


def test_a_day_that_is_dropped_meanwhile_is_told_and_not_taken_for_a_difference(
    world: psycopg.Connection, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "check_keys", lambda *_: world.execute(DROP_YESTERDAY))  # between the reads

    with pytest.raises(ReadError, match=rf"day {YESTERDAY} of the outbox was dropped meanwhile: run it again"):
        ask(folder=str(tmp_path))

    assert not (tmp_path / "differences").exists()


@pytest.mark.timeout(300)
def test_the_job_draws_its_picture_and_exits_with_1(
    world: psycopg.Connection, database_url: str, tmp_path: Path
) -> None:
    world.execute("DELETE FROM billing.invoice WHERE invoice_id = 'INV-2'")
    picture = tmp_path / "sums.svg"
    columns = ["--key-column", "invoice_id", "--amount-column", "amount", "--day-column", "issued_on"]
    types = ["--event-type", "InvoiceIssued", "--event-type", "InvoiceCorrected"]

    done = run_job(
        *("reconcile.py", "--table", "billing.invoice", *columns, *types, "--url", database_url),
        *("--picture", str(picture), "--since", "2026-01-03"),
    )

    assert done.returncode == 1, done.stderr
    counts = dict(line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("without", "unequal")))
    assert counts == {"without_event": "0", "without_row": "1", "unequal": "0"}
    assert "1 of 2 days differ" in done.stdout
    assert "<svg" in picture.read_text()


def test_a_column_that_does_not_tell_one_row_from_another_is_refused(world: psycopg.Connection, ask: Ask) -> None:
    with pytest.raises(ReadError, match=r"^--key-column customer_id: 8 rows have 'C[0-4]' there"):
        ask(key_column="customer_id")


def test_arguments_that_cannot_be_are_refused() -> None:
    good = ["--table", "a.b", "--key-column", "k", "--amount-column", "m", "--day-column", "d", "--event-type", "E"]
    good += ["--url", "postgresql://postgres@127.0.0.1:1/nowhere"]

    refused("reconcile.py", 2, "--table takes schema.table, not 'b'", *good, "--table", "b")
    refused("reconcile.py", 2, "is after --until 2026-01-01", *good, "--since", "2026-01-02", "--until", "2026-01-01")
    refused("reconcile.py", 2, "name it with --consumer", *good, "--inbox-url", "postgresql://x/y")
    refused("reconcile.py", 2, "ends in .png or .svg, not a.gif", *good, "--picture", "a.gif")
    refused("reconcile.py", 1, "Connection refused", *good)
