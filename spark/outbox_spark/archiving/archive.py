"""Write a closed day of sent rows to Parquet, compare it with the table, and note it.

hold ──> forget ──> write ──> sum up the files ──> compare ──> note      whoever was killed begins the day anew
                    sum up the table ─────────────────┘

Files of a day that is not noted are nobody's: the next run replaces them. So a day is in the archive, whole and as the
table had it, if and only if `archived_day` has it.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox_spark.archiving.checksum import ARCHIVED, Sums, frame_sums, table_sums
from outbox_spark.archiving.ledger import ArchivedDay, forget, hold_day, note, release_day, require_closed
from outbox_spark.errors import ArchiveError, ReadError
from outbox_spark.reading.plan import settled_moment

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


def archive_day(
    spark: SparkSession, connection: psycopg.Connection, day: date, path: str, *, url: str, outbox_schema: str
) -> ArchivedDay:
    """Archive a day that is over; whatever lies at its place is replaced. Retention keeps the day meanwhile.

    Raises:
        ArchiveError: the table does not keep the day, and the archive stays as it was. Or the files are not what the
            table has, and the day is not noted.
    """
    hold_day(connection, outbox_schema, day)
    try:
        require_closed(connection, outbox_schema, day)
        forget(connection, outbox_schema, day)
        settled_moment(connection, outbox_schema)  # marks of the day's last moment
        count, checksum = _write(spark, connection, day, path, url=url, outbox_schema=outbox_schema)
        require_closed(connection, outbox_schema, day)  # nothing keeps anybody from dropping it by hand
        archived = ArchivedDay(day, count, checksum, path)
        note(connection, outbox_schema, archived)
    finally:
        release_day(connection, outbox_schema, day)
    return archived


def read_day(spark: SparkSession, path: str, day: date) -> DataFrame:
    """Read a day of the archive, whatever its event types look like."""
    rows = spark.read.schema(columns()).parquet(folder(path, day))
    # A folder of that name stands for null, which no row of the table has: it is of events with this type.
    return rows.withColumn("event_type", f.coalesce("event_type", f.lit(NULL_FOLDER)))


def read_noted(spark: SparkSession, noted: ArchivedDay) -> DataFrame:
    """Read a day of the archive that has as many rows as are noted; the footers of its files tell.

    Raises:
        ReadError: it has not.
    """
    rows = read_day(spark, noted.path, noted.day)
    if (found := rows.count()) != noted.rows:
        raise ReadError(
            f"the archive of {noted.day} below {noted.path} has {found} rows, and {noted.rows} are noted. Bring its "
            f"files back, or, while the table keeps the day, run `outbox-spark archive --day {noted.day} --again`"
        )
    return rows


def folder(path: str, day: date) -> str:
    """Return where a day lies in an archive."""
    return f"{path.rstrip('/')}/day={day}"


def columns() -> StructType:
    """Return the columns of the archive."""
    schema = StructType()
    for name, kind in ARCHIVED.items():
        schema = schema.add(name, kind)
    return schema


def _write(
    spark: SparkSession, connection: psycopg.Connection, day: date, path: str, *, url: str, outbox_schema: str
) -> tuple[int, Decimal]:
    """Write the files, and give count and checksum, which are those of the table."""
    rows = (
        spark.read.format("outbox")
        .options(url=url, outboxSchema=outbox_schema, startingDay=str(day), endingDay=str(day))
        .load(schema=columns())
    )
    with ThreadPoolExecutor(max_workers=1) as beside:  # it takes the server as long as the rest takes Spark
        summing_up = beside.submit(table_sums, connection, outbox_schema, day)
        try:
            rows.write.mode("overwrite").option("partitionOverwriteMode", "static").partitionBy("event_type").parquet(
                folder(path, day)
            )
            found = frame_sums(read_day(spark, path, day))
        except BaseException:
            connection.cancel_safe()
            raise
        expected = summing_up.result()
    if expected != found:
        raise ArchiveError(f"the archive of {day} is not what the table has: {_differences(expected, found)}")
    return sum(each.rows for each in found.values()), Decimal(sum(each.checksum for each in found.values()))


def _differences(expected: Sums, found: Sums) -> str:
    return "; ".join(
        f"{event_type}: {_words(expected, event_type)} in the table, {_words(found, event_type)} in the files"
        for event_type in sorted(expected.keys() | found.keys())
        if expected.get(event_type) != found.get(event_type)
    )


def _words(sums: Sums, event_type: str) -> str:
    found = sums.get(event_type)
    return "no rows" if found is None else f"{found.rows} rows of checksum {found.checksum}"
