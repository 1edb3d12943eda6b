"""Batches inside `foreachBatch`: each micro-batch is a batch of the ledger, and each query has its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from outbox_spark.asked import check_foreach
from outbox_spark.connection import connect, conninfo, retried
from outbox_spark.errors import OptionError, OutboxWriteError
from outbox_spark.ledger import take_for_query
from outbox_spark.source import QUERY_ID


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The name of a micro-batch in the ledger."""

    app_id: str  # with the id of the query
    version: int  # Spark's number of it

    @property
    def options(self) -> dict[str, str]:
        """The name as options of `format("outbox")`."""
        return {"txnAppId": self.app_id, "txnVersion": str(self.version)}


def foreach_batch(
    write: Callable[[DataFrame, MicroBatch], object],
    *,
    url: str,
    app_id: str,
    user: str | None = None,
    password: str | None = None,
    outbox_schema: str = "outbox",
) -> Callable[[DataFrame, int], None]:
    """Return a function for `writeStream.foreachBatch`, which calls `write` with a DataFrame and its name.

        def write(frame, batch):
            frame.write.format("outbox").mode("append").options(**options, **batch.options).save()

        invoices.writeStream.foreachBatch(outbox_spark.foreach_batch(write, url=url, app_id="invoices-stream"))

    The query fails with BatchError when another query has used `app_id`: without its checkpoint a stream is a new one.
    Its numbers begin at 0, and its rows may have been written. It fails, too, when its checkpoint is older than the
    batches that are written.

    Raises:
        OptionError: the name is empty, or libpq cannot read the URL.
    """
    check_foreach(url=url, app_id=app_id, user=user, password=password, outbox_schema=outbox_schema)
    info = conninfo(url, user, password)

    def write_named(frame: DataFrame, number: int) -> None:
        query = _query_of(frame.sparkSession)
        with retried(lambda: connect(info), OutboxWriteError) as connection:
            name = take_for_query(connection, outbox_schema, app_id=app_id, number=number, query=query)
        write(frame, MicroBatch(name, number))

    return write_named


def _query_of(spark: SparkSession) -> str:
    """Return the id that the query's checkpoint keeps. Only tasks can see it without py4j."""

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)
        yield pa.RecordBatch.from_pydict(
            {"query": pa.array([TaskContext.get().getLocalProperty(QUERY_ID)], pa.string())}
        )

    ((query,),) = spark.range(0, 1, 1, 1).mapInArrow(tell, "query string").collect()
    if query is None:
        raise OptionError(
            "foreach_batch finds no query here: it takes the DataFrame that foreachBatch hands over, and Spark Connect "
            "does not tell of the query; writeStream.format('outbox') works there"
        )
    return str(query)
