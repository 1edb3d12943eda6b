"""Connections to PostgreSQL: deadlines on every step, and no password in any error."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from traceback import clear_frames
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, TransactionStatus

from relay.config.settings import DatabaseSettings
from relay.config.urls import libpq_parameters
from relay.errors import ConfigurationError, DatabaseUnavailableError, DeadlineError, PublicReason, no_answer_within
from relay.runtime.hindrance import Hindrance
from relay.runtime.scrub import scrub
from relay.servers.postgres.pooler import (
    LENT_OUT,
    LOOK_TIMEOUT,
    NAME_SERVER,
    Lends,
    backend_async,
    lends,
    lends_async,
)

# With these, a peer that died silently is noticed within about 10 s, during a wait and on an idle connection.
KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

CANCEL_TIMEOUT = 1.0  # seconds in which a server that lives cancels a statement
TAKES = "postgresql://user:password@host:5432/database"
SERVER_SAYS = re.compile(r"\w:  \S")

# A role or a database may have other defaults, for its applications. Under a stricter isolation, statements of ours end
# each other with 40001. The driver reads dates and intervals in one form only, and our SQL is written for the others.
SESSION_SETTINGS = {
    "default_transaction_isolation": "read committed",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "client_encoding": "UTF8",
}
# A session that runs no application's code has these, too. Waits are bounded where they are made, not by a default.
OWN_SETTINGS = SESSION_SETTINGS | {
    "TimeZone": "UTC",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
# Older servers lack some settings.
SET_EACH = """
    SELECT set_config(name, value, %(is_local)s)
    FROM unnest(%(names)s::text[], %(values)s::text[]) AS own (name, value)
    JOIN pg_settings USING (name)
"""
# Sets nothing behind a pooler: it gives its clients invented process ids.
SET_UNPOOLED = f"{SET_EACH} WHERE pg_backend_pid() = %(pid)s"
POOLER_TEST = "outbox-relay pooler test"
URL = "database.url (RELAY_DATABASE_URL)"
IS_EXHAUSTED = "the server is overloaded or frozen, or the pooler in front of it has no free connection"

SESSION_IS_READ_ONLY = "session is read-only"  # libpq, of a host that `target_session_attrs = read-write` passes over
READ_ONLY_BY = "it is a standby, or default_transaction_read_only is on for the role, the database or the server"
# The server's functions that raise 54000 when no transaction id is left. Other errors of that code have other causes,
# and the text depends on the server's language.
GIVES_NO_ID = ("GetNewTransactionId", "GetNewMultiXactId")

SILENT, LOST, OTHER = "silent", "lost", "other"  # no word for too long; ended without a word; another word

# PostgreSQL's words for why it ended a session, or serves it no more, as the label `reason` of the metrics has them.
# A closed list: docs/metrics.md lists each, and no server can fill Prometheus with its own words.
LOSSES = frozenset(
    {
        "admin_shutdown",
        "cannot_connect_now",
        "crash_shutdown",
        "database_dropped",
        "disk_full",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
        "insufficient_privilege",
        "io_error",
        "lock_not_available",
        "out_of_memory",
        "query_canceled",
        "read_only_sql_transaction",
        "too_many_connections",
        "transaction_timeout",
    }
)

# What a stranger may know of an error, by the SQLSTATE or its beginning.
PUBLIC = {
    "25006": PublicReason.READ_ONLY,
    "25P03": PublicReason.SESSION_ENDED,  # idle_in_transaction_session_timeout
    "25P04": PublicReason.SESSION_ENDED,  # transaction_timeout
    "28": PublicReason.ACCESS_REFUSED,
    "42501": PublicReason.ACCESS_REFUSED,
    "53100": PublicReason.NO_SPACE,
    "53300": PublicReason.TOO_MANY_CONNECTIONS,
    "55P03": PublicReason.LOCK_TIMEOUT,
    "57014": PublicReason.STATEMENT_TIMEOUT,
    "57P": PublicReason.SESSION_ENDED,
}
# libpq hides the SQLSTATE of a refused connection, and errors of the kernel and the resolver have no such code.
SAID_OF_CONNECTIONS = tuple(
    (re.compile(words, re.IGNORECASE | re.ASCII), public)
    for words, public in (
        ("connection refused", PublicReason.CONNECTION_REFUSED),
        ("connection (?:was )?reset|reset by peer|broken pipe", PublicReason.CONNECTION_RESET),
        ("no route to host", PublicReason.NO_ROUTE),
        ("network is unreachable", PublicReason.NETWORK_UNREACHABLE),
        ("connection timed out|timeout expired", PublicReason.CONNECTION_TIMED_OUT),
        (
            "not known|name resolution|could not translate host name|no address associated",
            PublicReason.NAME_NOT_RESOLVED,
        ),
        ("certificate|ssl|tls", PublicReason.TLS_FAILED),
        (r"authentication failed|no pg_hba\.conf entry|permission denied", PublicReason.ACCESS_REFUSED),
        ("too many clients|remaining connection slots|too many connections", PublicReason.TOO_MANY_CONNECTIONS),
        ("terminating connection", PublicReason.SESSION_ENDED),
        ("the database system is starting up", PublicReason.STARTING_UP),
        ("the database system is shutting down", PublicReason.SHUTTING_DOWN),
        ("the database system is in recovery mode", PublicReason.IN_RECOVERY),
        ("server closed the connection unexpectedly", PublicReason.CLOSED_UNEXPECTEDLY),
        ("read[- ]only", PublicReason.READ_ONLY),
        ("connection lost|the connection is lost", PublicReason.CONNECTION_LOST),
    )
)


Row = TypeVar("Row")


class Host(NamedTuple):
    """A server as the URL names it."""

    name: str
    port: int


def conninfo(database: DatabaseSettings, *, last: Host | None = None, **overrides: Any) -> str:
    """Return the libpq connection string with our deadlines, which parameters of the URL override.

    It names hosts and ports also when libpq would take them from the environment.

    The URL is read at each call: its file may hold another password by now.

    Args:
        last: a host of the URL that is tried after all others.
    Raises:
        ConfigurationError: there is no URL, or libpq cannot read it.
    """
    url = database.url.get_secret_value()
    if not url:
        raise ConfigurationError(f"{URL} is not set; it takes {TAKES}")
    try:
        given = libpq_parameters(url)
    except ValueError as error:
        reason = str(error) or f"it is no libpq URL; it takes {TAKES}"
        raise ConfigurationError(f"{URL}: {reason}") from None
    if "service" not in given:  # the service's file goes before the environment
        given = _with_places(given)
    hosts = _hosts(given)
    defaults: dict[str, Any] = {
        "connect_timeout": max(2, round(database.connect_timeout)),  # libpq takes no less
        "application_name": "outbox-relay",
        # For an encrypted `sslkey`: without a password, OpenSSL asks at the terminal, and the event loop waits.
        "sslpassword": "none",
        **({"target_session_attrs": "read-write"} if len(hosts) > 1 else {}),
        **KEEPALIVE,
    }
    return make_conninfo(**{**defaults, **given, **_put_last(given, hosts, last), **overrides})


def each_host(database: DatabaseSettings) -> list[dict[str, Any]]:
    """Return, for each host of the URL, the overrides with which `connect` goes only there, to a server of any kind.

    Raises:
        ConfigurationError: libpq cannot read the URL.
    """
    given = conninfo_to_dict(conninfo(database))
    ways = [_places(given, [place]) for place in range(len(_hosts(given)))]
    return [{**way, "target_session_attrs": "any"} for way in ways]


def host_of(connection: psycopg.Connection) -> str:
    """Name the host and port that a connection leads to, wherever libpq found them."""
    return f"{connection.info.host}:{connection.info.port}"


def login_of(connection: psycopg.Connection) -> str:
    """Name the database that a connection leads to, its host and port, and the user."""
    return f"database {connection.info.dbname} on {host_of(connection)}, as user {connection.info.user}"


def set_own(names: Mapping[str, str], *, is_local: bool = False) -> dict[str, Any]:
    """Return the parameters of `SET_EACH` that set these for the session, or for its transaction alone."""
    return {"names": list(names), "values": list(names.values()), "is_local": is_local}


def connect(
    database: DatabaseSettings,
    *,
    is_lent: bool = False,
    may_be_lent: bool = False,
    session: Mapping[str, str] = OWN_SETTINGS,
    **overrides: Any,
) -> "BlockingConnection":
    """Open a connection in autocommit mode, with these settings of the session.

    Args:
        is_lent: a pooler may lend the session to an application after us; nothing is set in it, and nothing asked.
        may_be_lent: a session that a pooler lends out between transactions is no error. Nothing is set in it, no
            statement is prepared, and transactions are READ COMMITTED.
    Raises:
        DatabaseUnavailableError: no host of the URL lets us in; libpq's own words say why. Or there is no answer.
        ConfigurationError: a pooler lends the session to other clients between our transactions.
    """
    try:
        connection = BlockingConnection.connect(conninfo(database, **overrides), autocommit=True)
        try:
            if not is_lent:
                with answering(connection, database.command_timeout):
                    make_ours(connection, database, session, may_be_lent=may_be_lent)
        except BaseException:
            connection.close()
            raise
        return connection
    except TimeoutError as error:
        raise _silent(database) from error
    except psycopg.OperationalError as error:
        raise unavailable(error) from error


async def connect_async(
    database: DatabaseSettings,
    *,
    last: Host | None = None,
    is_lent: bool = False,
    may_be_lent: bool = False,
    session: Mapping[str, str] = OWN_SETTINGS,
    **overrides: Any,
) -> "DatabaseConnection":
    """Open an asyncio connection in autocommit mode, with these settings of the session.

    Args:
        last: one of the URL's hosts, to be tried after all others.
        is_lent, may_be_lent: as for `connect`.
    Raises:
        DatabaseUnavailableError, ConfigurationError: as `connect`.
    """
    try:
        connecting = DatabaseConnection.connect(conninfo(database, last=last, **overrides), autocommit=True)
        with closing_at_cancel():
            connection = await connecting
        try:
            if not is_lent:
                async with asyncio.timeout(database.command_timeout):
                    await _make_ours_async(connection, database, session, may_be_lent=may_be_lent)
        except BaseException:
            await connection.close()
            raise
        return connection
    except TimeoutError as error:
        raise _silent(database) from error
    except psycopg.OperationalError as error:
        raise unavailable(error) from error


def make_ours(
    connection: psycopg.Connection,
    database: DatabaseSettings,
    session: Mapping[str, str] = OWN_SETTINGS,
    *,
    may_be_lent: bool = False,
) -> None:
    """Set these settings in the session of a connection; raises as `connect`, and psycopg.OperationalError."""
    cursor = connection.execute(SET_UNPOOLED, set_own(session) | {"pid": connection.info.backend_pid})
    if cursor.rowcount:
        return
    if not (may_be_lent and _place_of(connection) in _keepers) and _is_lent(
        connection, _ask_pooler(connection, database), may_be_lent=may_be_lent
    ):
        connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        return
    connection.execute(SET_EACH, set_own(session))


async def _make_ours_async(
    connection: "DatabaseConnection", database: DatabaseSettings, session: Mapping[str, str], *, may_be_lent: bool
) -> None:
    cursor = await connection.execute(SET_UNPOOLED, set_own(session) | {"pid": connection.info.backend_pid})
    if cursor.rowcount:
        return
    if not (may_be_lent and _place_of(connection) in _keepers) and _is_lent(
        connection, await _ask_pooler_async(connection, database), may_be_lent=may_be_lent
    ):
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        return
    await connection.execute(SET_EACH, set_own(session))


# Poolers that keep a session for each client, as this process has found. Parts that work in either way ask once, as
# their sessions may fill the pool.
_keepers: set[tuple[str, int, str, str]] = set()


def _place_of(connection: psycopg.Connection | psycopg.AsyncConnection) -> tuple[str, int, str, str]:
    info = connection.info
    return info.host, info.port, info.dbname, info.user


def _is_lent(connection: psycopg.Connection | psycopg.AsyncConnection, when: Lends, *, may_be_lent: bool) -> bool:
    """Note what a pooler does with a connection, and return whether it lends it; raises ConfigurationError."""
    if when is Lends.NEVER:
        _keepers.add(_place_of(connection))
        return False
    if not may_be_lent or when is Lends.BETWEEN_STATEMENTS:
        raise ConfigurationError(f"{URL} {LENT_OUT}: {NAME_SERVER}")
    connection.prepare_threshold = None
    if isinstance(connection, (DatabaseConnection, BlockingConnection)):
        connection.is_lent = True
    return True


def is_lent(connection: psycopg.Connection | psycopg.AsyncConnection) -> bool:
    """Whether `connect` has found that a pooler lends the session of this connection between transactions."""
    return isinstance(connection, (DatabaseConnection, BlockingConnection)) and connection.is_lent


def _ask_pooler(connection: psycopg.Connection, database: DatabaseSettings) -> Lends:
    try:
        with (
            connect(database, is_lent=True, application_name=POOLER_TEST) as other,
            answering(connection, LOOK_TIMEOUT),
            answering(other, LOOK_TIMEOUT),
        ):
            return lends(connection, other)
    except (psycopg.Error, DatabaseUnavailableError, TimeoutError) as error:
        raise _no_second(error) from error


async def _ask_pooler_async(connection: psycopg.AsyncConnection, database: DatabaseSettings) -> Lends:
    try:
        async with (
            asyncio.timeout(LOOK_TIMEOUT),
            await connect_async(database, is_lent=True, application_name=POOLER_TEST) as other,
        ):
            return await lends_async(connection, other)
    except (psycopg.Error, DatabaseUnavailableError, TimeoutError) as error:
        raise _no_second(error) from error


def _no_second(error: Exception) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(
        "a pooler answers, and gives us no second connection to find out whether it keeps sessions:"
        f" {one_line(error) or no_answer_within(LOOK_TIMEOUT)}",
        public=no_answer_within(LOOK_TIMEOUT) if isinstance(error, TimeoutError) else public_reason(error),
    )


def _silent(database: DatabaseSettings) -> DatabaseUnavailableError:
    public = no_answer_within(database.command_timeout)
    return DatabaseUnavailableError(f"connected, and then {public}: {IS_EXHAUSTED}", public=public)


@contextmanager
def answering(connection: psycopg.Connection, seconds: float) -> Iterator[None]:
    """End the block's waits on a connection after so many seconds, and so the connection; raises TimeoutError."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        unplug(connection)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.OperationalError as error:
        if is_over.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()


def unavailable(error: psycopg.Error) -> DatabaseUnavailableError:
    """Return the error of ours for a connection that was refused, not made, or lost."""
    return DatabaseUnavailableError(one_line(error), is_refusal=is_refusal(error), public=public_reason(error))


def hindrance_of(error: BaseException) -> Hindrance:
    """Return what an error of the database says, on one line."""
    return Hindrance(one_line(error), public_reason(error))


def session_lost(error: BaseException) -> Hindrance:
    """Return in words that a session was lost, and by which error."""
    public = public_reason(error)
    is_unnamed = public == PublicReason.UNNAMED
    return Hindrance(f"session lost: {one_line(error)}", PublicReason.CONNECTION_LOST if is_unnamed else public)


def public_reason(error: BaseException) -> str:
    """Return what a stranger may know of an error of the database, the driver or ours."""
    if isinstance(error, (DatabaseUnavailableError, DeadlineError)):
        return error.public
    if not isinstance(error, psycopg.Error):
        return PublicReason.UNNAMED
    if code := error.sqlstate:
        return next((public for prefix, public in PUBLIC.items() if code.startswith(prefix)), PublicReason.UNNAMED)
    said = str(error)
    return next((public for words, public in SAID_OF_CONNECTIONS if words.search(said)), PublicReason.UNNAMED)


def is_refusal(error: psycopg.Error) -> bool:
    """Whether a server answered a connection, and refused it: a wrong password, no such role or database."""
    # libpq keeps the SQLSTATE of such an answer to itself, and its words depend on the server's language. But it puts
    # two spaces behind the severity of what a server says ("FATAL: password ..."), and libpq itself does not.
    return error.sqlstate is None and SERVER_SAYS.search(str(error)) is not None


class BlockingConnection(psycopg.Connection):
    """A connection that knows whether a pooler lends its session to other clients between our transactions."""

    is_lent = False


class DatabaseConnection(psycopg.AsyncConnection):
    """A connection whose interrupted statement ends within `CANCEL_TIMEOUT`, also when the server is silent.

    psycopg asks the server to cancel the statement, which keeps no lock then. For a silent server psycopg waits up to
    10 s. A stop of the relay would take as long, and once for each statement that is interrupted.
    """

    is_lent = False  # as of `BlockingConnection`
    _pulling: asyncio.TimerHandle | None = None
    ended_in_wait = False  # by the server, or by psycopg, which gives up a statement that cannot be cancelled

    async def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        was_broken = self.broken  # by `pgconn.finish()`, for one
        try:
            return await super().wait(gen, *args, **kwargs)
        finally:
            self.ended_in_wait |= self.broken and not was_broken
            if self._pulling is not None:
                self._pulling.cancel()
                self._pulling = None

    async def cancel_safe(self, *, timeout: float = CANCEL_TIMEOUT) -> None:  # noqa: ASYNC109  (psycopg's signature)
        if self._pulling is None and self.pgconn.transaction_status == TransactionStatus.ACTIVE:
            self._pulling = asyncio.get_running_loop().call_later(CANCEL_TIMEOUT, unplug, self)
        with closing_at_cancel():
            await super().cancel_safe(timeout=min(timeout, CANCEL_TIMEOUT))


@contextmanager
def closing_at_cancel() -> Iterator[None]:
    """Close what psycopg has begun to open when the block is cancelled.

    It is a local of psycopg's frames. They live as long as the traceback, which may be until the garbage is collected
    (tests/consume/test_cancels.py).
    """
    try:
        yield
    except asyncio.CancelledError as cancel:
        clear_frames(cancel.__traceback__)
        raise


def is_finished(connection: psycopg.Connection | psycopg.AsyncConnection) -> bool:
    """Whether code other than psycopg has called `connection.pgconn.finish()`.

    False for an asyncio connection of another class, such as SQLAlchemy's: there psycopg itself may have called it.
    """
    pointer = connection.pgconn.pgconn_ptr  # type: ignore[attr-defined]  # each implementation has it
    if not connection.broken or pointer is not None:
        return False
    return isinstance(connection, psycopg.Connection) or not getattr(connection, "ended_in_wait", True)


def unplug(connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
    """Shut the socket down: every wait on this connection ends at once, as if the server had gone.

    It may be called from any thread. To close the connection would not end the wait of another task or thread.
    """
    with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as plug:
        plug.shutdown(socket.SHUT_RDWR)


async def refuse_pooler(database: DatabaseSettings) -> None:
    """Check that the URL leads to sessions that stay ours; raises as `connect_async`."""
    async with await connect_async(database):
        pass


async def require_session(connection: psycopg.AsyncConnection, database: DatabaseSettings) -> None:
    """Check that this connection is a session: locks, settings and LISTEN stay from one statement to the next.

    Raises:
        ConfigurationError: a pooler lends the session to other clients between our transactions.
        DatabaseUnavailableError: a pooler gives no second connection, so it cannot be checked.
        psycopg.OperationalError: the connection is lost.
    """
    if await backend_async(connection) != connection.info.backend_pid:
        _is_lent(connection, await _ask_pooler_async(connection, database), may_be_lent=False)


def has_no_ids(error: BaseException) -> bool:
    """Whether the server refuses a command as it has no transaction id left, until a vacuum has freed some."""
    return isinstance(error, psycopg.errors.ProgramLimitExceeded) and error.diag.source_function in GIVES_NO_ID


def is_unreplicated(notice: psycopg.errors.Diagnostic) -> bool:
    """Whether a notice says that a commit was made on the primary, but maybe not on its standby."""
    # Its SQLSTATE, 01000, is that of any warning, and its text depends on the server's language.
    return notice.source_function == "SyncRepWaitForLSN"


def one(row: Row | None) -> Row:
    """Return the row of a statement that always returns one.

    Raises:
        LookupError: it returned no row, so the caller is wrong about the statement.
    """
    if row is None:
        raise LookupError("a statement that always gives a row gave no row")
    return row


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, without a password; libpq's texts have several lines.

    For a session that takes no writes, it names what makes sessions so.
    """
    words = scrub(" ".join(str(error).split()))
    is_read_only = isinstance(error, psycopg.errors.ReadOnlySqlTransaction) or SESSION_IS_READ_ONLY in words
    return f"{words} ({READ_ONLY_BY})" if is_read_only else words


def kind_of_loss(error: BaseException) -> str:
    """Return why a session was lost, for a counter: a name in `LOSSES`, `silent`, `lost` or `other`."""
    if isinstance(error, (DeadlineError, TimeoutError)):
        return SILENT
    if isinstance(error, psycopg.Error) and error.sqlstate:
        word = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()  # AdminShutdown: admin_shutdown
        return word if word in LOSSES else OTHER
    return LOST


def _with_places(given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the hosts and ports of the environment if the URL has no own, as libpq does."""
    usual = {each.keyword.decode(): each.val.decode() for each in Conninfo.get_defaults() if each.val}
    places = ("host", "hostaddr") if not (given.get("host") or given.get("hostaddr")) else ()
    return {**{key: usual[key] for key in (*places, "port") if key in usual}, **given}


def _hosts(given: dict[str, Any]) -> list[Host]:
    names = str(given.get("host") or given.get("hostaddr") or "").split(",")
    ports = str(given.get("port") or 5432).split(",")
    return [Host(name, int(ports[place % len(ports)] or 5432)) for place, name in enumerate(names)]


def _put_last(given: dict[str, Any], hosts: list[Host], last: Host | None) -> dict[str, str]:
    """Return the URL's lists of hosts in the order in which they are tried."""
    return _places(given, sorted(range(len(hosts)), key=lambda place: hosts[place] == last))


def _places(given: dict[str, Any], order: list[int]) -> dict[str, str]:
    """Return the URL's lists of hosts with only these places, in this order; a single port is for every host."""
    count = len(_hosts(given))
    lists = {key: str(given[key]).split(",") for key in ("host", "hostaddr", "port") if given.get(key)}
    return {key: ",".join(values[place] for place in order) for key, values in lists.items() if len(values) == count}
