"""How fast each stage was in this run, by the clock of the database."""

from dataclasses import dataclass
from datetime import datetime

import psycopg
from rich.table import Table

from demo.consumer import NAME
from demo.reconcile import BATCH

READ_CLOCK = "SELECT clock_timestamp()"

# From the first to the last commit of the stage in this run.
SPAN_OF_SENDING = """
    SELECT count(*), extract(epoch FROM max(sent_at) - min(sent_at))::float8
    FROM outbox.sent(%(since)s, 'infinity') WHERE writer = %(app_id)s AND batch_id = %(version)s
"""
SPAN_OF_PROJECTING = """
    SELECT count(*), extract(epoch FROM max(processed_at) - min(processed_at))::float8 FROM outbox.processed_message
    WHERE consumer_name = %(consumer)s AND processed_at >= %(since)s
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage did in this run."""

    name: str
    rows: int
    seconds: float | None  # None: it had nothing to do

    @property
    def rate(self) -> str:
        return f"{self.rows / self.seconds:,.0f}" if self.rows and self.seconds else ""


def read_clock(database_url: str) -> datetime:
    """Return the database's time."""
    with psycopg.connect(database_url) as connection:
        found = connection.execute(READ_CLOCK).fetchone()
    assert found is not None, "a SELECT without FROM gives one row"
    now: datetime = found[0]
    return now


def read_stages(database_url: str, since: datetime) -> list[Stage]:
    """Read off the tables what relay and consumer did since then."""
    values = {**BATCH, "consumer": NAME, "since": since}
    with psycopg.connect(database_url) as connection:
        sent = connection.execute(SPAN_OF_SENDING, values).fetchone()
        projected = connection.execute(SPAN_OF_PROJECTING, values).fetchone()
    assert sent is not None, "an aggregate gives one row"
    assert projected is not None, "an aggregate gives one row"
    return [Stage("relay: published, confirmed, marked", *sent), Stage("consumer: inbox and projection", *projected)]


def rate_table(stages: list[Stage]) -> Table:
    """Lay them out."""
    table = Table(title="Rate of each stage in this run", title_justify="left")
    table.add_column("")
    for heading in ("rows", "seconds", "rows a second"):
        table.add_column(heading, justify="right")
    for stage in stages:
        seconds = "" if stage.seconds is None else f"{stage.seconds:.1f}"
        table.add_row(stage.name, f"{stage.rows:,}", seconds, stage.rate)
    return table
