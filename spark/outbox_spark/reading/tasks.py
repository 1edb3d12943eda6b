"""One read, and the tasks that it is divided into: what the driver plans and the executors run."""

from dataclasses import dataclass

from pyspark.sql.types import StructType

from outbox_spark.asked import ReadOptions
from outbox_spark.spark_api import InputPartition


@dataclass(frozen=True, slots=True)
class Read:
    """One read."""

    options: ReadOptions
    info: str  # libpq's connection string; it may hold the password
    select: str  # ... WHERE true
    conditions: tuple[str, ...]
    schema: StructType

    def where(self, *more: str) -> str:
        """Return the statement under its conditions and these."""
        return " AND ".join((self.select, *self.conditions, *more))


class Task(InputPartition):  # type: ignore[misc]  # mypy does not follow pyspark
    """A statement that one task runs; Spark pickles it."""

    def __init__(self, statement: str, day: str | None = None, check: str | None = None) -> None:
        self.statement = statement
        self.day = day
        self.check = check  # a statement that tells, after the reading, whether all of it was there; None: it was

    def __str__(self) -> str:
        return "the outbox" if self.day is None else f"day {self.day} of the outbox"
