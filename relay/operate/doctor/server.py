"""What the PostgreSQL server is, how it is set up, and what keeps its dead rows."""

import time
from collections.abc import Iterator

import psycopg
from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.engine.nodes.vacuum import HELD_LONG
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.holders import BRING_STANDBY, NO_IDS_LEFT, commits_without_standby, long_holders
from relay.servers.postgres.database import one

OLDEST_SERVER, NEWEST_SERVER = 15, 18  # the releases that the tests run on (docs/versions.md)

NODE_SESSIONS = 2  # the one with the lanes, and one now and then: to find a pooler, to look as here, to drop days
METRICS_SESSIONS = 1  # relay/probes/backlog.py, when http.listen names an address
OPERATOR_SESSIONS = 2  # a replay, and a `relay status` meanwhile

LOST_IN_A_CRASH = {
    "fsync": "a crash of the machine may destroy the whole database",
    "full_page_writes": "a crash of the machine may leave torn pages, which nobody notices",
    "synchronous_commit": "a crash of the server loses the last commits, which their writers believe to be kept",
}
READ_DURABILITY = """
    SELECT name, setting = 'off', source FROM pg_settings WHERE name = ANY (%(names)s) ORDER BY name
"""

# Sessions of other roles count, too, whether or not we may see what they do.
READ_ROOM = """
    SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
            - coalesce(current_setting('reserved_connections', true), '0')::int,
        (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()),
        (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user),
        (SELECT count(*) FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND usename = current_user AND pid <> pg_backend_pid()),
        (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database()),
        (SELECT count(*) FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid())
"""

# The server's own, for sessions that do not ask for others; the relay's does.
READ_KEEPALIVE = """
    SELECT inet_client_addr() IS NULL,
        current_setting('tcp_keepalives_idle')::int
            + current_setting('tcp_keepalives_interval')::int * current_setting('tcp_keepalives_count')::int
"""
DEAD_TOO_LONG = 600  # seconds


def server_version(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.version"
    version = connection.info.server_version
    words = f"PostgreSQL {connection.info.parameter_status('server_version')}"
    if version >= (NEWEST_SERVER + 1) * 10_000:
        yield Finding(check, Verdict.OK, f"{words}: newer than {NEWEST_SERVER}, the newest that the tests run on")
    elif version >= OLDEST_SERVER * 10_000:
        yield Finding(check, Verdict.OK, words)
    else:
        yield Finding(check, Verdict.FAILED, words, f"the relay needs PostgreSQL {OLDEST_SERVER} or later")


def free_connections(connection: psycopg.Connection, settings: Settings) -> Iterator[Finding]:
    """Compare what is free with what one relay and its operators use; one that runs already has taken its part."""
    check = "database.connections"
    needed = NODE_SESSIONS + OPERATOR_SESSIONS + (METRICS_SESSIONS if settings.http.listen else 0)
    (total, used, of_role, by_role, of_database, in_database) = one(connection.execute(READ_ROOM).fetchone())
    limits = [("max_connections", total, used)]
    limits += [("the role's CONNECTION LIMIT", of_role, by_role)] if of_role is not None else []
    limits += [("the database's CONNECTION LIMIT", of_database, in_database)] if of_database is not None else []
    name, limit, taken = min(limits, key=lambda each: each[1] - each[2])
    words = f"{limit - taken} of {limit} connections are free by {name}; a relay with its operators uses {needed}"
    if limit < needed:
        yield Finding(check, Verdict.FAILED, words, f"raise {name}")
    elif limit - taken < needed:
        yield Finding(check, Verdict.WARNING, words, f"raise {name}, or let applications share a pool")
    else:
        yield Finding(check, Verdict.OK, words)


def durability(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.durability"
    found = connection.execute(READ_DURABILITY, {"names": list(LOST_IN_A_CRASH)}).fetchall()
    off = [(name, source) for name, is_off, source in found if is_off]
    for name, source in off:
        words = f"{name} is off ({source}): {LOST_IN_A_CRASH[name]}"
        yield Finding(check, Verdict.WARNING, words, f"set {name} = on")
    if not off:
        yield Finding(check, Verdict.OK, f"{', '.join(name for name, *_ in found)} are on")


def standby(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.standby"
    if waiting := commits_without_standby(connection):
        yield Finding(check, Verdict.FAILED, waiting.words, BRING_STANDBY)
    else:
        yield Finding(check, Verdict.OK, "no commit waits for a synchronous standby")


def keepalive(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    """A client whose machine died keeps its locks and its snapshot for as long as the server believes in it."""
    check = "database.keepalive"
    ours = connection.info.get_parameters()
    if ours.get("keepalives") == "0":
        words = "database.url says keepalives=0: the relay learns only by database.command_timeout that a server died"
        yield Finding(check, Verdict.WARNING, words, "leave it out: the relay sets keepalives by itself")
    is_local, seconds = one(connection.execute(READ_KEEPALIVE).fetchone())
    if is_local:
        yield Finding(check, Verdict.SKIPPED, "through a local socket nobody dies without a word")
    elif seconds > DEAD_TOO_LONG:
        minutes = round(seconds / 60)
        words = f"the server believes for {minutes} min in a writer whose machine died, and keeps its locks so long"
        remedy = "on the server: tcp_keepalives_idle = 60, tcp_keepalives_interval = 10, tcp_keepalives_count = 3"
        yield Finding(check, Verdict.WARNING, words, remedy)
    else:
        yield Finding(check, Verdict.OK, f"the server notices within {seconds} s that a writer's machine died")


TOLERATED = 1.0  # seconds
LOOKS = 3  # the one with the shortest way there and back counts

READ_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


def clock_difference(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    """Nothing of the relay's decides by this host's clock, but people and their log compare times."""
    check = "database.clock"
    round_trip, ahead = min(_look(connection) for _ in range(LOOKS))
    direction = "ahead of" if ahead > 0 else "behind"
    words = f"the database's clock is {abs(ahead):.3f} s {direction} this host's, give or take {round_trip / 2:.3f} s"
    if abs(ahead) - round_trip / 2 <= TOLERATED:
        yield Finding(check, Verdict.OK, words)
    else:
        remedy = "set both by NTP: days and delays go by the database's clock, time stamps in the log by this host's"
        yield Finding(check, Verdict.WARNING, words, remedy)


def _look(connection: psycopg.Connection) -> tuple[float, float]:
    """Return the time there and back, and by how much the database is ahead of the middle of it; seconds."""
    asked = time.time()
    (theirs,) = one(connection.execute(READ_CLOCK).fetchone())
    answered = time.time()
    return answered - asked, theirs - (asked + answered) / 2


MANY_DEAD = 100_000  # twenty times what message_pending is vacuumed at; a busy minute leaves more, for a minute
VACUUMED_WITHIN = 300.0  # seconds
OLD_TRANSACTION_IDS = 500_000_000

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
# The oldest of all databases counts: no database takes writes then.
READ_AGE = """
    SELECT age(datfrozenxid), quote_ident(datname) FROM pg_database ORDER BY age(datfrozenxid) DESC, datname LIMIT 1
"""


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


QUEUE_GROWS, QUEUE_FULL = 0.1, 0.5  # shares of the queue of NOTIFY, of 8 GB unless max_notify_queue_pages says less

READ_QUEUE = "SELECT pg_notification_queue_usage()"


def notifications(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    """Return how full the queue is that the server's applications share: a listener that reads nothing fills it."""
    check = "database.notifications"
    (usage,) = one(connection.execute(READ_QUEUE).fetchone())
    words = f"the queue of NOTIFY is {usage:.0%} full"
    remedy = (
        "end the session that listens and reads nothing: pg_stat_activity has it as idle in transaction, or waiting"
        " for ClientWrite. The server's log names it once the queue is half full"
    )
    if usage >= QUEUE_FULL:
        late = "writers do not ring, so rows wait for poll_interval; full, it fails all who notify"
        yield Finding(check, Verdict.WARNING, f"{words}: {late}", remedy)
    elif usage >= QUEUE_GROWS:
        yield Finding(check, Verdict.WARNING, f"{words}: a session that listens reads nothing", remedy)
    else:
        yield Finding(check, Verdict.OK, words)


def transaction_ids(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
    check = "database.transaction_ids"
    age, database = one(connection.execute(READ_AGE).fetchone())
    words = f"the oldest transaction id, of database {database}, is {age:,} transactions old"
    remedy = f"end what keeps vacuum from freezing (database.snapshots, database.slots), then VACUUM in {database}"
    if age >= NO_IDS_LEFT:
        yield Finding(check, Verdict.FAILED, f"{words}: the server refuses all that writes", remedy)
    elif age > OLD_TRANSACTION_IDS:
        at = f"at {NO_IDS_LEFT:,} the server refuses all that writes"
        yield Finding(check, Verdict.WARNING, f"{words}; {at}", remedy)
    else:
        yield Finding(check, Verdict.OK, words)
