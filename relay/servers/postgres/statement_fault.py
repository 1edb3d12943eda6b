"""What the relay does after an error of PostgreSQL while it reads, marks, postpones, parks or sets aside a row.

The rows in flight depend on this. A new session reads the rows that were confirmed but not marked, and sends them
again. So only an error that makes the session useless may end it. After any other error the relay repeats the statement
on the same session, which keeps its lanes and its confirmed rows.
"""

from enum import StrEnum

import psycopg

from relay.servers.postgres.database import one_line


class StatementFault(StrEnum):
    """What the relay does after an error."""

    SESSION = "session"  # the session is lost or useless: the error ends it
    TABLES = "tables"  # another process dropped or changed the tables: the error ends the relay
    RIGHTS = "rights"  # repeated until the right is granted; a session without lanes ends, and the relay with it
    DAY = "day"  # no partition takes the day: the relay makes it, and repeats the statement
    PASSING = "passing"  # passes by itself, or as soon as there is room: repeated
    STANDING = "standing"  # stays until an operator acts: repeated, and nothing more is sent


STALE_PLAN = "RevalidateCachedQuery"  # it raises 0A000 when the result type of a prepared statement has changed

# By the SQLSTATE or its beginning; every other error is STANDING.
FAULTS = {
    "23514": StatementFault.DAY,  # check_violation; if the day exists, another constraint or trigger has raised it
    "25": StatementFault.SESSION,  # the server takes no more writes, or the session's transaction has failed
    "26": StatementFault.SESSION,  # its prepared statements are gone
    "3F": StatementFault.TABLES,  # invalid_schema_name
    "40003": StatementFault.SESSION,  # statement_completion_unknown: the table must be read again
    "40": StatementFault.PASSING,  # deadlocks and serialization failures
    "42501": StatementFault.RIGHTS,
    "42703": StatementFault.TABLES,  # undefined_column
    "42883": StatementFault.TABLES,  # undefined_function
    "42P01": StatementFault.TABLES,  # undefined_table
    "42P05": StatementFault.SESSION,  # duplicate_prepared_statement
    "53": StatementFault.PASSING,  # the disk is full, memory is used up
    "55P03": StatementFault.PASSING,  # lock_timeout
    "57014": StatementFault.PASSING,  # statement_timeout, or an operator's pg_cancel_backend
    "57P": StatementFault.SESSION,  # the server shuts down, or an operator ends the session
}


def fault_of(error: psycopg.Error) -> StatementFault:
    """Return what the relay does after an error."""
    # FATAL and PANIC end the session. The driver's own errors, as for a lost connection, have no severity.
    if error.diag.severity_nonlocalized != "ERROR" or error.diag.source_function == STALE_PLAN:
        return StatementFault.SESSION
    code = error.sqlstate or ""
    return next((fault for prefix, fault in FAULTS.items() if code.startswith(prefix)), StatementFault.STANDING)


def refused_or_lost(error: psycopg.Error) -> str:
    """Return what happened to a statement, as text: the server refused it, or the connection was lost."""
    what = "the connection was lost" if fault_of(error) is StatementFault.SESSION else "PostgreSQL refused"
    return f"{what}: {one_line(error)}"
