"""Spark pushes filters into a Python data source, and keeps them for queries without a filter."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

datasource = pytest.importorskip("pyspark.sql.datasource", reason="this Spark has no Python data source")
if not hasattr(datasource, "EqualTo"):
    pytest.skip("this Spark pushes no filter into a Python data source", allow_module_level=True)


class Pushing(datasource.DataSource):  # type: ignore[misc, name-defined]
    """Five rows, of which the reader leaves out what Spark says is filtered."""

    @classmethod
    def name(cls) -> str:
        return "pushing"

    def schema(self) -> str:
        return "id int"

    def reader(self, schema: object) -> "PushingReader":  # noqa: ARG002  # Spark's signature
        return PushingReader()


class PushingReader(datasource.DataSourceReader):  # type: ignore[misc, name-defined]
    wanted: int | None = None

    def pushFilters(self, filters: list[object]) -> Iterator[object]:  # noqa: N802  # Spark's name
        for each in filters:
            if isinstance(each, datasource.EqualTo):
                self.wanted = int(each.value)
            else:
                yield each

    def partitions(self) -> list[object]:
        return [datasource.InputPartition(0)]

    def read(self, partition: object) -> Iterator[tuple[int]]:  # noqa: ARG002  # Spark's signature
        return ((number,) for number in range(5) if self.wanted in (None, number))


@pytest.mark.jobs
def test_spark_still_keeps_a_pushed_filter_for_queries_without_one(spark: SparkSession) -> None:
    """When this fails, Spark has mended it, and `outbox` may take filters (docs/decisions/0022-read-by-blocks.md)."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(Pushing)
        frame = spark.read.format("pushing").load()

        filtered = [row.id for row in frame.where("id = 1").collect()]
        of_one_query = [row.id for row in frame.where("id = 1").union(frame).collect()]
        whole = [row.id for row in frame.collect()]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    assert filtered == [1]
    assert whole == [1]  # of five
    assert of_one_query == [1, 1]
