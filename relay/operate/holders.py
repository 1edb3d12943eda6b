"""Which sessions and which writers are in the way, for `relay status` and `relay doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg.sql import SQL

from relay.engine.nodes.vacuum import HELD_LONG, HOLDERS, Holder
from relay.operate.health import NODE_STALE_AFTER
from relay.operate.routes.quarantine import IS_BEHIND
from relay.servers.postgres.database import one
from relay.servers.postgres.tables import Tables

BRING_STANDBY = "bring it back, or take it out of synchronous_standby_names"

# Every session may take any advisory lock, whatever its role may do otherwise. A lock of ours belongs to a role with
# a right on what the lock is about: `allowed` names it. Writers try the doorbell for an instant, so they may hold it.
FOREIGN_LOCKS = """
    SELECT DISTINCT lock.pid, coalesce(session.usename::text, 'that was dropped'),
        coalesce(session.application_name, ''), known.name
    FROM pg_locks AS lock
    JOIN pg_stat_activity AS session ON session.pid = lock.pid AND session.usesysid IS NOT NULL
    JOIN (
        SELECT numbers, name, allowed
        FROM (VALUES
            (2, '.lane', 'relay'), (2, '.node', 'relay'), (2, '.replay', 'replay'), (2, '.pool', 'master'),
            (1, '.park', 'relay'), (1, '.doorbell', 'writer'), (1, '.retention', 'retention'),
            (1, '.replay and retention', 'retention'), (1, '.archive', 'archive')
        ) AS key (numbers, name, allowed)
        UNION ALL
        SELECT 1, '.day ' || to_char(to_date(right(relname, 8), 'YYYYMMDD'), 'YYYY-MM-DD'), 'archive'
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = to_regclass(format('%%I.message_sent', %(schema)s::text)) AND relname ~ '_[0-9]{8}$'
    ) AS known ON lock.objsubid = known.numbers AND CASE known.numbers
        WHEN 2 THEN lock.classid = hashtext(%(schema)s || known.name)::oid
        ELSE lock.classid::bigint << 32 | lock.objid::bigint = hashtextextended(%(schema)s || known.name, 0) END
    CROSS JOIN LATERAL (
        SELECT has_table_privilege(usesysid, format('%%I.message_pending', %(schema)s::text), 'DELETE') AS relay,
            has_table_privilege(usesysid, format('%%I.replay', %(schema)s::text), 'INSERT') AS replay,
            has_table_privilege(usesysid, format('%%I.pool_master', %(schema)s::text), 'INSERT') AS master,
            has_any_column_privilege(usesysid, format('%%I.message', %(schema)s::text), 'INSERT') AS writer,
            has_any_column_privilege(usesysid, format('%%I.archived_day', %(schema)s::text), 'INSERT') AS archive,
            has_function_privilege(
                usesysid, format('%%I.drop_sent_day(date, boolean, boolean)', %(schema)s::text), 'EXECUTE') AS retention
    ) AS may
    WHERE lock.locktype = 'advisory' AND lock.granted
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND NOT CASE known.allowed
            WHEN 'relay' THEN may.relay
            WHEN 'master' THEN may.master
            WHEN 'replay' THEN may.replay
            WHEN 'writer' THEN may.relay OR may.writer
            WHEN 'archive' THEN may.archive OR may.retention
            ELSE may.relay OR may.retention END
    ORDER BY lock.pid, known.name
"""


STANDBY_SLOW = 5.0  # seconds for which a commit has waited for a standby

COMMITS_WAITING = """
    SELECT count(*)::integer, max(extract(epoch FROM clock_timestamp() - query_start))::float8,
        coalesce(bool_or(application_name = 'outbox-relay'), false)
    FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND datname = current_database()
"""


@dataclass(frozen=True, slots=True)
class WaitingCommits:
    """Commits that are made here and are not answered, as no synchronous standby has them."""

    number: int
    seconds: float  # for which the first has waited
    is_relay: bool  # a relay's is among them

    def __str__(self) -> str:
        return f"{self.words}: {BRING_STANDBY}"

    @property
    def words(self) -> str:
        """What is seen, without what to do."""
        commits = "1 commit waits" if self.number == 1 else f"{self.number} commits wait"
        theirs = ", a relay's too" if self.is_relay else ""
        return f"{commits} for a synchronous standby for up to {self.seconds:.0f} s{theirs}"


NO_IDS_LEFT = 2**31 - 1 - 3_000_000  # transactions behind the oldest id (SetTransactionIdLimit in varsup.c)

# The oldest of all databases counts. The lock of a node's name is a relay's, also while it can write no heartbeat.
TRANSACTION_IDS = SQL("""
    SELECT age(datfrozenxid), datname::text, EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = hashtext({node_lock})::oid
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
    FROM pg_database
    ORDER BY age(datfrozenxid) DESC, datname
    LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class UsedUp:
    """A server that refuses all that writes: it has no transaction id left, and must vacuum a database first."""

    database: str
    is_relay: bool  # a relay has a session and waits

    def __str__(self) -> str:
        relays = ", relays too" if self.is_relay else ""
        return (
            f"PostgreSQL has no transaction id left: all that writes waits{relays}; VACUUM in database"
            f" {self.database}, see `relay doctor`"
        )


@dataclass(frozen=True, slots=True)
class ForeignLock:
    """An advisory lock of ours that a session holds whose role has no right to what it is about."""

    pid: int
    role: str
    application: str
    lock: str  # as in `outbox.lane`

    def __str__(self) -> str:
        application = f", {self.application!r}" if self.application else ""
        return f"session {self.pid} of role {self.role}{application} holds the lock {self.lock} without a right to it"


# A session of a relay has the lock of the relay's name as well. A transaction that is prepared for two-phase commit
# keeps its locks, and has no session.
LANE_HOLDERS = SQL("""
    SELECT lock.pid, coalesce(session.usename::text, ''), coalesce(session.application_name, ''),
        array_agg(lock.objid::bigint::integer ORDER BY lock.objid::bigint), bool_or(EXISTS (
            SELECT FROM pg_locks AS named
            JOIN {schema}.node AS node ON named.objid = hashtext(node.name)::oid
            WHERE named.pid = lock.pid AND named.locktype = 'advisory' AND named.granted AND named.objsubid = 2
                AND named.classid = hashtext({node_lock})::oid
                AND clock_timestamp() - node.heartbeat_at <= {stale_after} * interval '1 second'
        ))
    FROM pg_locks AS lock
    LEFT JOIN pg_stat_activity AS session ON session.pid = lock.pid
    WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND lock.classid = hashtext({lane_lock})::oid AND lock.objid = ANY (%(lanes)s::oid[])
    GROUP BY lock.pid, session.usename, session.application_name
    ORDER BY min(lock.objid::bigint), lock.pid
""")


@dataclass(frozen=True, slots=True)
class LaneHolder:
    """A session that has the locks of lanes that no relay reports."""

    pid: int | None  # None: a prepared transaction
    role: str
    application: str
    lanes: list[int]
    is_relay_alive: bool  # it belongs to a relay whose heartbeat is fresh

    def __str__(self) -> str:
        if self.pid is None:
            return "a prepared transaction"
        application = f", {self.application!r}," if self.application else ""
        return f"session {self.pid} of role {self.role or 'that was dropped'}{application}"

    @property
    def remedy(self) -> str:
        """How an operator frees the lanes."""
        if self.pid is None:
            return "ROLLBACK PREPARED ends it, see pg_prepared_xacts"
        return f"`SELECT pg_terminate_backend({self.pid})` ends it"


# Rows that wait behind a row of another role, of the first `looked_at` that wait: 1,000,000 in quarantine take 2 s.
# The index on the key gives the order. A row from before migration 0021 has '', and says nothing.
HELD_UP = SQL("""
    SELECT 'parked', head.written_as, row.written_as, count(*)
    FROM (
        SELECT held_behind, written_as FROM {schema}.message_state
        WHERE state = 'parked' AND held_behind IS NOT NULL
        LIMIT %(looked_at)s
    ) AS row
    JOIN {schema}.message_state AS head ON head.state = 'parked' AND head.id = row.held_behind
    WHERE head.written_as <> row.written_as AND '' NOT IN (head.written_as, row.written_as)
    GROUP BY head.written_as, row.written_as
    UNION ALL
    SELECT 'quarantined', row.first_written_as, row.written_as, count(*)
    FROM (
        SELECT written_as, held_behind, first_value(written_as) OVER (
                PARTITION BY aggregate_type, aggregate_id ORDER BY id
            ) AS first_written_as
        FROM (
            SELECT aggregate_type, aggregate_id, id, written_as, held_behind
            FROM {schema}.message_state
            WHERE state = 'quarantined' AND aggregate_id IS NOT NULL
            ORDER BY aggregate_type, aggregate_id, id
            LIMIT %(looked_at)s
        ) AS waiting
    ) AS row
    WHERE row.first_written_as <> row.written_as AND '' NOT IN (row.first_written_as, row.written_as) AND {is_behind}
    GROUP BY row.first_written_as, row.written_as
    ORDER BY 4 DESC, 1, 2, 3
    LIMIT 10
""")


@dataclass(frozen=True, slots=True)
class HeldUp:
    """Rows that wait because another role wrote a row of their key that is parked or in quarantine."""

    state: str
    by: str  # the role that wrote the row in front
    of: str  # the role that wrote the rows behind it
    rows: int

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"role {self.by} holds up {rows} of role {self.of}, by {self.state} rows of their keys"


def held_up(tables: Tables, *, looked_at: int | None = None) -> list[HeldUp]:
    """Return whose rows hold up whose, most rows first, ten pairs of roles at most.

    Args:
        looked_at: how many of the rows that wait in a state are looked at; all unless given.
    """
    return [HeldUp(*row) for row in tables.execute(HELD_UP, {"looked_at": looked_at}, is_behind=IS_BEHIND)]


def commits_without_standby(connection: psycopg.Connection) -> WaitingCommits | None:
    """Return the commits that wait for a standby; None while they are quick.

    Without pg_read_all_stats, only those of our role.
    """
    number, seconds, is_relay = one(connection.execute(COMMITS_WAITING).fetchone())
    return WaitingCommits(number, seconds, is_relay) if seconds is not None and seconds >= STANDBY_SLOW else None


def ids_used_up(tables: Tables) -> UsedUp | None:
    """Return that the server has no transaction id left; None while it has some."""
    names = {"node_lock": f"{tables.schema}.node"}
    age, database, is_relay = tables.one(TRANSACTION_IDS, **names)
    return UsedUp(database, is_relay) if age >= NO_IDS_LEFT else None


def long_holders(connection: psycopg.Connection) -> list[Holder]:
    """Return the sessions that have held a snapshot for long. Empty when the views are not readable."""
    try:
        found = [Holder(*row) for row in connection.execute(HOLDERS)]
    except psycopg.errors.InsufficientPrivilege:
        return []
    return [holder for holder in found if (holder.age_s or 0) >= HELD_LONG]


def lane_holders(tables: Tables, lanes: Sequence[int]) -> list[LaneHolder]:
    """Return which sessions have the locks of these lanes. Every login may see who has a lock."""
    schema = tables.schema
    names = {"lane_lock": f"{schema}.lane", "node_lock": f"{schema}.node", "stale_after": NODE_STALE_AFTER}
    return [LaneHolder(*row) for row in tables.execute(LANE_HOLDERS, {"lanes": [*lanes]}, **names)]


def foreign_locks(tables: Tables) -> list[ForeignLock]:
    """Return the advisory locks of ours in foreign hands. Empty when the views are not readable."""
    try:
        found = tables.connection.execute(FOREIGN_LOCKS, {"schema": tables.schema}).fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return []
    return [ForeignLock(pid, role, application, f"{tables.schema}{name}") for pid, role, application, name in found]
