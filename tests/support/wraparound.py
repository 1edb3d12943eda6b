"""A server that has no transaction id left: it answers, and refuses each command that needs one.

A replication slot that nothing reads keeps vacuum from freezing, as on servers that come to this in earnest.
"""

import psycopg

from tests.support.postgres import PostgresServer

SETTINGS = {"wal_level": "logical", "autovacuum_naptime": "1s"}
KEEP = "SELECT pg_create_logical_replication_slot('forgotten', 'test_decoding')"
OLDEST = "SELECT catalog_xmin::text::bigint FROM pg_replication_slots"  # autovacuum freezes what is older
REFUSED_FROM = 2**31 - 1 - 3_000_000  # transactions behind the oldest id (varsup.c, SetTransactionIdLimit)


def use_up(server: PostgresServer) -> None:
    """Leave no transaction id, until `free`."""
    with psycopg.connect(server.admin_url, autocommit=True) as connection:
        connection.execute(KEEP)
        (oldest,) = connection.execute(OLDEST).fetchone() or (0,)
    server.stop()
    server.set_next_transaction(oldest + REFUSED_FROM)
    server.start()


def free(server: PostgresServer) -> None:
    """Do what PostgreSQL says in its hint; autovacuum comes to `template0`, which lets nobody in, a moment later."""
    with psycopg.connect(server.admin_url, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot('forgotten')")
        names = connection.execute("SELECT datname FROM pg_database WHERE datallowconn").fetchall()
    for (name,) in names:
        with psycopg.connect(server.url(name), autocommit=True) as connection:
            connection.execute("VACUUM (FREEZE)")
