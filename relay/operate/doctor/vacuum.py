"""Dead rows, and who keeps them: the hot partition stays small only if they are cleared away."""

from collections.abc import Iterator

import psycopg
from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.engine.nodes.vacuum import HELD_LONG
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.holders import long_holders
from relay.servers.postgres.database import one

MANY_DEAD = 100_000  # twenty times what message_pending is vacuumed at; a busy minute leaves more, for a minute
VACUUMED_WITHIN = 300.0  # seconds
OLD_TRANSACTION_IDS = 500_000_000  # the server stops all writing at 2,000 million

SEES_AGES = "SELECT pg_has_role('pg_read_all_stats', 'USAGE')"
READ_SLOTS = """
    SELECT slot_name, coalesce(pg_size_pretty(pg_wal_lsn_diff(
            CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn)),
        'no'), xmin IS NOT NULL
    FROM pg_replication_slots
    WHERE NOT active AND (restart_lsn IS NOT NULL OR xmin IS NOT NULL)
    ORDER BY slot_name
"""
READ_HOT_PARTITION = SQL("""
    SELECT n_live_tup, n_dead_tup,
        extract(epoch FROM now() - greatest(last_autovacuum, last_vacuum))::float8,
        EXISTS (SELECT FROM pg_options_to_table(reloptions)
                WHERE option_name = 'autovacuum_enabled' AND NOT option_value::boolean),
        NOT (current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean)
    FROM pg_stat_all_tables JOIN pg_class ON pg_class.oid = relid
    WHERE relid = to_regclass(format('%%I.message_pending', %(schema)s::text))
""")
READ_AGE = "SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()"


def old_snapshots(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    """Name who has an old snapshot, or has left a transaction open or prepared."""
    check = "database.snapshots"
    (sees_ages,) = one(connection.execute(SEES_AGES).fetchone())
    holders = long_holders(connection)
    for holder in holders:
        yield Finding(check, Verdict.WARNING, str(holder), "end or decide it: docs/database.md")
    if not sees_ages:
        words = "how old other people's transactions are is not shown to this role"
        yield Finding(check, Verdict.SKIPPED, words, f"GRANT pg_read_all_stats TO {connection.info.user}")
    elif not holders:
        yield Finding(check, Verdict.OK, f"nobody has kept dead rows for {HELD_LONG:.0f} s or more")


def replication_slots(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.slots"
    slots = connection.execute(READ_SLOTS).fetchall()
    for name, size, keeps_rows in slots:
        words = f"nobody reads replication slot {name}, which keeps {size} of WAL{' and dead rows' * keeps_rows}"
        remedy = f"start its reader, or SELECT pg_drop_replication_slot('{name}'): else the disk fills up"
        yield Finding(check, Verdict.WARNING, words, remedy)
    if not slots:
        yield Finding(check, Verdict.OK, "no replication slot is without a reader")


def hot_partition(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    check, schema = "database.vacuum", settings.database.schema_name
    row = connection.execute(READ_HOT_PARTITION, {"schema": schema}).fetchone()
    if row is None:
        yield Finding(check, Verdict.SKIPPED, f"there is no {schema}.message_pending")
        return
    live, dead, ago, is_off_here, is_off = row
    vacuumed = "never vacuumed" if ago is None else f"vacuumed {ago:.0f} s ago"
    words = f"message_pending has {live} live and {dead} dead rows, {vacuumed}"
    if is_off:
        yield Finding(check, Verdict.WARNING, f"autovacuum is off; {words}", "set autovacuum = on, track_counts = on")
    elif is_off_here:
        remedy = f"ALTER TABLE {schema}.message_pending RESET (autovacuum_enabled)"
        yield Finding(check, Verdict.WARNING, f"autovacuum is off for this table; {words}", remedy)
    elif dead > MANY_DEAD and (ago is None or ago > VACUUMED_WITHIN):
        remedy = (
            f"see database.snapshots; if it finds no fault, VACUUM {schema}.message_pending"
            " and look at autovacuum's log"
        )
        yield Finding(check, Verdict.WARNING, words, remedy)
    else:
        yield Finding(check, Verdict.OK, words)


def transaction_ids(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.transaction_ids"
    (age,) = one(connection.execute(READ_AGE).fetchone())
    words = f"the oldest transaction id is {age:,} transactions old"
    if age > OLD_TRANSACTION_IDS:
        remedy = "find what keeps vacuum from freezing (database.snapshots, database.slots), then VACUUM (FREEZE)"
        yield Finding(check, Verdict.WARNING, f"{words}; at 2,000 million the server stops all writing", remedy)
    else:
        yield Finding(check, Verdict.OK, words)
