"""Closed days become Parquet that is exactly what the table had, noted only then."""

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

from outbox_spark.archiving import archive, ledger
from outbox_spark.archiving.archive import archive_day, columns, read_day
from outbox_spark.archiving.checksum import ARCHIVED, Sums, frame_sums, row_number, table_sums
from outbox_spark.archiving.ledger import ArchivedDay, archived_days, archiving, closed_days
from outbox_spark.errors import ArchiveError
from relay.config.settings import DatabaseSettings
from relay.retention.kind import SENT
from relay.retention.rounds import drop_old_days
from tests.spark.frames import one
from tests.spark.sent import add_sent
from tests.support.roles import granted_roles

DAY = date(2026, 11, 1)
Keep = Callable[[date], ArchivedDay]


@pytest.fixture
def day(connection: psycopg.Connection) -> date:
    """A closed day of 40 rows, each column of which is set in one of them at least, and one of the next day."""
    add_sent(connection, str(DAY), 40)
    add_sent(connection, "2026-11-02", 1)
    connection.execute("""
        UPDATE outbox.message
        SET exchange = '', routing_key = 'a.b', content_type = 'text/x', available_at = created_at, last_error = 'ä',
            held_behind = 1, parked_at = '1969-07-20 20:17:40.000001+00', quarantine = 7, writer = 'w', batch_id = 9,
            trace_context = '{"traceparent": "00-\\\\u00e4"}', attempts = 3, event_type = '__a/b=c 7'
        WHERE id = 2
    """)
    return DAY


@pytest.fixture
def keep(spark: SparkSession, connection: psycopg.Connection, database_url: str, tmp_path: Path) -> Keep:
    """Archive a day below the test's folder."""
    return lambda day: archive_day(spark, connection, day, str(tmp_path), url=database_url, outbox_schema="outbox")


def test_a_day_lies_there_by_event_type_and_is_noted_with_what_was_verified(
    spark: SparkSession, connection: psycopg.Connection, day: date, keep: Keep, tmp_path: Path
) -> None:
    told = keep(day)

    rows = read_day(spark, str(tmp_path), day)
    assert told == archived_days(connection, "outbox")[day]
    assert (told.rows, told.path) == (40, str(tmp_path))
    assert rows.columns == [*(name for name in ARCHIVED if name != "event_type"), "event_type"]
    assert [row.payload for row in rows.where("id = 4").collect()] == [
        one(connection, "SELECT payload::text FROM outbox.message WHERE id = 4")
    ]
    folders = sorted(each.name for each in (tmp_path / f"day={day}").iterdir() if each.is_dir())
    assert folders == ["event_type=InvoiceIssued", "event_type=InvoicePaid", "event_type=__a%2Fb%3Dc 7"]


def test_an_event_type_with_the_name_of_a_folder_of_spark_is_archived(
    spark: SparkSession, connection: psycopg.Connection, day: date, keep: Keep, tmp_path: Path
) -> None:
    connection.execute("UPDATE outbox.message SET event_type = '__HIVE_DEFAULT_PARTITION__' WHERE id = 3")

    assert keep(day).rows == 40

    rows = read_day(spark, str(tmp_path), day)
    assert [row.id for row in rows.where("event_type = '__HIVE_DEFAULT_PARTITION__'").collect()] == [3]


def test_a_change_in_any_column_changes_the_sum(spark: SparkSession) -> None:
    kinds = [kind.simpleString() for kind in ARCHIVED.values()]
    moment = datetime(2026, 11, 1, tzinfo=UTC)
    some = [{"string": "x", "binary": b"x", "timestamp": moment}.get(kind, 1) for kind in kinds]
    empty = [
        {"string": "", "binary": b"", "timestamp": datetime(1970, 1, 1, tzinfo=UTC)}.get(kind, 0) for kind in kinds
    ]
    rows = [some, empty, [None] * len(kinds)]
    rows += [[*row[:at], None, *row[at + 1 :]] for row in (some, empty) for at in range(len(kinds))]

    numbers = spark.createDataFrame(rows, columns()).select(row_number()).distinct()

    assert numbers.count() == len(rows)


def test_files_that_are_not_what_the_table_has_are_not_noted_and_are_replaced(
    spark: SparkSession,
    connection: psycopg.Connection,
    day: date,
    keep: Keep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(archive, "read_day", lambda *where: read_day(*where).where("id <> 3"))
        with pytest.raises(ArchiveError, match=r"InvoicePaid: 13 rows of .* in the table, 12 rows of .* in the files"):
            keep(day)

    assert archived_days(connection, "outbox") == {}
    assert keep(day).rows == 40
    assert read_day(spark, str(tmp_path), day).count() == 40


def test_a_run_that_ends_before_the_note_is_begun_anew(
    spark: SparkSession,
    connection: psycopg.Connection,
    day: date,
    keep: Keep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep(day)
    add_sent(connection, str(day), 2)  # by a clock that stepped back
    with monkeypatch.context() as broken:
        broken.delattr(archive, "note")
        with pytest.raises(NameError):
            keep(day)

    assert archived_days(connection, "outbox") == {}
    assert keep(day).rows == 42
    assert read_day(spark, str(tmp_path), day).count() == 42


def test_a_day_without_rows_is_archived(connection: psycopg.Connection, keep: Keep) -> None:
    add_sent(connection, str(DAY), 0)

    assert (keep(DAY).rows, [*archived_days(connection, "outbox")]) == (0, [DAY])


@pytest.mark.parametrize(
    "gone",
    [
        "ALTER TABLE outbox.message_sent DETACH PARTITION outbox.message_sent_20261101",
        "DROP TABLE outbox.message_sent_20261101",
    ],
)
def test_a_day_that_is_gone_keeps_the_archive_that_it_has(
    spark: SparkSession, connection: psycopg.Connection, day: date, keep: Keep, tmp_path: Path, gone: str
) -> None:
    noted = keep(day)
    connection.execute(gone.encode())

    with pytest.raises(ArchiveError, match="2026-11-01: the table does not keep it any more"):
        keep(day)

    assert archived_days(connection, "outbox") == {day: noted}
    assert read_day(spark, str(tmp_path), day).count() == 40


def test_a_day_that_is_dropped_by_hand_meanwhile_is_not_noted(
    connection: psycopg.Connection, day: date, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_and_sum_up(rows: DataFrame) -> Sums:
        connection.execute("DROP TABLE outbox.message_sent_20261101")
        return frame_sums(rows)

    monkeypatch.setattr(archive, "frame_sums", drop_and_sum_up)

    with pytest.raises(ArchiveError):
        keep(day)

    assert archived_days(connection, "outbox") == {}


def test_retention_drops_a_day_only_after_it_was_archived(
    connection: psycopg.Connection,
    database: DatabaseSettings,
    day: date,
    keep: Keep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_retention() -> None:
        asyncio.run(drop_old_days(database, {SENT: 1}))

    def run_retention_and_sum_up(rows: DataFrame) -> Sums:
        run_retention()
        return frame_sums(rows)

    monkeypatch.setattr(archive, "frame_sums", run_retention_and_sum_up)

    assert keep(day).rows == 40
    assert closed_days(connection, "outbox") == [day]  # not the one that nobody read
    run_retention()
    assert closed_days(connection, "outbox") == []


def test_only_days_that_are_over_are_closed(connection: psycopg.Connection, day: date) -> None:
    closed = closed_days(connection, "outbox")

    assert closed == [date(2026, 11, 1), date(2026, 11, 2)]  # migrations have made today and the next two


def test_one_process_archives_at_a_time(connection: psycopg.Connection, database_url: str) -> None:
    with psycopg.connect(database_url) as other:
        with (
            archiving(connection, "outbox"),
            pytest.raises(ArchiveError, match="another process archives"),
            archiving(other, "outbox"),
        ):
            pass

        with archiving(other, "outbox"):
            pass


def test_the_role_may_archive_and_no_more(connection: psycopg.Connection, database_url: str, day: date) -> None:
    with granted_roles(connection, "archivist"):
        connection.execute("CREATE ROLE archivist LOGIN PASSWORD 'weak' IN ROLE outbox_archive")
        with psycopg.connect(database_url, user="archivist", password="weak", autocommit=True) as archivist:
            noted = ArchivedDay(day, 40, next(iter(table_sums(archivist, "outbox", day).values())).checksum, "path")
            ledger.hold_day(archivist, "outbox", day)
            ledger.forget(archivist, "outbox", day)
            ledger.note(archivist, "outbox", noted)
            ledger.release_day(archivist, "outbox", day)

            assert closed_days(archivist, "outbox")[0] == day
            assert archived_days(archivist, "outbox") == {day: noted}
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                archivist.execute("DELETE FROM outbox.message")
