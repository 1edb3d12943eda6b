"""Of what an error of the database speaks: the server, the session, another transaction, or the message.

Only what speaks of the message counts as one of its attempts. The table is that of docs/consumer.md.
"""

from enum import StrEnum

import psycopg

STALE_PLAN = "RevalidateCachedQuery"  # the server's function that raises it; its words depend on the server's language


class DatabaseFault(StrEnum):
    """Of what an error speaks, and so what follows from it."""

    OUTAGE = "outage"  # the server cannot, whatever it is asked for: the consumer waits for it, without a limit
    SESSION = "session"  # its prepared statements are stale or gone: tried again at once on another one
    CONFLICT = "conflict"  # another transaction was in the way: tried again at once
    DURATION = "duration"  # the server ended the session for how long the handler took: the same would come again
    MESSAGE = "message"  # everything else


# By the SQLSTATE or its beginning.
FAULTS = {
    "08": DatabaseFault.OUTAGE,  # connection exceptions
    "0A000": DatabaseFault.SESSION,  # a cached plan whose result type was altered; as for anything else: MESSAGE
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
# Tried again, and no attempt counts, for a limited time.
PASSING = (DatabaseFault.SESSION, DatabaseFault.CONFLICT)


def fault_of(error: BaseException) -> DatabaseFault:
    """Return of what an error speaks, by the SQLSTATE of the driver's error in it."""
    cause = cause_of(error)
    if not isinstance(cause, psycopg.Error):
        return DatabaseFault.MESSAGE
    code = cause.sqlstate or ""
    if code == "0A000" and cause.diag.source_function != STALE_PLAN:
        return DatabaseFault.MESSAGE
    return next((fault for prefix, fault in FAULTS.items() if code.startswith(prefix)), DatabaseFault.MESSAGE)


def cause_of(error: BaseException) -> BaseException:
    """Return the driver's error, where SQLAlchemy has wrapped it."""
    cause = getattr(error, "orig", None)
    return cause if isinstance(cause, BaseException) else error
