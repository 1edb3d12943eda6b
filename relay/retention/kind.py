"""The tables that are divided into days, and what is to be seen to before a day of each is dropped."""

from dataclasses import dataclass, replace

from psycopg.sql import SQL, Composed, Literal

from relay.settings import RelaySettings


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A table whose days are dropped.

    Its statements may name {schema}, its name as text, {prefix}, the partition, {day}, its bounds, {first} and
    {next}, and once they are counted its {rows}.
    """

    parent: str
    setting: str
    count: SQL  # the rows of a day, and how many of them must not go
    going: SQL  # runs in the transaction that tells that the day is going, before it is asked who needs it
    needed_by: SQL  # who needs the day and how that ends, in words; NULL: nobody
    unfit: str = ""  # what the rows are that must not go


# Its constraint lets nothing else in; looked at all the same, since a drop cannot be undone.
COUNT_SENT = SQL("SELECT count(*), count(*) FILTER (WHERE state IS DISTINCT FROM 'sent' OR sent_at IS NULL) FROM {day}")

# A replay selects what was sent before it was made. One that was interrupted can be resumed.
NEEDED_BY_REPLAY = """
    SELECT 'replay ' || string_agg(id::text, ', ' ORDER BY id)
        || ' needs it: `relay replay --resume` or `relay replay cancel` ends that'
    FROM {schema}.replay
    WHERE state = 'open' AND coalesce((filter ->> 'since')::timestamptz, '-infinity') < {next}
        AND least((filter ->> 'until')::timestamptz, made_at) > {first}
"""

# A job of Spark holds its days shared (spark/outbox_spark/archiving/ledger.py). One that comes while a day is being
# marked waits until the mark is seen.
NEEDED_BY_SPARK = """
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock(hashtextextended(
            {prefix} || '.day ' || to_char({first} AT TIME ZONE 'UTC', 'YYYY-MM-DD'), 0))
        THEN 'spark/jobs/archive.py or replay.py reads it at this moment' END
"""

# An archive without the last rows is none: a clock that stepped back may have added some to a day that was over.
NOT_ARCHIVED = """
    SELECT CASE WHEN archived.day IS NULL THEN 'it is not archived: spark/jobs/archive.py does that'
        WHEN archived.rows <> {rows} THEN 'it has ' || {rows} || ' rows and ' || archived.rows
            || ' are archived: spark/jobs/archive.py --again does that anew' END
    FROM (VALUES (({first} AT TIME ZONE 'UTC')::date)) AS this (day)
    LEFT JOIN {schema}.archived_day AS archived ON archived.day = this.day
"""

# Making a replay takes it shared (relay/replay/job.py): it is made before the day is marked, and keeps the day, or
# after, and then its maker is told from which day on there are rows.
REPLAY_LOCK = "hashtextextended({prefix} || '.replay and retention', 0)"
TAKE_REPLAY_LOCK = SQL(f"SELECT pg_advisory_xact_lock({REPLAY_LOCK})")

COUNT_APPLIED = SQL("SELECT count(*), 0 FROM {day}")

# From now on the day is not made again (ensure_inbox_days): what comes of it cannot be told from what was applied.
FORGET = SQL("UPDATE {schema}.inbox_memory SET since = greatest(since, ({next} AT TIME ZONE 'UTC')::date)")

NEEDED_BY_NOBODY = SQL("SELECT NULL")

NEEDED_BY_READERS = f"SELECT coalesce(({NEEDED_BY_REPLAY}), ({NEEDED_BY_SPARK}))"

SENT = Kind("message_sent", "relay.retention", COUNT_SENT, TAKE_REPLAY_LOCK, SQL(NEEDED_BY_READERS), "not sent")
SENT_AND_ARCHIVED = replace(SENT, needed_by=SQL(f"SELECT coalesce(({NEEDED_BY_READERS}), ({NOT_ARCHIVED}))"))
INBOX = Kind("processed_message", "relay.inbox_retention", COUNT_APPLIED, FORGET, NEEDED_BY_NOBODY)


def replay_lock(schema: str) -> Composed:
    """Give the number of the lock between who makes a replay (shared) and who marks a day."""
    return SQL(REPLAY_LOCK).format(prefix=Literal(schema))


def sent_kind(relay: RelaySettings) -> Kind:
    """Tell what is to be seen to before a day of sent rows is dropped."""
    return SENT_AND_ARCHIVED if relay.retention_waits_for_archive else SENT


def kept_days(relay: RelaySettings) -> dict[Kind, int]:
    """Tell how many days are kept of what a relay drops by itself."""
    days = {sent_kind(relay): relay.retention_days, INBOX: relay.inbox_retention_days}
    return {kind: keep for kind, keep in days.items() if keep is not None}
