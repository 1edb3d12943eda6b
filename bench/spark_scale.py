"""Whether a row of a large batch costs what one of a small batch does: `python -m bench.spark_scale`.

Each way of writing invoices with their events takes batches of several sizes by turns; the smallest is the reference.
"""

from functools import partial

from cyclopts import App

from bench.frame import report
from bench.frame.command import Count, main
from bench.frame.spark_session import driver_jar, spark_session
from bench.frame.turns import Titles, report_turns, take_turns
from bench.spark import Writer, cached_invoices, database, measure, writers

app = App(name="python -m bench.spark_scale", help="Measure Spark's writes by the size of the batch.", version_flags=[])
console = report.open_console()

SIZES = (100_000, 1_000_000, 3_000_000)
WAYS = {
    Writer.OUTBOX: "spark_scale_batch",
    Writer.OUTBOX_SINGLE: "spark_scale_single",
    Writer.OUTBOX_PIECES: "spark_scale_partition",
}


@app.default
def spark_scale(*, rounds: Count = 3, partitions: Count = 4) -> int:
    """Print a table for each way of writing; write JSON and plots to bench/results/.

    Parameters
    ----------
    rounds
        How often each size is measured, after one round to warm up; each starts with another size.
    partitions
        Partitions of the DataFrame; two tasks run at a time.
    """
    with database() as url, driver_jar() as jar, spark_session(jar) as session:
        frames = {size: cached_invoices(session, size, partitions) for size in SIZES}
        for way, name in WAYS.items():
            ways = {
                f"{size:,} invoices": partial(measure, url, writers(session, frame, url, partitions)[way], size, money)
                for size, (frame, money) in frames.items()
            }
            rows = dict(zip(ways, (2 * size for size in SIZES), strict=True))
            turns = take_turns(console, ways, rounds=rounds, rows=rows)
            titles = Titles(str(way), f"{SIZES[0]:,}", f"Spark's writes: {way}", "rows of both tables a second")
            options = {"rounds": rounds, "partitions": partitions}
            report_turns(console, name, turns, [*ways], titles=titles, options=options)
    return 0


if __name__ == "__main__":
    main(app)
