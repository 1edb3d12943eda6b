"""Notice what keeps PostgreSQL from removing dead rows: an old snapshot, a transaction left open or prepared.

Deliveries stay right meanwhile, and the tail does not read what is behind its floors. But the table grows. A sweep and
the first read of a session begin at its front, and walk over all that was sent since.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg.sql import SQL

from relay.engine.session.session import LaneSession
from relay.logger import get_logger

log = get_logger(__name__)

# A role without pg_read_all_stats sees every column but xact_start. Autovacuum's workers hold nothing back, and have no
# user. Snapshots of other databases do not matter, but a standby's snapshots do; they have no database.
HOLDERS = SQL("""
    SELECT kind, name, owner, xid::text, age_s
    FROM (
        SELECT 'session', pid::text, coalesce(nullif(application_name, ''), usename, ''),
            coalesce(backend_xmin, backend_xid), extract(epoch FROM clock_timestamp() - xact_start)::float8
        FROM pg_stat_activity
        WHERE pid <> pg_backend_pid() AND usesysid IS NOT NULL AND (datid IS NULL OR datname = current_database())
        UNION ALL
        SELECT 'prepared transaction', gid, owner::text, transaction,
            extract(epoch FROM clock_timestamp() - prepared)::float8
        FROM pg_prepared_xacts
        WHERE database = current_database()
        UNION ALL
        SELECT 'replication slot', slot_name::text, '', xmin, NULL
        FROM pg_replication_slots
    ) AS holder (kind, name, owner, xid, age_s)
    WHERE xid IS NOT NULL
    ORDER BY age(xid) DESC
    LIMIT 5
""")

LOOK_INTERVAL = 10.0  # seconds
HELD_LONG = 25.0  # seconds; until then the wait of a dead row is not worth a warning


@dataclass(frozen=True, slots=True)
class Holder:
    """A session, transaction or slot that keeps dead rows; the fields are the columns of HOLDERS."""

    kind: str
    name: str  # process id, gid or slot name
    owner: str  # application, or user
    xid: str
    age_s: float | None  # of the transaction; None where the role may not see it

    def __str__(self) -> str:
        owner = f" ({self.owner})" if self.owner else ""
        age = "" if self.age_s is None else f" for {self.age_s:.0f} s"
        return f"{self.kind} {self.name}{owner} has kept dead rows from being cleared away{age}"


class VacuumWatch:
    """Looks every few seconds, and logs each holder that has kept the same place for long, once."""

    def __init__(self, session: LaneSession) -> None:
        self._session = session
        self._since: dict[tuple[str, str, str], float] = {}  # holder and place -> first seen
        self._told: set[tuple[str, str, str]] = set()

    async def run(self) -> None:
        """Look until cancelled, or until the database forbids it."""
        while True:
            try:
                async with self._session.use() as connection:
                    found = [Holder(*row) for row in await (await connection.execute(HOLDERS)).fetchall()]
            except psycopg.errors.InsufficientPrivilege as error:  # some servers hide these views
                log.warning("vacuum.not_watched", reason=error.diag.message_primary)
                return
            self._compare(found, time.monotonic())
            await asyncio.sleep(LOOK_INTERVAL)

    def _compare(self, found: Sequence[Holder], now: float) -> None:
        # A holder that moves on to a newer snapshot holds nothing back, however old its transaction is.
        self._since = {place: self._since.get(place, now) for place in map(_place, found)}
        for gone in self._told - self._since.keys():
            self._told.discard(gone)
            log.info("vacuum.released", kind=gone[0], name=gone[1])
        for holder in found:
            place = _place(holder)
            if now - self._since[place] >= HELD_LONG and place not in self._told:
                self._told.add(place)
                seen = now - self._since[place]
                log.warning(
                    "vacuum.held_back",
                    kind=holder.kind,
                    name=holder.name,
                    owner=holder.owner,
                    age_s=round(holder.age_s if holder.age_s is not None else seen),
                )


def _place(holder: Holder) -> tuple[str, str, str]:
    return holder.kind, holder.name, holder.xid
