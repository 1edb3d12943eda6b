"""The order of events, which a Python data source cannot ask Spark for."""

from pyspark.sql import DataFrame


def in_order(frame: DataFrame, key: str, *sequence: str, partitions: int | None = None) -> DataFrame:
    """Bring all rows of a key into one partition, and there into the order of `sequence`.

    Written from such a DataFrame, the events of a key have ids, and so reach the broker, in that order.
    """
    if not sequence:
        raise ValueError("in_order takes at least one column that tells the order of a key's events")
    together = frame.repartition(key) if partitions is None else frame.repartition(partitions, key)
    return together.sortWithinPartitions(key, *sequence)
