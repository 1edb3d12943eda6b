"""The database's part of the checklist: one connection, one check after the other."""

import asyncio
from collections.abc import Callable, Collection, Iterator

import psycopg
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings, Settings
from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.operate.doctor.clock import clock_difference
from relay.operate.doctor.database_hosts import Hosts
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.foreign import lock_holders, owners, shared_inbox, strangers, writers
from relay.operate.doctor.rights import ownership, rights
from relay.operate.doctor.server import durability, free_connections, keepalive, server_version, standby
from relay.operate.doctor.tables import days_ahead, history, publications, tables_at_head, unfinished_batches
from relay.operate.doctor.vacuum import hot_partition, old_snapshots, replication_slots, transaction_ids
from relay.servers.postgres.database import one_line, refuse_pooler

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
    "database.batches": unfinished_batches,
    "database.publications": publications,
    "database.connections": free_connections,
    "database.snapshots": old_snapshots,
    "database.slots": replication_slots,
    "database.vacuum": hot_partition,
    "database.transaction_ids": transaction_ids,
    "database.durability": durability,
    "database.standby": standby,
    "database.keepalive": keepalive,
    "database.clock": clock_difference,
}
POOLER = "database.pooler"

SET_TIMEOUT = SQL("SELECT set_config('statement_timeout', %(milliseconds)s, true)")


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
    except ConfigurationError as error:
        words, _, remedy = str(error).partition(": ")
        return Finding(POOLER, Verdict.FAILED, words, remedy)
    except DatabaseUnavailableError as error:
        return Finding(POOLER, Verdict.SKIPPED, str(error))
    return Finding(POOLER, Verdict.OK, "a session stays ours from one statement to the next")


def _answers(name: str, check: Check, connection: psycopg.Connection, settings: Settings) -> list[Finding]:
    """Return the findings of one check, or why there are no findings."""
    timeout = {"milliseconds": str(round(settings.database.command_timeout * 1000))}
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(SET_TIMEOUT, timeout)
            return list(check(connection, settings))
    except psycopg.Error as error:
        return [Finding(name, Verdict.SKIPPED, error.diag.message_primary or one_line(error))]
