"""The tables that are divided into days, and the function of migration 0011 that drops a day of each."""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.config.settings import RelaySettings


@dataclass(frozen=True, slots=True)
class DatedTable:
    """A table whose days are dropped."""

    parent: str
    setting: str
    function: str  # with its argument types
    call: str  # names {schema}, {day} and {dry_run}; gives the rows of the day, and who keeps it (NULL: nobody)


SENT_DAY = "drop_sent_day(date, boolean, boolean)"
SENT = DatedTable("message_sent", "relay.retention", SENT_DAY, "{schema}.drop_sent_day({day}, false, {dry_run})")
SENT_AND_ARCHIVED = DatedTable(SENT.parent, SENT.setting, SENT_DAY, "{schema}.drop_sent_day({day}, true, {dry_run})")
INBOX = DatedTable(
    "processed_message",
    "relay.inbox_retention",
    "drop_inbox_day(date, boolean)",
    "{schema}.drop_inbox_day({day}, {dry_run})",
)


FORGET = "forget_failures(integer)"  # causes of failures: they are kept as long as sent rows (migration 0025)

FORGET_BATCHES = "forget_batches(integer, boolean)"  # names of Spark's batches (migration 0026)


def sent_kind(relay: RelaySettings) -> DatedTable:
    """Return what is checked before a day of sent rows is dropped."""
    return SENT_AND_ARCHIVED if relay.retention_waits_for_archive else SENT


def kept_days(relay: RelaySettings) -> dict[DatedTable, int]:
    """Return how many days are kept of what a relay drops by itself."""
    days = {sent_kind(relay): relay.retention_days, INBOX: relay.inbox_retention_days}
    return {kind: keep for kind, keep in days.items() if keep is not None}


def kept_failures(keeps: Mapping[DatedTable, int]) -> int | None:
    """Return for how many days causes of failures are kept; None: without end, as sent rows are."""
    return next((keep for kind, keep in keeps.items() if kind.parent == SENT.parent), None)
