"""Two PostgreSQL servers: a primary, and a synchronous standby that has each commit before the client gets its answer.

with Pair() as pair:
    pair.primary.stop(signal.SIGKILL)
    pair.promote()  # the standby now takes writes, without a standby
    pair.rejoin()   # the old primary comes back as synchronous standby
"""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Literal

from relay.testing.servers.postgres import UNPRIVILEGED, PostgresServer
from relay.testing.servers.process import run, wait_for

REPLICATION = "host replication all 127.0.0.1/32 scram-sha-256\n"
IS_SYNCHRONOUS = "SELECT FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"


class Member(PostgresServer):
    """One server of a pair. `of`: the primary that it copies and follows; `port`: the port to listen on."""

    def __init__(self, of: "Member | None" = None, *, port: int = 0) -> None:
        following = {} if of is None else {"primary_conninfo": of.replication_source()}
        super().__init__(settings={"wal_keep_size": "256MB", **following})
        self.port = port
        self._of = of

    def promote(self) -> None:
        """Become the primary. Returns when it takes writes."""
        self._run(SQL("SELECT pg_promote()").format())

    def require_standby(self) -> None:
        """From now on, answer a commit only after a standby has it. Returns when a standby is connected."""
        self._run(SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(Literal("*")))
        self._run(SQL("SELECT pg_reload_conf()").format())
        wait_for(self.has_synchronous_standby, "the standby is synchronous", 20)

    def do_without_standby(self) -> None:
        """From now on, answer a commit without waiting for a standby."""
        self._run(SQL("ALTER SYSTEM RESET synchronous_standby_names").format())
        self._run(SQL("SELECT pg_reload_conf()").format())

    def stop_following(self) -> None:
        """Disconnect from the primary. Returns when it is disconnected."""
        self._run(SQL("ALTER SYSTEM SET primary_conninfo = ''").format())
        self._run(SQL("SELECT pg_reload_conf()").format())
        wait_for(lambda: not self._is_receiving(), "the standby is cut off", 20)

    def _is_receiving(self) -> bool:
        with psycopg.connect(self.admin_url) as connection:
            return connection.execute("SELECT FROM pg_stat_wal_receiver").rowcount > 0

    def has_synchronous_standby(self) -> bool:
        with psycopg.connect(self.admin_url) as connection:
            return connection.execute(IS_SYNCHRONOUS).rowcount > 0

    def replication_source(self) -> str:
        """Return the connection string for a standby of this server."""
        return make_conninfo(host="127.0.0.1", port=self.port, user="postgres", password=self._password)

    def _initialise(self) -> None:
        if self._of is None:
            super()._initialise()
            with (self._data / "pg_hba.conf").open("a") as access:
                access.write(REPLICATION)
            return
        source = ["--dbname", self._of.replication_source(), "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        self._make_own(self._data)
        run([self._binaries / "pg_basebackup", "-D", self._data, *source], user=UNPRIVILEGED, environment={})
        self._write(self._data / "standby.signal", "")
        self._write(self._folder / "password", self._of._password)


class Pair:
    """Starts both servers, and ends them with the block.

    Attributes:
        primary: takes writes.
        other: its standby, or after `promote` the old primary.
    """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.primary = stack.enter_context(Member())
            self.other = stack.enter_context(Member(self.primary))
            self.primary.require_standby()
            self._ports = (self.primary.port, self.other.port)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def url(self, database: str) -> str:
        """Return a URL that leads to the server of the pair that takes writes."""
        user, _, place = self.primary.url(database).rpartition("@")
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"{user}@{hosts}/{place.partition('/')[2]}?target_session_attrs=read-write"

    def promote(self) -> None:
        """Let the standby take over, whatever the primary does. Its commits then wait for no standby."""
        self.other.promote()
        self.primary, self.other = self.other, self.primary

    def rejoin(self) -> None:
        """Bring the old primary back as synchronous standby, on a copy of the new primary's data."""
        self.other.crash()
        self.other = self._stack.enter_context(Member(self.primary, port=self.other.port))
        self.primary.require_standby()
