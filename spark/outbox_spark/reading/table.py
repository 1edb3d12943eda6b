"""Read any table from Spark in parts, by ranges of its blocks, as the format `outbox` reads the days of the outbox."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from psycopg.sql import SQL, Composable, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from outbox_spark.connection import connect, connect_once, conninfo
from outbox_spark.errors import ReadError, TableError, one_line
from outbox_spark.reading.plan import BYTES_PER_TASK
from outbox_spark.reading.reader import as_planned
from outbox_spark.spark_api import arrow_schema

# The blocks of a partitioned table are those of its largest partition: a range of blocks is read in each of them.
MEASURE = SQL("""
    SELECT bool_and(class.relkind IN ('r', 'p')), coalesce(sum(pg_table_size(part)), 0)::bigint,
        coalesce(max(pg_relation_size(part)), 0)::bigint / current_setting('block_size')::integer
    FROM (SELECT {table}::regclass::oid UNION SELECT relid FROM pg_partition_tree({table}::regclass)) AS every (part)
    JOIN pg_class AS class ON class.oid = part
""")

SELECT = SQL("SELECT {columns} FROM {table} WHERE {where}")


@dataclass(frozen=True, slots=True)
class Database:
    """Where to read, and what all tasks see."""

    info: str  # libpq's connection string; it may hold the password
    snapshot: str | None = None  # None: each task sees its own moment


@contextmanager
def one_moment(url: str) -> Iterator[Database]:
    """Hold a snapshot that every read of the block shares.

    It keeps dead rows from being cleared away until the block ends: read, and leave.
    """
    info = conninfo(url)
    with connect(info) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        ((snapshot,),) = connection.execute("SELECT pg_export_snapshot()").fetchall()
        yield Database(info, snapshot)


def read_table(
    spark: SparkSession,
    database: Database,
    table: Identifier,
    schema: str,
    *,
    computed: Mapping[str, Composable] | None = None,
    where: Composable | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Return these columns of the rows for which the condition holds (all); they are read when Spark runs the query.

    Args:
        schema: names and Spark types of the columns, as DDL.
        computed: columns that are not what the table has under their name.
        partitions: so many tasks; 1 for what an index finds. None: one for each 128 MiB of the table.
    Raises:
        TableError: there is no such table, or it may not be read.
    """
    kinds = StructType.fromDDL(schema)
    names = kinds.fieldNames()
    columns = SQL(", ").join((computed or {}).get(name, Identifier(name)) for name in names)
    whole = SELECT.format(columns=columns, table=table, where=where or SQL("true"))
    with connect(database.info) as connection:
        name = table.as_string(connection)
        try:
            measured = connection.execute(MEASURE.format(table=Literal(name))).fetchall()
            connection.execute(SQL("{} LIMIT 0").format(whole))
        except psycopg.Error as error:
            raise TableError(f"table {name} cannot be read: {one_line(error)}") from None
    ((is_table, size, blocks),) = measured
    if not is_table:
        raise TableError(f"{name} is no table, whose blocks could be read: name the table beneath it")
    pieces = min(max(blocks, 1), partitions or max(1, round(size / BYTES_PER_TASK)))
    borders = [blocks * piece // pieces for piece in range(pieces)]
    ranges = [
        (whole + SQL(" AND ctid >= {}::tid").format(Literal(f"({first},0)")))
        # The last range is open: whatever block a row lies in, one task has it.
        + (SQL("") if end is None else SQL(" AND ctid < {}::tid").format(Literal(f"({end},0)")))
        for first, end in zip(borders, [*borders[1:], None], strict=True)
    ]
    return _run(spark, database, [each.as_string() for each in ranges], kinds)


def _run(spark: SparkSession, database: Database, statements: list[str], kinds: StructType) -> DataFrame:
    """Yield the rows of each statement, one a task."""
    info, arrow = database.info, arrow_schema(kinds)
    begin = ["BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"]
    if database.snapshot is not None:
        begin.append(f"SET TRANSACTION SNAPSHOT '{database.snapshot}'")
    begin += ["SET LOCAL max_parallel_workers_per_gather = 0", "SET LOCAL TimeZone = 'UTC'"]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for piece in (row["id"] for batch in batches for row in batch.to_pylist()):
            try:
                with (
                    closing(connect_once(info)) as connection,
                    closing(connection.cursor()) as cursor,
                ):
                    for statement in (*begin, statements[piece]):
                        cursor.execute(statement)
                    with cursor.fetch_record_batch() as rows:
                        for batch in rows:
                            yield as_planned(batch, arrow)
            except (dbapi.Error, OSError) as error:  # OSError: what the database says in the middle of the rows
                raise ReadError(f"a table could not be read: {one_line(error)}") from None

    return spark.range(0, len(statements), 1, len(statements)).mapInArrow(read, kinds)
