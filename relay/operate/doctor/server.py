"""What the PostgreSQL server is, and how it is set up."""

from collections.abc import Iterator

import psycopg

from relay.config.settings import Settings
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.holders import commits_without_standby
from relay.servers.postgres.database import one

OLDEST_SERVER = 15  # the oldest release that the tests run on

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
    if version >= OLDEST_SERVER * 10_000:
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
        words, remedy = str(waiting).split(": ")
        yield Finding(check, Verdict.FAILED, words, remedy)
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
        words = f"the server believes for {seconds} s in a writer whose machine died, and keeps its locks so long"
        remedy = "on the server: tcp_keepalives_idle = 60, tcp_keepalives_interval = 10, tcp_keepalives_count = 3"
        yield Finding(check, Verdict.WARNING, words, remedy)
    else:
        yield Finding(check, Verdict.OK, f"the server notices within {seconds} s that a writer's machine died")
