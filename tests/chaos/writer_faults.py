"""Unusual things that writers and other sessions do to the table, each on its own keys."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
import psycopg

from tests.chaos.fleet import MAX_MESSAGE_BYTES, Fleet
from tests.chaos.kinds import FaultKind, Planned
from tests.faults.billing import RECONNECT_AFTER, insert, invoice, written
from tests.faults.history import Ending, Reach

ROWS = 20
GIANT_ROWS = 20_000
GIANT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', 'giant-' || n %% 1000, 'InvoiceIssued', '{"rolled": "back"}' FROM generate_series(1, %s) AS n
"""
WITHOUT_RING = "SET LOCAL outbox.ring = off"  # two-phase commit allows no notification

Lost = (psycopg.OperationalError, psycopg.InterfaceError)


@dataclass
class _Told:
    """Messages that are recorded in the history however their transaction ends."""

    fleet: Fleet
    messages: list[dict[str, Any]]
    ending: Ending = field(default=Ending.ROLLED_BACK)

    def tell(self) -> None:
        self.fleet.history.extend(written(message, self.ending) for message in self.messages)


def _draw(fleet: Fleet, planned: Planned) -> _Told:
    chance, customer = planned.chance(), f"chaos-{planned.number}"
    return _Told(fleet, [invoice(chance, customer, number) for number in range(1, ROWS + 1)])


async def commit_late(fleet: Fleet, planned: Planned) -> None:
    told = _draw(fleet, planned)
    with suppress(*Lost):
        async with await fleet.connect() as connection, connection.transaction():
            await insert(connection, told.messages)
            await asyncio.sleep(planned.seconds)
            told.ending = Ending.UNKNOWN
        told.ending = Ending.COMMITTED
    told.tell()


async def commit_in_two_phases(fleet: Fleet, planned: Planned) -> None:
    """Prepare a transaction and then decide it, whatever happens to the server in between."""
    told, gid = _draw(fleet, planned), f"chaos-{planned.number}"
    decision = planned.chance().choice(["COMMIT", "ROLLBACK"])
    try:
        async with await fleet.connect() as connection:
            await connection.execute("BEGIN")
            await connection.execute(WITHOUT_RING)
            await insert(connection, told.messages)
            told.ending = Ending.UNKNOWN
            await connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
    except Lost:  # perhaps it is prepared
        pass
    await asyncio.sleep(planned.seconds)
    is_decided = await _decide(fleet, decision, gid)
    if is_decided and told.ending is Ending.UNKNOWN:
        told.ending = Ending.COMMITTED if decision == "COMMIT" else Ending.ROLLED_BACK
    told.tell()


async def roll_back_a_giant(fleet: Fleet, planned: Planned) -> None:
    with suppress(*Lost):
        async with await fleet.connect() as connection, connection.transaction(force_rollback=True):
            await connection.execute(GIANT, [GIANT_ROWS])
            await asyncio.sleep(planned.seconds)


async def hold_a_snapshot(fleet: Fleet, planned: Planned) -> None:
    with suppress(*Lost):
        async with await fleet.connect() as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            async with connection.transaction():
                await connection.execute("SELECT count(*) FROM outbox.node")
                await asyncio.sleep(planned.seconds)


async def poison(fleet: Fleet, planned: Planned) -> None:
    """Write a key whose second row is too large: it is parked, and the others wait behind it."""
    told = _draw(fleet, planned)
    second = told.messages[1]
    second["payload"] = orjson.dumps({"number": 2, "filling": "x" * MAX_MESSAGE_BYTES}).decode()
    with suppress(*Lost):
        async with await fleet.connect() as connection:
            async with connection.transaction():
                await insert(connection, told.messages)
                told.ending = Ending.UNKNOWN
            told.ending = Ending.COMMITTED
    told.tell()
    await asyncio.sleep(planned.seconds)


async def _decide(fleet: Fleet, decision: str, gid: str) -> bool:
    """End a prepared transaction. False if it does not exist: it was never prepared, or an answer was lost."""
    while True:
        try:
            async with await fleet.connect() as connection:
                await connection.execute(f"{decision} PREPARED '{gid}'".encode())
        except psycopg.errors.UndefinedObject:
            return False
        except Lost:
            await asyncio.sleep(RECONNECT_AFTER)
        else:
            return True


KINDS = [
    FaultKind("commit late", commit_late, Reach.A_MOMENT, forgets=False, seconds=(5.0, 5.0)),
    FaultKind("commit in two phases", commit_in_two_phases, Reach.A_MOMENT, forgets=False, seconds=(1.0, 4.0)),
    FaultKind("roll a giant back", roll_back_a_giant, Reach.A_MOMENT, forgets=False, seconds=(0.0, 2.0)),
    FaultKind("hold a snapshot", hold_a_snapshot, Reach.A_MOMENT, forgets=False, seconds=(4.0, 10.0)),
    FaultKind("poison", poison, Reach.SOME, forgets=False, seconds=(2.0, 4.0)),
]
