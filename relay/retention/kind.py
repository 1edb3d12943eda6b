"""The tables that are divided into days or segments, and the function of their owner that drops a part of each."""

from dataclasses import dataclass

from psycopg.sql import SQL, Composed, Literal

from relay.config.settings import RelaySettings


@dataclass(frozen=True, slots=True)
class Kind:
    """A table whose days are dropped, or the log, whose segments are emptied."""

    parent: str
    setting: str
    function: str  # with its argument types
    call: str  # names {schema}, {part} and {dry_run}; gives the rows of the part, and who keeps it (NULL: nobody)


SENT_DAY = "drop_sent_day(date, boolean, boolean)"
SENT = Kind("message_sent", "relay.retention", SENT_DAY, "{schema}.drop_sent_day({part}, false, {dry_run})")
SENT_AND_ARCHIVED = Kind(SENT.parent, SENT.setting, SENT_DAY, "{schema}.drop_sent_day({part}, true, {dry_run})")
INBOX = Kind(
    "processed_message",
    "relay.inbox_retention",
    "drop_inbox_day(date, boolean)",
    "{schema}.drop_inbox_day({part}, {dry_run})",
)
EMPTY = "empty_segment(bigint, boolean, boolean)"
LOG = Kind("message_log", "relay.retention", EMPTY, "{schema}.empty_segment({part}, false, {dry_run})")
LOG_AND_ARCHIVED = Kind(LOG.parent, LOG.setting, EMPTY, "{schema}.empty_segment({part}, true, {dry_run})")


def replay_lock(schema: str) -> Composed:
    """Return the number of the lock that making a replay takes shared, and the drop of a day for itself."""
    return SQL("hashtextextended({}, 0)").format(Literal(f"{schema}.replay and retention"))


def sent_kind(relay: RelaySettings) -> Kind:
    """Return what is checked before a day of sent rows is dropped."""
    return SENT_AND_ARCHIVED if relay.retention_waits_for_archive else SENT


def log_kind(relay: RelaySettings) -> Kind:
    """Return what is checked before a segment of the log is emptied."""
    return LOG_AND_ARCHIVED if relay.retention_waits_for_archive else LOG


def kept_days(relay: RelaySettings) -> dict[Kind, int]:
    """Return how many days are kept of what a relay drops by itself."""
    days = {
        sent_kind(relay): relay.retention_days,
        log_kind(relay): relay.retention_days,
        INBOX: relay.inbox_retention_days,
    }
    return {kind: keep for kind, keep in days.items() if keep is not None}
