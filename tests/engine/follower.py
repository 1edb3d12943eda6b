"""Reads with a tail, as a node does, and keeps what it was given."""

import asyncio
from collections.abc import Collection
from typing import Protocol

import psycopg

from relay.config.settings import KeyPolicy, Ordering
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.tail import Tail
from relay.engine.row import Row
from relay.engine.session.database_retry import DatabaseRetry
from relay.engine.session.session import LaneSession
from relay.runtime.health import Health
from tests.support.eventually import eventually

INSERT = (
    "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
    " VALUES ('customer', %s, 'InvoiceIssued', '{}') RETURNING id"
)


IN_ORDER = DeliveryPolicy.of(Ordering.KEY, KeyPolicy.HOLD)  # as by default


def unhurried(session: LaneSession) -> DatabaseRetry:
    """Return the patience of a node that is not to stop."""
    return DatabaseRetry(session, Health(), drain=asyncio.Event())


class Follow(Protocol):
    """Start to read all lanes, with these relay settings."""

    async def __call__(self, **settings: float) -> "Follower": ...


class Follower:
    """A tail whose windows are collected as they come; no row is ever settled."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.rows: list[Row] = []
        self.ids: list[int] = []
        self.windows: list[int] = []
        self.behind: list[Collection[int] | None] = []  # at each window
        self.drain = asyncio.Event()

    async def write(self, session: LaneSession) -> None:
        """Change something now and then, as heartbeats and marks do."""
        while not self.drain.is_set():
            async with session.write() as connection:
                await connection.execute("SELECT pg_current_xact_id()")
            await asyncio.sleep(0.3)

    async def run(self) -> None:
        async for window in self.tail.windows(until=self.drain):
            self.rows.extend(window)
            self.ids.extend(row.id for row in window)
            self.windows.append(len(window))
            self.behind.append(self.tail.behind)

    async def counts(self, number: int) -> None:
        try:
            await eventually(lambda: len(self.ids) == number, "rows read")
        except TimeoutError:
            raise TimeoutError(f"{len(self.ids)} rows are read ({len(set(self.ids))} of them different)") from None

    async def has(self, *ids: int) -> None:
        try:
            await eventually(lambda: set(ids) <= set(self.ids), "rows read")
        except TimeoutError:
            raise TimeoutError(f"rows {sorted(set(ids) - set(self.ids))} are not read") from None


async def insert(connection: psycopg.AsyncConnection, key: str) -> int:
    row = await (await connection.execute(INSERT, [key])).fetchone()
    assert row is not None
    return int(row[0])
