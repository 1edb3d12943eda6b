"""A value that no table takes, wherever in its row: refused with the row's key, by the executor or the database."""

import psycopg
import pyarrow as pa
import pytest

import outbox_spark
from outbox_spark.load import load
from outbox_spark.pieces import write_piece
from outbox_spark.plan import Save
from outbox_spark.prepare import prepare
from tests.spark.refused_values import FAULTS, SCHEMA, TABLE, rows_with


def write(save: Save, batches: list[pa.RecordBatch], *, attempt: int) -> None:
    """Write a partition as a task does."""
    if save.pieces is None:
        load(save, batches, partition=0, attempt=attempt)
    else:
        write_piece(save, save.pieces, batches, partition=0, attempt=attempt)


@pytest.mark.parametrize("single_task", ["false", "true"])
def test_a_value_that_no_table_takes_is_refused_with_its_row(
    options: dict[str, str], connection: psycopg.Connection, single_task: str
) -> None:
    connection.execute(TABLE)
    given = {**options, "dbtable": "billing.thing", "aggregateIdColumn": "key", "singleTask": single_task}
    save, _ = prepare(given, SCHEMA, overwrite=False)

    for place, (column, value, fault) in enumerate(FAULTS):
        batches = [rows_with("share", 0, count=3), rows_with(column, value, count=len(FAULTS), place=place)]
        with pytest.raises(outbox_spark.RowError) as refused:
            write(save, batches, attempt=place)

        named = f"the row with key 'C{place}' cannot be written to billing.thing and the outbox"
        assert str(refused.value) == f"{named}: {fault}"
