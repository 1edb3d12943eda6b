"""The database's part of the checklist: each host of the URL, then one connection, one check after the other."""

import asyncio
from collections.abc import Callable, Collection, Iterator

import psycopg

from relay.config.settings import DatabaseSettings, Settings
from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.rights import lock_holders, owners, ownership, rights, shared_inbox, strangers, writers
from relay.operate.doctor.server import (
    clock_difference,
    durability,
    free_connections,
    hot_partition,
    keepalive,
    notifications,
    old_snapshots,
    replication_slots,
    server_version,
    standby,
    transaction_ids,
)
from relay.operate.doctor.tables import (
    days_ahead,
    history,
    publications,
    sequences,
    subscriptions,
    tables_at_head,
    unfinished_batches,
)
from relay.servers.postgres.database import (
    OWN_SETTINGS,
    SET_EACH,
    URL,
    connect,
    each_host,
    host_of,
    login_of,
    one,
    one_line,
    refuse_pooler,
    set_own,
)
from relay.servers.postgres.pooler import LENT_OUT, NAME_SERVER

Check = Callable[[psycopg.Connection, Settings], Iterator[Finding]]

# By the name of their findings, in the order of the checklist.
CHECKS: dict[str, Check] = {
    "database.version": server_version,
    "database.tables": tables_at_head,
    "database.rights": rights,
    "database.ownership": ownership,
    "database.owners": owners,
    "database.foreign": strangers,
    "database.consumers": shared_inbox,
    "database.locks": lock_holders,
    "database.writers": writers,
    "database.days": days_ahead,
    "database.history": history,
    "database.sequences": sequences,
    "database.batches": unfinished_batches,
    "database.publications": publications,
    "database.subscriptions": subscriptions,
    "database.connections": free_connections,
    "database.snapshots": old_snapshots,
    "database.slots": replication_slots,
    "database.vacuum": hot_partition,
    "database.notifications": notifications,
    "database.transaction_ids": transaction_ids,
    "database.durability": durability,
    "database.standby": standby,
    "database.keepalive": keepalive,
    "database.clock": clock_difference,
}
POOLER = "database.pooler"


def examine_database(settings: Settings, *, only: Collection[str] | None = None) -> Iterator[Finding]:
    """Look at the database; what cannot be looked at is skipped, and the finding says why. Changes nothing.

    Args:
        only: names of checks, besides those of the hosts; every check unless given.
    """
    names = [name for name in (POOLER, *CHECKS) if only is None or name in only]
    with Hosts(settings.database) as hosts:
        yield from hosts.look()
        connection = hosts.connection
        if connection is None:
            yield from (Finding(name, Verdict.SKIPPED, "no connection") for name in names)
            return
        if POOLER in names:
            yield _pooler(settings.database)
        connection.read_only = True
        connection.prepare_threshold = None  # behind a pooler a prepared statement may be another session's
        for name in names:
            if connection.closed:
                yield Finding(name, Verdict.SKIPPED, "the connection was lost")
            elif name in CHECKS:
                yield from _answers(name, CHECKS[name], connection, settings)


def _pooler(database: DatabaseSettings) -> Finding:
    try:
        asyncio.run(refuse_pooler(database))
    except ConfigurationError:  # the only one: `Hosts` has read the URL
        return Finding(POOLER, Verdict.FAILED, f"{URL} {LENT_OUT}", NAME_SERVER)
    except DatabaseUnavailableError as error:
        return Finding(POOLER, Verdict.SKIPPED, str(error))
    return Finding(POOLER, Verdict.OK, "a session stays ours from one statement to the next")


def _answers(name: str, check: Check, connection: psycopg.Connection, settings: Settings) -> list[Finding]:
    """Return the findings of one check, or why there are no findings."""
    own = OWN_SETTINGS | {"statement_timeout": f"{round(settings.database.command_timeout * 1000)}ms"}
    try:
        with connection.transaction(force_rollback=True):
            # For this transaction alone: the session may be lent by a pooler.
            connection.execute(SET_EACH, set_own(own, is_local=True))
            return list(check(connection, settings))
    except psycopg.Error as error:
        return [Finding(name, Verdict.SKIPPED, error.diag.message_primary or one_line(error))]


HOST = "database.host"
CHECK_URL = "check the host, database, user, password and sslmode in database.url"

# As libpq's target_session_attrs=read-write decides it.
READ_STATE = """
    SELECT pg_is_in_recovery(), setting::boolean, source, quote_ident(current_user), quote_ident(current_database())
    FROM pg_settings WHERE name = 'default_transaction_read_only'
"""
READ_ONLY = "default_transaction_read_only is on"
# What takes it back, by where the server says that it comes from.
SET_BY = {
    "client": "take it out of the options in database.url, or out of PGOPTIONS",
    "user": "ALTER ROLE {role} RESET default_transaction_read_only",
    "database": "ALTER DATABASE {database} RESET default_transaction_read_only",
    "database user": "ALTER ROLE {role} IN DATABASE {database} RESET default_transaction_read_only",
}
SERVER = "ALTER SYSTEM RESET default_transaction_read_only and SELECT pg_reload_conf()"


class Hosts:
    """Looks at one host after the other and keeps the connection that the checks are to use; `with` closes it.

    Attributes:
        connection: to the first that takes writes, else to the first that lets us in, else `None`.
    """

    def __init__(self, database: DatabaseSettings) -> None:
        self._database = database
        self.connection: psycopg.Connection | None = None
        self._set_by: list[str] = []  # what takes back a setting that keeps sessions from writing

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
                in_recovery, is_read_only, source, role, name = one(connection.execute(READ_STATE).fetchone())
            except (DatabaseUnavailableError, psycopg.Error) as error:
                verdict = Verdict.WARNING if len(ways) > 1 else Verdict.FAILED
                yield Finding(HOST, verdict, f"{place}: {error}", CHECK_URL)
                continue
            takes_writes = not in_recovery and not is_read_only
            if is_read_only and not in_recovery:
                self._set_by.append(SET_BY.get(source, SERVER).format(role=role, database=name))
            state = "takes writes" if takes_writes else "is a standby" if in_recovery else f"is read only: {READ_ONLY}"
            yield Finding(HOST, Verdict.OK, f"{place} {state}")
            primaries += [place] if takes_writes else []
            self._keep(connection, is_better=takes_writes and len(primaries) == 1)
        yield from self._primaries(primaries)

    def _primaries(self, primaries: list[str]) -> Iterator[Finding]:
        check = "database.primary"
        if self.connection is None:
            yield Finding(check, Verdict.FAILED, "no host lets us in", CHECK_URL)
        elif not primaries and self._set_by:
            words = f"no host takes writes: {READ_ONLY} for this login"
            yield Finding(
                check, Verdict.FAILED, words, f"{' or '.join(dict.fromkeys(self._set_by))}; or use another login"
            )
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
