"""How a read is divided, and that all of its tasks see one picture; or that one of them fails."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pyspark.sql.types import LongType, StructType

from outbox_spark.errors import ReadError, TableError
from outbox_spark.reading import plan
from outbox_spark.reading.plan import plan_read
from outbox_spark.reading.reader import OutboxReader
from outbox_spark.reading.tasks import Task
from tests.spark.frames import one
from tests.spark.sent import add_sent
from tests.support.eventually import eventually

MakeReader = Callable[..., OutboxReader]
DAY, NEXT_DAY = "2026-11-01", "2026-11-02"
TABLE = "outbox.message_sent_20261101"
ID = StructType().add("id", LongType())
MARK = "UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE state = 'pending'"
LOOKS_AT_MARKS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-spark' AND datname = current_database() AND query LIKE '%virtualtransaction%'
"""


@pytest.fixture
def reader(database_url: str) -> MakeReader:
    """Make a reader of the ids."""

    def make(**options: str) -> OutboxReader:
        return OutboxReader(plan_read({"url": database_url, **options}, ID))

    return make


def ids(reader: OutboxReader, tasks: Sequence[Task] | None = None) -> list[int]:
    given = reader.partitions() if tasks is None else tasks
    return [row for task in given for batch in reader.read(task) for row in batch.column("id").to_pylist()]


def test_every_row_is_in_one_task_however_many_there_are(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 6000)
    add_sent(connection, NEXT_DAY, 2000)

    by_size, by_number, by_far = reader(), reader(numpartitions="8"), reader(numpartitions="100000")

    assert len(by_size.partitions()) == 2
    assert len(by_number.partitions()) == 8
    for each in (by_size, by_number, by_far):
        assert sorted(ids(each)) == list(range(1, 8001))


def test_bounds_are_inclusive(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 30)
    add_sent(connection, NEXT_DAY, 10)

    assert sorted(ids(reader(startingday=DAY, endingday=DAY))) == list(range(1, 31))
    assert sorted(ids(reader(startingday=NEXT_DAY))) == list(range(31, 41))
    assert sorted(ids(reader(startingid="29", endingid="32"))) == [29, 30, 31, 32]
    assert ids(reader(endingday="2026-10-31")) == []


def test_rows_are_selected_by_type_and_key(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 30)

    assert ids(reader(eventtype="InvoicePaid", aggregatetype="customer", aggregateid="C1")) == [6, 21]
    assert ids(reader(aggregatetype="invoice")) == []


def test_what_is_marked_after_the_plan_is_not_in_the_picture(
    connection: psycopg.Connection, reader: MakeReader
) -> None:
    add_pending(connection, 3)
    connection.execute(MARK)
    read = reader()
    tasks = read.partitions()
    add_pending(connection, 2)
    connection.execute(MARK)

    assert ids(read, tasks) == [1, 2, 3]
    assert ids(reader()) == [1, 2, 3, 4, 5]


async def test_a_mark_that_is_under_way_is_waited_for(
    connection: psycopg.Connection, database_url: str, reader: MakeReader
) -> None:
    add_pending(connection, 3)
    with psycopg.connect(database_url) as marking, ThreadPoolExecutor(1) as beside:
        marking.execute(MARK)
        found = beside.submit(ids, reader())
        await eventually(lambda: one(connection, LOOKS_AT_MARKS) == 1, "the driver looks at the marks")
        marking.commit()

        assert found.result() == [1, 2, 3]


def test_a_mark_that_does_not_end_is_told(
    connection: psycopg.Connection, database_url: str, reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MARKS_MAY_TAKE", 0.0)
    add_pending(connection, 1)

    with psycopg.connect(database_url) as marking:
        marking.execute(MARK)
        with pytest.raises(ReadError, match="1 transactions that mark rows have not ended"):
            reader().partitions()


@pytest.mark.parametrize(
    "change",
    [
        f"VACUUM FULL {TABLE}",
        f"DROP TABLE {TABLE}",
        f"ALTER TABLE outbox.message_sent DETACH PARTITION {TABLE}",
    ],
)
def test_a_day_that_is_not_as_it_was_planned_fails_its_task(
    connection: psycopg.Connection, reader: MakeReader, change: str
) -> None:
    add_sent(connection, DAY, 3000)
    read = reader(numpartitions="2")
    first, second = read.partitions()
    ids(read, [first])
    connection.execute(change.encode())

    with pytest.raises(ReadError, match=rf"day {DAY} of the outbox was dropped or rewritten .* load\(\) it again"):
        ids(read, [second])


def test_what_the_database_refuses_names_the_day(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 3)
    read = reader()
    planned = read.partitions()
    connection.execute("ALTER SCHEMA outbox RENAME TO elsewhere")

    with pytest.raises(ReadError, match=f"day {DAY} of the outbox could not be read: .* does not exist"):
        ids(read, planned)


def test_a_payload_that_is_no_object_has_no_fields(connection: psycopg.Connection, database_url: str) -> None:
    add_pending(connection, 5)
    payloads = ['{"n": 1}', "2", "null", '"n"', '["n"]']
    connection.execute("UPDATE outbox.message SET payload = (%s::text[])[id]::json", [payloads])
    connection.execute(MARK)
    schema = StructType().add("payload", StructType().add("n", LongType()))
    read = OutboxReader(plan_read({"url": database_url}, schema))

    found = [
        row["n"] for task in read.partitions() for batch in read.read(task) for row in batch["payload"].to_pylist()
    ]

    assert sorted(found, key=str) == [1, None, None, None, None]


def test_a_missing_outbox_is_told_with_the_remedy(database_url: str, reader: MakeReader) -> None:
    with pytest.raises(TableError, match=r"nowhere\.message .* does not exist .*run `relay migrate`"):
        reader(outboxschema="nowhere").partitions()


def test_the_right_to_select_from_the_table_is_enough(connection: psycopg.Connection, reader: MakeReader) -> None:
    add_sent(connection, DAY, 3)
    connection.execute("""
        CREATE ROLE reports LOGIN PASSWORD 'weak';
        GRANT USAGE ON SCHEMA outbox TO reports;
        GRANT SELECT ON outbox.message TO reports;
    """)
    try:
        assert ids(reader(user="reports", password="weak")) == [1, 2, 3]
    finally:
        connection.execute("DROP OWNED BY reports; DROP ROLE reports")


def add_pending(connection: psycopg.Connection, rows: int) -> None:
    connection.execute(
        "INSERT INTO outbox.message (aggregate_type, event_type, payload) "
        "SELECT 'customer', 'InvoiceIssued', '{}' FROM generate_series(1, %s)",
        [rows],
    )
