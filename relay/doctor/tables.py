"""The outbox tables: are they there, with the days that come next?"""

from collections.abc import Iterator

import psycopg
from psycopg.sql import SQL, Identifier

from relay.compatibility import READ_TABLES, release_needed
from relay.config.settings import Settings
from relay.doctor.finding import Finding, Verdict
from relay.operate.revision import head_revision

DAYS_AHEAD = 3  # today (UTC) and the next two, as the relay makes them (`database_retry.ENSURE_DAYS`)

# A day is there when its partition is attached; a table that only has the name keeps it from being made.
READ_DAYS = SQL("""
    SELECT part.name, part.oid IS NOT NULL, pg_inherits.inhrelid IS NOT NULL
    FROM generate_series(0, %(days)s - 1) AS day
    CROSS JOIN LATERAL (
        SELECT 'message_sent_' || to_char((now() AT TIME ZONE 'UTC')::date + day, 'YYYYMMDD') AS name
    ) AS wanted
    CROSS JOIN LATERAL (
        SELECT wanted.name, to_regclass(format('%%I.%%I', %(schema)s::text, wanted.name))::oid AS oid
    ) AS part
    LEFT JOIN pg_inherits
        ON pg_inherits.inhrelid = part.oid AND inhparent = to_regclass(format('%%I.message_sent', %(schema)s::text))
    ORDER BY day
""")

READ_LOG = SQL("""
    SELECT coalesce(sum(uncovered), 0)::bigint, count(*) FILTER (WHERE number > 0),
        count(*) FILTER (WHERE first > (SELECT last_value FROM {schema}.message_id_seq)),
        EXISTS (SELECT FROM {schema}.message_log_far),
        {schema}.settled_to() > (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq)
    FROM {schema}.segment
    WHERE emptied_at IS NULL
""")


def tables_at_head(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    check, schema, wanted = "database.tables", settings.database.schema_name, head_revision()
    try:
        row = connection.execute(READ_TABLES.format(schema=Identifier(schema))).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None
    found, note = row or ("none", None)
    words = f"schema {schema} is of version {found}; this release needs {wanted}"
    if needed := release_needed(note):
        yield Finding(check, Verdict.FAILED, f"{words}, and they need release {needed}", f"run release {needed}")
    elif row and found >= wanted:  # a newer one is served: a migration runs before the relays are replaced
        yield Finding(check, Verdict.OK, words)
    else:
        yield Finding(check, Verdict.FAILED, words, "run `relay migrate`, or check database.schema")


def log_covered(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Each row of the log that the relay has passed is named by a receipt, and the next rows have a segment."""
    check, schema = "database.log", settings.database.schema_name
    try:
        row = connection.execute(READ_LOG.format(schema=Identifier(schema))).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedFunction):
        row = None
    if row is None:
        yield Finding(check, Verdict.SKIPPED, f"there is no {schema}.segment", "run `relay migrate`")
        return
    uncovered, segments, ahead, in_far, is_set_back = row
    if uncovered:
        words = f"no receipt names {uncovered} rows of the log that the relay has passed: they are not sent"
        remedy = f"a relay's sweep sends them; SELECT number, uncovered FROM {schema}.segment says where they are"
        yield Finding(check, Verdict.FAILED, words, remedy)
    if is_set_back:
        words = f"{schema}.message_id_seq was set back: receipts of the log name ids that it will give again"
        remedy = "start a relay: the sequence leaps over them, and sweeps find the rows that have come since"
        yield Finding(check, Verdict.FAILED, words, remedy)
    if in_far or (segments and not ahead):
        words = f"{'rows lie behind' if in_far else 'no segment is ahead of'} the last segment of the log"
        remedy = "a relay makes segments each minute: see its event segments.failed, and database.snapshots"
        yield Finding(check, Verdict.WARNING, words, remedy)
    elif not uncovered and not is_set_back:
        yield Finding(
            check, Verdict.OK, f"{ahead} segments of the log are ahead" if segments else "the log is not used"
        )


def days_ahead(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """What is sent is marked by moving it to its day."""
    check = "database.days"
    parameters = {"schema": settings.database.schema_name, "days": DAYS_AHEAD}
    days = connection.execute(READ_DAYS, parameters).fetchall()
    in_the_way = [name for name, exists, is_attached in days if exists and not is_attached]
    missing = [name for name, exists, _ in days if not exists]
    if in_the_way:
        words = f"{', '.join(in_the_way)} is no partition of message_sent: that day can neither be made nor marked"
        yield Finding(check, Verdict.FAILED, words, "rename or drop that table")
    if missing:
        words = f"no partition {', '.join(missing)}; a relay makes them when it starts, and each hour"
        yield Finding(check, Verdict.WARNING, words, "if a relay runs, see its event days.blocked")
    if not in_the_way and not missing:
        yield Finding(check, Verdict.OK, f"today's partition and those of the next {DAYS_AHEAD - 1} days are there")
