"""Each host of database.url: is it there, and does it take writes?"""

from collections.abc import Iterator

import psycopg

from relay.config.settings import DatabaseSettings
from relay.errors import DatabaseUnavailableError
from relay.operate.doctor.finding import Finding, Verdict
from relay.servers.postgres.database import connect, each_host, host_of, login_of, one

CHECK = "database.host"
CHECK_URL = "check the host, database, user, password and sslmode in database.url"

# As libpq's target_session_attrs=read-write decides it.
READ_STATE = """
    SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean
"""


class Hosts:
    """Looks at one host after the other and keeps the connection that the checks are to use; `with` closes it.

    Attributes:
        connection: to the first that takes writes, else to the first that lets us in, else `None`.
    """

    def __init__(self, database: DatabaseSettings) -> None:
        self._database = database
        self.connection: psycopg.Connection | None = None

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        if self.connection is not None:
            self.connection.close()

    def look(self) -> Iterator[Finding]:
        """Yield what each host is, and whether exactly one takes writes."""
        ways = each_host(self._database)
        primaries: list[str] = []
        for way in ways:
            place = f"{way.get('host') or way.get('hostaddr') or 'local socket'}:{way['port']}"
            try:
                connection = connect(self._database, is_lent=True, **way, application_name="outbox-relay doctor")
                place = host_of(connection)  # a service's file may name the server, too
                in_recovery, is_read_only = one(connection.execute(READ_STATE).fetchone())
            except (DatabaseUnavailableError, psycopg.Error) as error:
                verdict = Verdict.WARNING if len(ways) > 1 else Verdict.FAILED
                yield Finding(CHECK, verdict, f"{place}: {error}", CHECK_URL)
                continue
            takes_writes = not in_recovery and not is_read_only
            state = "takes writes" if takes_writes else "is a standby" if in_recovery else "is read only"
            yield Finding(CHECK, Verdict.OK, f"{place} {state}")
            primaries += [place] if takes_writes else []
            self._keep(connection, is_better=takes_writes and len(primaries) == 1)
        yield from self._primaries(primaries)

    def _primaries(self, primaries: list[str]) -> Iterator[Finding]:
        check = "database.primary"
        if self.connection is None:
            yield Finding(check, Verdict.FAILED, "no host lets us in", CHECK_URL)
        elif not primaries:
            remedy = "name the primary in database.url, or promote one; `relay run` waits for it and then gives up"
            yield Finding(check, Verdict.FAILED, "no host takes writes", remedy)
        elif len(primaries) > 1:
            words = f"{' and '.join(primaries)} take writes: a split, or servers that are no pair"
            yield Finding(check, Verdict.FAILED, words, "end all but one: what is written to one is not on the others")
        else:
            words = f"the relay goes to {login_of(self.connection)}; no other host takes writes"
            yield Finding(check, Verdict.OK, words)

    def _keep(self, connection: psycopg.Connection, *, is_better: bool) -> None:
        if self.connection is not None and is_better:
            self.connection.close()
            self.connection = None
        if self.connection is None:
            self.connection = connection
        else:
            connection.close()
