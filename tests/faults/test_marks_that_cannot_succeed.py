"""A row's outcome cannot be written: sending stops with the reason, nothing is repeated, and it goes on once mended.

`FAULTS` has each error that PostgreSQL may answer such a statement with.
"""

import asyncio

import pytest
from psycopg.types.json import Json

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.errors import leaves
from relay.servers.postgres.statement_fault import FAULTS
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.support.eventually import eventually

WINDOW = 200

# A trigger that fails whatever is done to the rows of a state, in the way of a fault that nobody foresaw.
RAISE = """
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE 'planted' USING ERRCODE = '{code}'; END $$;
    CREATE TRIGGER refuse BEFORE {event} EXECUTE FUNCTION public.refuse()
"""
FORBID = """
    ALTER TABLE outbox.message_pending REPLICA IDENTITY NOTHING;
    CREATE PUBLICATION everything FOR ALL TABLES
"""
MEND = "DROP FUNCTION public.refuse CASCADE"
ROLLBACKS = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()"

WAITED_FOR = (
    "22003", "23502", "23505", "23514", "39000", "40001", "40P01", "42501", "42P10", "44000", "53100", "53200", "54000",
    "55000", "55006", "55P03", "57014", "58030", "P0001", "XX000", "XX001", "XX002",
)  # fmt: skip
SESSION_ENDS = ("25006", "25P02", "40003", "57P01")
RELAY_ENDS = ("26000", "3F000", "42703", "42883", "42P01", "42P05")


async def is_tried_again(outbox: Outbox, times: int) -> None:
    """Wait until so many transactions have failed."""

    async def failed() -> int:
        row = await (await outbox.connection.execute(ROLLBACKS)).fetchone()
        return int(row[0]) if row else 0

    before = await failed()

    async def has_failed() -> bool:
        return await failed() >= before + times

    await eventually(has_failed, f"it has failed {times} times", 60)


@pytest.mark.every_postgres
async def test_a_publication_without_replica_identity_stops_the_sending(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """An operator took the identity away, so a publication of deletes forbids the mark.

    The relay names it, repeats nothing, and goes on without it.
    """
    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await outbox.connection.execute(FORBID)
        await outbox.insert_many(1000)

        await eventually(lambda: "replica identity" in node.hindrances().get("database", ""), "it says what is wrong")
        assert node.hindrances()["database"].public == "a statement fails until an operator acts"  # as /readyz has it
        await is_tried_again(outbox, 4)
        assert node.in_flight == 0
        assert await outbox.ids("sent") == []
        await outbox.connection.execute("DROP PUBLICATION everything")

        await eventually(outbox.is_empty, "everything is marked")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses  # it waited on its session, lanes and all

    assert await outbox.ids("sent") == sorted(await queue.ids(1000))


@pytest.mark.parametrize("code", WAITED_FOR)
async def test_a_mark_that_fails_is_repeated_on_its_session(
    outbox: Outbox, queue: Reader, run_node: RunNode, code: str
) -> None:
    """The mark fails with each SQLSTATE; the relay waits with that reason, and sends no row twice."""
    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await outbox.connection.execute(RAISE.format(code=code, event="DELETE ON outbox.message_pending").encode())
        await outbox.insert_many(WINDOW)

        await eventually(lambda: "planted" in node.hindrances().get("database", ""), "it says what is wrong")
        await outbox.connection.execute(MEND)

        await eventually(outbox.is_empty, "everything is marked")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses

    assert await outbox.ids("sent") == sorted(await queue.ids(WINDOW))


@pytest.mark.parametrize("code", SESSION_ENDS)
async def test_a_mark_that_the_session_can_never_make_is_made_on_another(
    outbox: Outbox, queue: Reader, run_node: RunNode, code: str
) -> None:
    """The mark fails in a way that makes the session useless; the relay opens another one."""
    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await outbox.connection.execute(RAISE.format(code=code, event="DELETE ON outbox.message_pending").encode())
        await outbox.insert_many(10)

        await eventually(lambda: bool(node.snapshot().database_losses), "the session was lost")
        await outbox.connection.execute(MEND)
        await eventually(outbox.is_empty, "everything is marked")

    await queue.drain_different(10)


@pytest.mark.parametrize("outcome", ["postponed", "parked", "set aside"])
async def test_a_row_that_cannot_be_put_away_is_tried_once(
    outbox: Outbox, queue: Reader, run_node: RunNode, outcome: str
) -> None:
    """A row is refused and the table refuses its outcome; the relay waits, and tries the row no more."""
    attempts = {"postponed": 5, "parked": 1, "set aside": 5}[outcome]
    async with run_node(max_attempts=attempts, backoff_initial=60, backoff_max=60, **NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await outbox.connection.execute(FORBID)
        if outcome == "set aside":
            id_ = await outbox.insert(exchange="nowhere")
        else:
            id_ = await outbox.insert(headers=Json({"x" * 129: True}))

        await eventually(lambda: "replica identity" in node.hindrances().get("database", ""), "it says what is wrong")
        await is_tried_again(outbox, 2)
        await outbox.connection.execute("DROP PUBLICATION everything")

        await eventually(lambda: is_put_away(outbox, id_, outcome), "the outcome is written")
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses

    assert await outbox.column("attempts", id_) == {"postponed": 1, "parked": 1, "set aside": 0}[outcome]


async def is_put_away(outbox: Outbox, id_: int, outcome: str) -> bool:
    state = await outbox.column("state", id_)
    if outcome == "postponed":
        return bool(await outbox.column("attempts", id_) == 1)
    return bool(state == {"parked": "parked", "set aside": "quarantined"}[outcome])


@pytest.mark.parametrize("code", RELAY_ENDS)
async def test_a_mark_that_no_session_can_make_ends_the_relay(
    outbox: Outbox, queue: Reader, settings: Settings, code: str
) -> None:
    """The tables are gone, as far as PostgreSQL says: the relay ends with that error."""
    node = Node(settings)
    running = asyncio.create_task(node.run())
    await eventually(node.is_ready, "ready")
    await outbox.connection.execute(RAISE.format(code=code, event="DELETE ON outbox.message_pending").encode())
    await outbox.insert()

    with pytest.raises(ExceptionGroup) as ended:
        await running

    assert [getattr(error, "sqlstate", None) for error in leaves(ended.value)] == [code]


async def test_a_relay_without_the_right_to_join_ends(outbox: Outbox, settings: Settings) -> None:
    """Before it has lanes no row is in flight: the relay ends and says what it lacks, instead of waiting."""
    await outbox.connection.execute(RAISE.format(code="42501", event="INSERT ON outbox.node").encode())

    with pytest.raises(ExceptionGroup) as ended:
        await Node(settings).run()

    assert [getattr(error, "sqlstate", None) for error in leaves(ended.value)] == ["42501"]


def test_each_entry_of_the_table_is_tried() -> None:
    codes = (*WAITED_FOR, *SESSION_ENDS, *RELAY_ENDS)
    tried = {next((prefix for prefix in FAULTS if code.startswith(prefix)), None) for code in codes}

    assert tried == {*FAULTS, None}
