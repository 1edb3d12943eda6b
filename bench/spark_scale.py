"""Whether a row of a large batch costs what one of a small batch does: `python -m bench.spark_scale`.

Each way of writing invoices with their events takes batches of several sizes by turns; the smallest is the reference.
"""

from functools import partial

from bench.frame.run import Bench, Column, Count, main
from bench.frame.spark_session import spark_session
from bench.spark import Writer, cached_invoices, database, measure_write, writers

SIZES = (100_000, 1_000_000, 3_000_000)
WAYS = (Writer.OUTBOX, Writer.OUTBOX_SINGLE, Writer.OUTBOX_PIECES)


def measure(*, rounds: Count = 3, partitions: Count = 4, run: Bench) -> None:
    """Measure Spark's writes by the size of the batch.

    Parameters
    ----------
    rounds
        How often each size is measured, after one round to warm up; each starts with another size.
    partitions
        Partitions of the DataFrame; two tasks run at a time.
    """
    columns = Column("rows/s", "rate"), Column(f"of {SIZES[0]:,}", "rate", 2, is_ratio=True)
    with database(run) as url, spark_session() as session:
        frames = {size: cached_invoices(run, session, size, partitions) for size in SIZES}
        for way in WAYS:
            sides = {
                f"{size:,} invoices": partial(
                    measure_write, url, writers(session, frame, url, partitions)[way], size, money
                )
                for size, (frame, money) in frames.items()
            }
            run.table(f"{way}, rows of both tables", *columns).measure(sides, rounds, warm_up=1)


if __name__ == "__main__":
    main(measure)
