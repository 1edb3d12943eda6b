"""What came of a batch: it was written, or it was in the ledger already; through the log, and as a value."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outbox_spark.errors import BatchError
from outbox_spark.ledger import Batch
from outbox_spark.options import SKIP

log = logging.getLogger("outbox_spark")


class Outcome(StrEnum):
    """What a run under the name of a batch did."""

    WRITTEN = "written"
    RECOGNISED = "recognised"  # an earlier run has written it


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a batch, and how many rows became what.

    Attributes:
        outcome: "written", or "recognised", when nothing was written again.
        rows: inserted or updated.
        events: written to the outbox.
        deleted: rows that `deleteColumn` deleted.
        unchanged: rows that changed nothing in the table, and made no event.
        bad_rows: rows that no table takes, in `badRowsTable`.
        batch: as the ledger has it; None when this run has written it.
    """

    app_id: str
    version: int
    outcome: Outcome
    rows: int = 0
    events: int = 0
    deleted: int = 0
    unchanged: int = 0
    bad_rows: int = 0
    batch: Batch | None = None

    @classmethod
    def written(cls, app_id: str, version: int, row_counts: Mapping[str, Any]) -> "Result":
        """Return that a run has written the batch."""
        return cls._of(app_id, version, row_counts, outcome=Outcome.WRITTEN)

    @classmethod
    def recognised(cls, found: Batch) -> "Result":
        """Return that a run has found the batch in the ledger."""
        return cls._of(found.app_id, found.version, found.row_counts, outcome=Outcome.RECOGNISED, batch=found)

    @classmethod
    def last(cls, found: Batch) -> "Result":
        """Return what the last run under the name did."""
        outcome = Outcome.RECOGNISED if found.row_counts.get("repeats") else Outcome.WRITTEN
        return cls._of(found.app_id, found.version, found.row_counts, outcome=outcome, batch=found)

    @classmethod
    def _of(
        cls, app_id: str, version: int, row_counts: Mapping[str, Any], *, outcome: Outcome, batch: Batch | None = None
    ) -> "Result":
        # A job may have written anything into the ledger.
        counts = {name: count for name, count in row_counts.items() if isinstance(count, int)}
        return cls(
            app_id,
            version,
            outcome,
            rows=counts.get("rows", 0),
            events=counts.get("messages", 0),
            deleted=counts.get("deleted", 0),
            unchanged=counts.get("unchanged", 0),
            bad_rows=counts.get("bad_rows", 0),
            batch=batch,
        )

    def __str__(self) -> str:
        more = ((self.deleted, "deleted"), (self.unchanged, "unchanged"), (self.bad_rows, "bad rows"))
        counts = [f"{self.rows} rows", f"{self.events} events", *(f"{count} {what}" for count, what in more if count)]
        return f"batch {self.app_id!r} version {self.version} {self.outcome}: {', '.join(counts)}"


def say(result: Result) -> None:
    """Write it to the driver's log; as a warning when a batch is not written again, or has bad rows."""
    if result.outcome is Outcome.WRITTEN:
        log.log(logging.WARNING if result.bad_rows else logging.INFO, "outbox: %s", result)
    else:
        log.warning("outbox: %s, in the ledger before this run, which writes nothing", result)


def refuse_recognised(result: Result, on_recognised: str) -> None:
    """Raise BatchError where a batch that is in the ledger already is a fault."""
    if result.outcome is Outcome.RECOGNISED and on_recognised != SKIP:
        raise BatchError(
            f"{result}, in the ledger before this run, and onRecognised is fail: nothing was written. Give new rows "
            "another version"
        )
