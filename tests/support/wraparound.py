"""A server that has no transaction id left: it answers, and refuses each command that needs one.

A replication slot that nothing reads keeps vacuum from freezing, as on servers that come to this in earnest.
"""

import psycopg

from relay.testing.servers.postgres import UNPRIVILEGED, PostgresServer, give_away
from relay.testing.servers.process import run

SETTINGS = {"wal_level": "logical", "autovacuum_naptime": "1s"}
KEEP = "SELECT pg_create_logical_replication_slot('forgotten', 'test_decoding')"
OLDEST = "SELECT catalog_xmin::text::bigint FROM pg_replication_slots"  # autovacuum freezes what is older
XIDS_A_BYTE, XIDS_A_SEGMENT = 4, 2**20  # of pg_xact, with pages of 8 KiB
REFUSED_FROM = 2**31 - 1 - 3_000_000  # transactions behind the oldest id (varsup.c, SetTransactionIdLimit)


class WrappingServer(PostgresServer):
    """A server that can come to that."""

    def __init__(self, version: int) -> None:
        super().__init__(version, settings=SETTINGS)

    def use_up(self) -> None:
        """Leave no transaction id, until `free`."""
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(KEEP)
            (oldest,) = connection.execute(OLDEST).fetchone() or (0,)
        self.stop()
        self._set_next_transaction(oldest + REFUSED_FROM)
        self.start()

    def free(self) -> None:
        """Do what PostgreSQL says in its hint; autovacuum comes to `template0`, which lets nobody in, soon."""
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot('forgotten')")
            names = connection.execute("SELECT datname FROM pg_database WHERE datallowconn").fetchall()
        for (name,) in names:
            with psycopg.connect(self.url(name), autocommit=True) as connection:
                connection.execute("VACUUM (FREEZE)")

    def _set_next_transaction(self, xid: int) -> None:
        """Set the next transaction id, with the page of the commit log that it is noted in; the server is stopped."""
        run([self.program("pg_resetwal"), "-x", str(xid), "-D", self._data], user=UNPRIVILEGED, environment={})
        segment = self._data / "pg_xact" / f"{xid // XIDS_A_SEGMENT:04X}"
        segment.write_bytes(bytes(XIDS_A_SEGMENT // XIDS_A_BYTE))
        segment.chmod(0o600)
        give_away(segment)
