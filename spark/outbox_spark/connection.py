"""Connections to PostgreSQL, psycopg on the driver and ADBC on the executors, and what is worth waiting for.

Executors may have no psycopg: what only the driver does imports it itself.
"""

import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from adbc_driver_postgresql import dbapi

from outbox_spark.errors import BatchError, OptionError, OutboxWriteError, one_line
from outbox_spark.plan import Room

if TYPE_CHECKING:
    import psycopg

# A server that died silently is noticed within about 10 s; the URL's own parameters override.
DEFAULTS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "outbox-spark",
    # For an encrypted `sslkey` without `sslpassword`: OpenSSL would ask for the passphrase at the terminal.
    "sslpassword": "none",
}

# As of every session of the relay: under a stricter isolation, statements of two tasks end each other with 40001. The
# driver reads dates and intervals in one form only, and our SQL is written for the others.
SESSION_SETTINGS = """
    SET default_transaction_isolation = 'read committed';
    SET DateStyle = 'ISO';
    SET IntervalStyle = 'postgres';
    SET extra_float_digits = 1;
    SET array_nulls = on;
    SET standard_conforming_strings = on;
    SET client_encoding = 'UTF8'
"""

# A role's time-outs are for short statements of its applications. Older servers lack some settings.
NO_TIMEOUTS = """
    SELECT set_config(name, '0', false) FROM pg_settings
    WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
        'transaction_timeout')
"""

LENT_OUT = (
    "the database URL leads to a pooler that lends sessions out between transactions. Locks, settings and prepared"
    " statements need one session: name the server itself, or a pool with pool_mode = session"
)
LOOKS = 5  # one would do in an idle pool; a busy one hands processes out in any order

RECONNECT_FOR = 30.0  # seconds; a failover takes less
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
log = logging.getLogger("outbox_spark")
Connected = TypeVar("Connected")


def conninfo(url: str, user: str | None = None, password: str | None = None) -> str:
    """Return the libpq string that driver and executors connect with; it may hold the password.

    Raises:
        OptionError: libpq cannot read the URL.
    """
    import psycopg  # noqa: PLC0415
    from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: PLC0415

    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq quotes the URL in its message, password and all: not repeated here.
        raise OptionError(
            "the database URL cannot be read; it takes postgresql://user:password@host:5432/database"
        ) from None
    if _is_ambiguous(url, given):
        raise OptionError(
            "the database URL can be read in two ways: in a user or password write %40 for @, %2F for /, %3F for ?"
        )
    own = {key: value for key, value in (("user", user), ("password", password)) if value is not None}
    settings: dict[str, Any] = {**DEFAULTS, **given, **own}
    return make_conninfo(**settings)


def _is_ambiguous(url: str, given: dict[str, Any]) -> bool:
    """Whether libpq has taken a piece of the password for a host, a port or a database: its errors would repeat it."""
    port = str(given.get("port") or "")
    if port.strip(",0123456789"):
        return True
    _, is_url, rest = url.partition("://")
    credentials, _, behind = rest.partition("@")
    behind = rest if "/" in credentials else behind  # libpq looks for a user no further than to the first slash
    return bool(is_url) and "@" in behind.partition("?")[0]


def connect(info: str) -> "psycopg.Connection":
    """Open a connection in autocommit mode, with `SESSION_SETTINGS` whatever the defaults are.

    Raises:
        OutboxWriteError: no host lets us in; libpq's own words tell why.
        OptionError: a pooler lends the session to other clients between our transactions.
    """
    import psycopg  # noqa: PLC0415

    try:
        connection = psycopg.connect(info, autocommit=True)
        _refuse_lent(connection, info)
        connection.execute(SESSION_SETTINGS)
        connection.execute(NO_TIMEOUTS)
        return connection
    except psycopg.OperationalError as error:
        raise OutboxWriteError(one_line(error)) from None


def _refuse_lent(connection: "psycopg.Connection", info: str) -> None:
    """Raise OptionError if a pooler lends the session out; the tasks' connections lead there, too."""
    import psycopg  # noqa: PLC0415

    # Poolers give their clients invented process ids.
    ours = _backend(connection)
    if ours == connection.info.backend_pid:
        return
    with psycopg.connect(info, autocommit=True) as other:
        for _ in range(LOOKS):
            try:
                with other.transaction():
                    is_lent = _backend(other) == ours or _backend(connection) != ours
            except psycopg.errors.ProtocolViolation:  # a pool that lends a session for one statement
                is_lent = True
            if is_lent:
                connection.close()
                raise OptionError(LENT_OUT)


def _backend(connection: "psycopg.Connection") -> int:
    (pid,) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone() or (0,)
    return int(pid)


def retried(connect: Callable[[], Connected], refused: type[Exception]) -> Connected:
    """Connect, again and again with growing pauses while the database refuses, for as long as RECONNECT_FOR.

    Raises:
        the last refusal.
    """
    give_up_at = time.monotonic() + RECONNECT_FOR
    pause = FIRST_PAUSE
    while True:
        try:
            return connect()
        except refused:
            if time.monotonic() + pause > give_up_at:
                raise
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  # so that the tasks do not all come at once
        pause = min(2 * pause, LONGEST_PAUSE)


def connect_task(info: str) -> dbapi.Connection:
    """Connect a task that writes; raises the last refusal."""
    return retried(lambda: connect_once(info), dbapi.OperationalError)


def connect_once(info: str) -> dbapi.Connection:
    """Connect a task, in autocommit: ADBC would begin its own transaction for each ingest."""
    connection = dbapi.connect(info, autocommit=True)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute(NO_TIMEOUTS)
    except BaseException:
        connection.close()
        raise
    return connection


def wait_for_room(room: Room, count: Callable[[str], int]) -> None:
    """Return once no more than `room.most` rows are pending. No transaction may be open: it would hold up the relay.

    Raises:
        BatchError: there were more for as long as `room.wait`.
    """
    give_up_at = time.monotonic() + room.wait
    pause = FIRST_PAUSE
    while count(room.count) > room.most:
        if time.monotonic() > give_up_at:
            raise BatchError(
                f"more than {room.most} rows (maxPending) have been pending for {room.wait} s (maxPendingWait), and "
                "nothing more was written. Look with `relay status` why, and run the batch again"
            )
        log.warning("outbox: more than %s rows are pending: the write waits", room.most)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
