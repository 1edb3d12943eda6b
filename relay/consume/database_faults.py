"""What has caused an error of the database: the server, the session, another transaction, or the message.

Only an error that the message has caused counts as one of its attempts. docs/consumer.md has the same table.
"""

from enum import StrEnum

import psycopg

from relay.servers.postgres.database import has_no_ids

# The server's function that raises "cached plan must not change result type": the text depends on its language.
STALE_PLAN = "RevalidateCachedQuery"


class DatabaseFault(StrEnum):
    """What has caused an error, and so what the consumer does."""

    OUTAGE = "outage"  # the server can do no work: the consumer waits for it, without a limit
    SESSION = "session"  # prepared statements of the session are stale or gone: tried again at once on another session
    CONFLICT = "conflict"  # another transaction was in the way: tried again at once
    DURATION = "duration"  # the handler took so long that the server ended the session: it would take long again
    MESSAGE = "message"  # everything else


# By the SQLSTATE or its beginning.
FAULTS = {
    "08": DatabaseFault.OUTAGE,  # connection exceptions
    "0A000": DatabaseFault.SESSION,  # a cached plan whose result type was altered; any other 0A000 is MESSAGE
    "25006": DatabaseFault.OUTAGE,  # a standby, or a server that takes no writes
    "25P03": DatabaseFault.DURATION,  # idle_in_transaction_session_timeout
    "25P04": DatabaseFault.DURATION,  # transaction_timeout
    "26000": DatabaseFault.SESSION,  # the prepared statement does not exist
    "40001": DatabaseFault.CONFLICT,  # serialization failure
    "40P01": DatabaseFault.CONFLICT,  # deadlock
    "42P05": DatabaseFault.SESSION,  # the prepared statement exists already
    "53": DatabaseFault.OUTAGE,  # disk, memory or connections are used up
    "55P03": DatabaseFault.CONFLICT,  # lock_timeout, or NOWAIT
    "57P": DatabaseFault.OUTAGE,  # an operator, a crash, a start, a dropped database, idle_session_timeout
    "58": DatabaseFault.OUTAGE,  # its operating system and its files
}
# For a limited time, these are tried again without counting as an attempt.
PASSING = (DatabaseFault.SESSION, DatabaseFault.CONFLICT)


def fault_of(error: BaseException) -> DatabaseFault:
    """Return what has caused an error, by the SQLSTATE of the driver's error in it."""
    cause = cause_of(error)
    if not isinstance(cause, psycopg.Error):
        return DatabaseFault.MESSAGE
    if has_no_ids(cause):
        return DatabaseFault.OUTAGE
    code = cause.sqlstate or ""
    if code == "0A000" and cause.diag.source_function != STALE_PLAN:
        return DatabaseFault.MESSAGE
    return next((fault for prefix, fault in FAULTS.items() if code.startswith(prefix)), DatabaseFault.MESSAGE)


def cause_of(error: BaseException) -> BaseException:
    """Return the driver's error if SQLAlchemy has wrapped it; else the error itself."""
    cause = getattr(error, "orig", None)
    return cause if isinstance(cause, BaseException) else error
