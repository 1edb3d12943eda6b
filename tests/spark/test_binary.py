"""Payloads of bytes, as `to_avro` and `to_protobuf` make them: they reach `payload_bytes` with their content type."""

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import outbox_spark
from outbox_spark import OutboxBatch
from outbox_spark.prepare import prepare
from tests.spark.frames import counts, invoices, save

Options = dict[str, str]
MESSAGES = "SELECT payload, payload_bytes, content_type FROM outbox.message ORDER BY payload_bytes"
BYTES = {"payloadColumn": "body", "contentType": "application/avro"}
PIECE = {"atomic": "partition", "numPartitions": "2", "txnAppId": "nightly", "txnVersion": "7"}


def with_body(spark: SparkSession) -> DataFrame:
    return invoices(spark, 3, partitions=2).withColumn("body", f.expr("unhex(concat('00FF', hex(invoice_id)))"))


@pytest.mark.parametrize("how", [{}, PIECE], ids=["staged", "in-pieces"])
def test_a_payload_of_bytes_is_written_as_it_is(
    spark: SparkSession, options: Options, connection: psycopg.Connection, how: Options
) -> None:
    save(with_body(spark), options, **BYTES, **how)

    messages = connection.execute(MESSAGES).fetchall()
    assert messages == [(None, b"\x00\xffINV-%d" % number, "application/avro") for number in range(3)]
    assert counts(connection)[0] == 3


def test_a_batch_of_several_tables_takes_bytes(
    spark: SparkSession, options: Options, connection: psycopg.Connection
) -> None:
    with OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch:
        batch.events(
            with_body(spark),
            aggregate_type="customer",
            aggregate_id=f.col("customer_id"),
            event_type="InvoiceIssued",
            payload=f.col("body"),
            content_type="application/x-protobuf",
        )

    messages = connection.execute(MESSAGES).fetchall()
    assert messages == [(None, b"\x00\xffINV-%d" % number, "application/x-protobuf") for number in range(3)]


def test_bytes_take_their_content_type(spark: SparkSession, options: Options) -> None:
    with pytest.raises(outbox_spark.ColumnError) as refused:
        prepare({**options, "payloadColumn": "body"}, with_body(spark).schema, overwrite=False)

    assert str(refused.value) == "column 'body' of option payloadColumn is bytes, and takes contentType"
