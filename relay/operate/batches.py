"""Batches of Spark as the ledger knows them, and how an operator gives up one that was begun in pieces.

The ledger `outbox.batch` has a row for a whole batch (`partition` -1). A batch in pieces has a row that says how many
they are (-2), then one for each of them, then that of the whole. A batch ends once, committed or given up: the function
and the trigger of migration 0026 see to that.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import psycopg
from psycopg.rows import kwargs_row
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from relay.errors import BusyError, NotFoundError, UsageError
from relay.observe.printable import utc
from relay.operate.asked import AppId, Closed, Limit, Reasoned, Version
from relay.operate.audit import note
from relay.operate.operation import Effect, Role, Servers, operation
from relay.servers.postgres.tables import Tables

GIVE_UP = SQL("SELECT {schema}.give_up_batch(%(app_id)s, %(version)s, %(by)s, %(why)s)")

# Sessions that enter a piece or a whole batch.
WRITERS = """
    SELECT string_agg(DISTINCT format('session %%s (%%s as %%s)', pid, coalesce(nullif(application_name, ''), '?'),
        usename), ', ')
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'relation' AND relation = to_regclass(%(ledger)s) AND mode = 'RowExclusiveLock' AND granted
        AND pid <> pg_backend_pid()
"""


class BatchState(StrEnum):
    """How far a batch is."""

    BEGUN = "begun"  # in pieces, of which some may be written
    GIVEN_UP = "given_up"  # by an operator: what is written stays, and no more will be
    COMMITTED = "committed"


IS_UNFINISHED = """
    partition = -2 AND given_up_at IS NULL AND NOT EXISTS (
        SELECT FROM {schema}.batch AS whole
        WHERE whole.app_id = batch.app_id AND whole.version = batch.version AND whole.partition = -1
    )
"""
# Each finds its newest by an index.
IN_STATE = {
    BatchState.BEGUN: (SQL("committed_at"), SQL(IS_UNFINISHED)),
    BatchState.GIVEN_UP: (SQL("given_up_at"), SQL("given_up_at IS NOT NULL")),
    BatchState.COMMITTED: (SQL("committed_at"), SQL("partition = -1")),
}
# A job may have written anything into row_counts.
NUMBER = SQL("""
    CASE jsonb_typeof({row}.row_counts -> {name}) WHEN 'number'
        THEN least(greatest(({row}.row_counts ->> {name})::numeric, 0), 1e15)::bigint END
""")
READ = SQL("""
    SELECT app_id, version, {state} AS state, {at} AS at, partitions,
        CASE partition WHEN -1 THEN partitions ELSE written.pieces END AS pieces,
        CASE partition WHEN -1 THEN {rows} ELSE written.rows END AS rows,
        left(row_counts ->> 'table', 1000) AS tables, {messages} AS messages,
        {seconds} AS seconds, {repeats} AS repeats,
        written.last_at AS last_piece_at, written_as::text, given_up_by, given_up_why
    FROM {schema}.batch
    CROSS JOIN LATERAL (
        SELECT count(*)::integer AS pieces, coalesce(sum({piece_rows}), 0)::bigint AS rows, max(committed_at) AS last_at
        FROM {schema}.batch AS piece
        WHERE batch.partition = -2 AND piece.app_id = batch.app_id AND piece.version = batch.version
            AND piece.partition >= 0
    ) AS written
    WHERE {condition}
""")
NEWEST = SQL("{read} ORDER BY {at} DESC, app_id, version DESC LIMIT %(limit)s")
ONE = SQL("{read} AND app_id = %(app_id)s AND version = %(version)s")


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch in the ledger."""

    app_id: str
    version: int
    state: BatchState
    at: datetime  # when it was begun, committed or given up
    partitions: int
    pieces: int  # of these, what is written
    rows: int | None  # that are written; each with its event, in a batch in pieces
    tables: str | None
    messages: int | None  # of a whole batch
    seconds: int | None
    repeats: int | None  # how often it came again
    last_piece_at: datetime | None
    written_as: str | None  # the role
    given_up_by: str | None
    given_up_why: str | None

    @property
    def name(self) -> str:
        """How messages and the audit name it."""
        return f"{self.app_id} {self.version}"

    @property
    def stands(self) -> str:
        """What is written and stays."""
        into = f" in {self.tables}" if self.tables else ""
        return f"{self.pieces} of its {self.partitions} pieces: {self.rows} rows{into}, with their events"


def number_of(row: str, name: str) -> Composable:
    """Return a number of `row_counts` as SQL; NULL where a job has written something else."""
    return NUMBER.format(row=Identifier(row), name=Literal(name))


def list_batches(tables: Tables, *, limit: int) -> list[BatchStatus]:
    """Return the newest batches: first those that are begun, then the others as they ended."""
    begun, *ended = (list(_newest(tables, state, limit)) for state in BatchState)
    newest = sorted((each for batches in ended for each in batches), key=lambda each: each.at, reverse=True)
    return [*begun, *newest][:limit]


def read_batch(tables: Tables, app_id: str, version: int) -> BatchStatus:
    """Return a batch.

    Raises:
        NotFoundError: the ledger does not have it.
    """
    for state in BatchState:
        found = _rows(tables, ONE.format(read=_read(tables, state)), app_id=app_id, version=version)
        if found:
            return found[0]
    raise NotFoundError(f"no batch {app_id!r} version {version} is in the ledger: `relay batches list` has the newest")


def give_up_batch(tables: Tables, app_id: str, version: int, *, by: str, why: str) -> BatchStatus:
    """Let no more of a batch be written, which was begun in pieces; return it.

    The pieces that are written stay, and so do their events. The name cannot be written again.

    Raises:
        NotFoundError: the ledger does not have it.
        UsageError: it has ended already.
        BusyError: a job is writing a piece or the end of it.
    """
    with tables.transaction():
        try:
            with tables.transaction():
                values = {"app_id": app_id, "version": version, "by": by, "why": why}
                (answer,) = tables.one(GIVE_UP, values)
        except psycopg.errors.LockNotAvailable:
            raise BusyError(_who_writes(tables, app_id, version)) from None
        found = read_batch(tables, app_id, version)
        if answer != "done":
            ended = f"by {found.given_up_by}: {found.given_up_why}" if found.given_up_by else f"at {utc(found.at)}"
            raise UsageError(f"batch {app_id!r} version {version} is {found.state.replace('_', ' ')} already, {ended}")
        note(tables, "batches give-up", found.name, by=by, why=why)
        return found


def _newest(tables: Tables, state: BatchState, limit: int) -> list[BatchStatus]:
    at, _ = IN_STATE[state]
    return _rows(tables, NEWEST.format(read=_read(tables, state), at=at), limit=limit)


def _read(tables: Tables, state: BatchState) -> Composed:
    at, condition = IN_STATE[state]
    names = {"rows": number_of("batch", "rows"), "piece_rows": number_of("piece", "rows")}
    names |= {each: number_of("batch", each) for each in ("messages", "seconds", "repeats")}
    return tables.sql(READ, state=Literal(state), at=at, condition=tables.sql(condition), **names)


def _rows(tables: Tables, statement: Composed, **values: object) -> list[BatchStatus]:
    with tables.connection.cursor(row_factory=kwargs_row(_status)) as cursor:
        return cursor.execute(statement, values).fetchall()


def _status(**columns: object) -> BatchStatus:
    return BatchStatus(**{**columns, "state": BatchState(str(columns["state"]))})  # type: ignore[arg-type]


def _who_writes(tables: Tables, app_id: str, version: int) -> str:
    ((writers,),) = tables.connection.execute(WRITERS, {"ledger": f"{tables.schema}.batch"}).fetchall()
    return (
        f"batch {app_id!r} version {version} is being written, by {writers or 'a session that has ended since'}:"
        " stop the job, then give it up"
    )


class ListBatches(Closed):
    """How many batches."""

    limit: Limit = 20


class ShowBatch(Closed):
    """Which batch."""

    app_id: AppId
    version: Version


class GiveUp(Reasoned):
    """Which batch is given up, and why."""

    app_id: AppId
    version: Version


@operation("batches.list", "GET /batches", Role.VIEWER)
def list_(at: Servers, asked: ListBatches) -> list[BatchStatus]:
    """List the newest batches: first those that are begun and not committed."""
    with at.connect(None) as tables:
        return list_batches(tables, limit=asked.limit)


@operation("batches.show", "GET /batches/show", Role.VIEWER)
def show(at: Servers, asked: ShowBatch) -> BatchStatus:
    """Show one batch."""
    with at.connect(None) as tables:
        return read_batch(tables, asked.app_id, asked.version)


@operation("batches.give_up", "POST /batches/give-up", Role.OPERATOR, Effect.STORED)
def give_up(at: Servers, asked: GiveUp) -> BatchStatus:
    """Let no more of a batch be written, which was begun in pieces; what is written stays."""
    with at.connect(None) as tables:
        return give_up_batch(tables, asked.app_id, asked.version, by=at.by, why=asked.why)
