"""Does it add up? Counts from sources that know nothing of each other, and the rules that they must obey.

The file is counted here, line by line. What was written, sent and projected is counted in the tables. The relay
counts what was confirmed, the consumer what was consumed, and the broker what is left.
"""

from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path

import psycopg
from psycopg.rows import class_row
from rich.table import Table

APP_ID = "cdnow"
VERSION = 1

COUNT_TABLES = """
    SELECT
        (SELECT count(*) FROM billing.quarantine AS line
            WHERE EXISTS (SELECT FROM outbox.batch AS batch
                WHERE batch.app_id = line.app_id AND batch.version = line.version)) AS quarantined,
        (SELECT count(*) FROM billing.invoice) AS invoices,
        (SELECT coalesce(sum(amount), 0) FROM billing.invoice) AS invoiced_money,
        event.written, event.sent, event.parked,
        (SELECT coalesce(sum(published_total), 0)::bigint FROM outbox.node) AS confirmed,
        (SELECT coalesce(sum(done), 0)::bigint FROM outbox.job WHERE kind = 'replay') AS replayed,
        (SELECT count(*) FROM billing.invoice_projection) AS projected,
        (SELECT coalesce(sum(amount), 0) FROM billing.invoice_projection) AS projected_money,
        (SELECT count(*) FROM
            (SELECT * FROM billing.invoice EXCEPT SELECT * FROM billing.invoice_projection) AS gone) AS lost,
        (SELECT count(*) FROM
            (SELECT * FROM billing.invoice_projection EXCEPT SELECT * FROM billing.invoice) AS new) AS invented
    FROM (
        SELECT count(*) AS written,
            count(*) FILTER (WHERE state = 'sent') AS sent,
            count(*) FILTER (WHERE state IN ('parked', 'discarded')) AS parked
        FROM outbox.message_state WHERE writer = %(app_id)s AND batch_id = %(version)s AND event_type = 'InvoiceIssued'
    ) AS event
"""

LIST_QUARANTINED = "SELECT line_number FROM billing.quarantine WHERE app_id = %(app_id)s AND version = %(version)s"
BATCH = {"app_id": APP_ID, "version": VERSION}


@dataclass(frozen=True, slots=True)
class Purchases:
    """The input, counted without Spark."""

    lines: int
    money: Decimal  # of the lines that are not in quarantine


@dataclass(frozen=True, slots=True)
class Tables:
    """What the database holds."""

    quarantined: int
    invoices: int
    invoiced_money: Decimal
    written: int
    sent: int
    parked: int
    confirmed: int  # by the relay's own count
    replayed: int  # by the replays' own count
    projected: int
    projected_money: Decimal
    lost: int  # invoices that the projection does not have, or has otherwise
    invented: int  # the other way round


@dataclass(frozen=True, slots=True)
class Processes:
    """What the consumer itself counted in this run, and what the broker still has."""

    applied: int
    duplicates: int
    left_in_queue: int

    @property
    def consumed(self) -> int:
        return self.applied + self.duplicates


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The whole story of the demo's database, and of the run that just ended."""

    purchases: Purchases
    before: Tables
    after: Tables
    run: Processes

    def problems(self) -> list[str]:
        """Return what does not add up, one line a rule."""
        after, run = self.after, self.run
        # Of this run alone: a relay that was killed has not told its last second's count.
        confirmed_now, sent_now = after.confirmed - self.before.confirmed, after.sent - self.before.sent
        projected_now = after.projected - self.before.projected
        replayed_now = after.replayed - self.before.replayed
        rules = {
            "every purchase is an invoice or in quarantine": self.purchases.lines == after.quarantined + after.invoices,
            "every invoice has its outbox row": after.invoices == after.written,
            "every outbox row is sent": after.written == after.sent,
            "nothing was sent that the broker did not confirm": confirmed_now >= sent_now,
            "everything sent is projected": after.sent == after.projected,
            "everything consumed was projected or known": run.consumed == projected_now + run.duplicates,
            # More may be: what a run before this one was stopped in the middle of comes again as well.
            "everything replayed was known": run.duplicates >= replayed_now,
            "nothing is left in the queue": run.left_in_queue == 0,
            "nothing is lost": after.lost == 0,
            "nothing is invented": after.invented == 0,
            "the money is the same at both ends": (
                self.purchases.money == after.invoiced_money == after.projected_money
            ),
        }
        return [rule for rule, holds in rules.items() if not holds]

    def table(self) -> Table:
        """Lay the counts out, each with the place where it was counted."""
        before, after, run = self.before, self.after, self.run
        table = Table(title="Reconciliation", title_justify="left")
        table.add_column("")
        table.add_column("in all", justify="right")
        table.add_column("this run", justify="right")
        table.add_column("counted in", style="dim")

        def row(name: str, now: int | None, this_run: int | None, place: str) -> None:
            table.add_row(name, *("" if count is None else f"{count:,}" for count in (now, this_run)), place)

        row("purchases in", self.purchases.lines, None, "the file, by the demo")
        row("quarantined", after.quarantined, after.quarantined - before.quarantined, "billing.quarantine")
        row("invoices", after.invoices, after.invoices - before.invoices, "billing.invoice")
        row("outbox rows", after.written, after.written - before.written, "outbox.message")
        row("sent", after.sent, after.sent - before.sent, "state sent")
        row("confirmed", after.confirmed, after.confirmed - before.confirmed, "the relay, at confirms")
        row("replayed", after.replayed, after.replayed - before.replayed, "outbox.job")
        row("consumed", None, run.consumed, "the consumer, at acks")
        row("projected", after.projected, after.projected - before.projected, "billing.invoice_projection")
        row("duplicates absorbed", None, run.duplicates, "the consumer, at the inbox")
        row("left in the queue", run.left_in_queue, None, "the broker")
        row("parked", after.parked, after.parked - before.parked, "state parked")
        row("lost", after.lost, None, "invoices EXCEPT projection")
        table.add_section()
        table.add_row("money in", f"{self.purchases.money:,}", "", "the file, by the demo")
        table.add_row("money invoiced", f"{after.invoiced_money:,}", "", "billing.invoice")
        table.add_row("money projected", f"{after.projected_money:,}", "", "billing.invoice_projection")
        return table


def count_tables(database_url: str) -> Tables:
    """Count what the database holds, all at one moment."""
    with (
        psycopg.connect(database_url) as connection,
        connection.cursor(row_factory=class_row(Tables)) as cursor,
    ):
        found = cursor.execute(COUNT_TABLES, BATCH).fetchone()
    assert found is not None, f"a SELECT of {len(fields(Tables))} counts gives one row"
    return found


def count_purchases(file: Path, database_url: str) -> Purchases:
    """Count the lines of the file that are neither header nor blank, and the money of those not in quarantine."""
    with psycopg.connect(database_url) as connection:
        quarantined = {number for (number,) in connection.execute(LIST_QUARANTINED, BATCH)}
    lines = 0
    money = Decimal(0)
    with file.open(encoding="ascii") as text:
        for number, line in enumerate(text, start=1):
            fields = line.split()
            if not fields or (number == 1 and fields[0].lower() == "customer_id"):
                continue
            lines += 1
            if number not in quarantined:
                money += Decimal(fields[-1])
    return Purchases(lines, money)
