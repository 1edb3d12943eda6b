"""Discard the rows of a route in quarantine, as a job.

A batch of rows, its notes in the audit and its count are one transaction. It has the lock on the route's row that the
relay takes to let rows out. What only waited behind them goes when the relay tries the route.
"""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings
from relay.engine.session.session import ROUTES_CHANGED, nodes_channel
from relay.errors import UsageError
from relay.jobs.job import Job, Kind, Order, Source, make_job
from relay.jobs.work import FULL, Did, Ended, Pace, Save, StageOutcome, Step, Waits
from relay.operate.messages.whereabouts import RowId
from relay.operate.routes.quarantine import (
    CHOSEN,
    LOCK_ROUTE,
    PROBE_POLL,
    PROBE_WAIT,
    PROBES_ON_THEIR_WAY,
    RING,
    TRY_NOW,
    RouteStatus,
    parameters,
)
from relay.operate.session import SessionWork
from relay.servers.postgres.tables import Tables

BATCH = 500  # rows of a transaction
GRAIN = 0.2  # seconds' worth of rows that a transaction waits for, at a rate

# Also what is on its way as a probe: it comes back, or was sent.
COUNT = SQL("""
    SELECT count(*), coalesce(max(id), 0)
    FROM (SELECT id FROM {schema}.message_state WHERE {chosen} UNION ({probes})) AS row
""")
READ_BATCH = SQL("""
    SELECT id FROM {schema}.message_state
    WHERE {chosen} AND id > %(after)s AND id <= %(until)s
    ORDER BY id
    LIMIT %(batch)s
""")
DISCARD = SQL("""
    WITH discarded AS (
        UPDATE {schema}.message
        SET state = 'discarded', quarantine = NULL
        WHERE state = 'quarantined' AND id = ANY (%(rows)s::bigint[])
        RETURNING id
    )
    INSERT INTO {schema}.operator_audit (command, target, done_by, why, job)
    SELECT 'quarantine discard', id::text, %(by)s, %(why)s, %(job)s FROM discarded
""")


def order_discard(
    tables: Tables, route: RouteStatus, rows: Sequence[RowId], *, by: str, why: str, by_console: bool = False
) -> Job:
    """Write down a job over the rows that the route has now, or over those named; `DiscardWork` does it."""
    probes = tables.sql(PROBES_ON_THEIR_WAY)
    selected, until = tables.one(COUNT, parameters(route.id, rows), chosen=CHOSEN, probes=probes)
    named = {
        "ids": [each for each in rows if isinstance(each, int)],
        "message_ids": [str(each) for each in rows if isinstance(each, UUID)],
    }
    order = Order(
        kind=Kind.DISCARD,
        source=Source.QUARANTINED,
        filter={"route": route.id, "until": until, **{name: ids for name, ids in named.items() if ids}},
        by=by,
        why=why,
        selected=selected,
        by_console=by_console,
    )
    return make_job(tables, order)


class DiscardWork(SessionWork):
    """A job over the rows of a route in quarantine; see `relay.jobs.work.Work`.

    It is done, too, when the route works by now: its rows are on their way.
    """

    most = BATCH
    left = "the others stay in quarantine"

    def __init__(self, database: DatabaseSettings, job: Job) -> None:
        named = [*job.filter.get("ids", []), *map(UUID, job.filter.get("message_ids", []))]
        super().__init__(database)
        self.pace = Pace(job.rate or FULL, grain=GRAIN)
        self._route = job.filter["route"]
        self._values = {**parameters(self._route, named), "until": job.filter["until"]}
        self._begun = asyncio.get_running_loop().time()

    async def step(self, room: int, save: Save) -> Step:
        job, connection, values = save.job, self._connection, self._values
        if await self._must_wait():  # without the route's lock, which the relay needs to bring a probe back
            return Waits(PROBE_POLL)
        async with connection.transaction():
            await save.check(connection)
            if (await self._execute(LOCK_ROUTE, values)).rowcount == 0:
                return Ended()
            if await self._must_wait():
                return Waits(PROBE_POLL)
            found = await self._execute(READ_BATCH, {**values, "after": job.position, "batch": room})
            rows = [id_ for (id_,) in await found.fetchall()]
            if not rows:
                # What is left in the route waits for no more than it did: try it now.
                await self._execute(TRY_NOW, {"routes": [self._route]})
                await connection.execute(RING, {"channel": nodes_channel(self._schema), "word": ROUTES_CHANGED})
                return Ended()
            change = {"rows": rows, "by": job.done_by, "why": job.why, "job": job.id}
            await self._execute(DISCARD, change)
            did = Did(done=len(rows), position=rows[-1])
            await save(connection, did)
        return did

    async def outcome(self, save: Save) -> StageOutcome:
        raise UsageError(f"{save.job.words} has stages: what is discarded has no outcome")

    async def _must_wait(self) -> bool:
        may_wait = asyncio.get_running_loop().time() - self._begun < PROBE_WAIT
        return may_wait and (await self._execute(PROBES_ON_THEIR_WAY, self._values)).rowcount > 0

    async def _execute(self, statement: SQL, values: dict[str, Any]) -> psycopg.AsyncCursor[Any]:
        return await self._connection.execute(self._sql(statement, chosen=CHOSEN), values)
