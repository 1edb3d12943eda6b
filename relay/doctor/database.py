"""The database's part of the checklist: one connection, one check after the other."""

from collections.abc import Callable, Iterator

import psycopg
from psycopg.sql import SQL

from relay.database import connect, one_line
from relay.doctor.finding import Finding, Verdict
from relay.doctor.server import server_version
from relay.doctor.tables import tables_at_head
from relay.errors import DatabaseUnavailableError
from relay.settings import Settings

CONNECTION = "database.connection"

# By the name of their findings, in the order of the checklist.
CHECKS: dict[str, Callable[[psycopg.Connection, Settings], Iterator[Finding]]] = {
    "database.version": server_version,
    "database.tables": tables_at_head,
}

SET_TIMEOUT = SQL("SELECT set_config('statement_timeout', %(milliseconds)s, false)")


def examine_database(settings: Settings) -> Iterator[Finding]:
    """Look at the database; without a connection every check is skipped."""
    try:
        connection = connect(settings.database)
    except DatabaseUnavailableError as error:
        remedy = "check the host, database, user and password in database.url"
        yield Finding(CONNECTION, Verdict.FAILED, str(error), remedy)
        yield from (Finding(name, Verdict.SKIPPED, "no connection") for name in CHECKS)
        return
    with connection:
        info = connection.info
        yield Finding(CONNECTION, Verdict.OK, f"{info.host}:{info.port} lets {info.user} into {info.dbname}")
        connection.execute(SET_TIMEOUT, {"milliseconds": str(round(settings.database.command_timeout * 1000))})
        for name, check in CHECKS.items():
            yield from _answered(name, check, connection, settings)


def _answered(
    name: str,
    check: Callable[[psycopg.Connection, Settings], Iterator[Finding]],
    connection: psycopg.Connection,
    settings: Settings,
) -> Iterator[Finding]:
    """Give the findings of one check; what the database does not let us see is no answer."""
    if connection.closed:
        yield Finding(name, Verdict.SKIPPED, "the connection was lost")
        return
    try:
        yield from check(connection, settings)
    except psycopg.Error as error:
        yield Finding(name, Verdict.SKIPPED, one_line(error))
