"""Whose rows a role holds up by rows that are never sent: every writer's of the key, or its own alone.

Both writers are logins with the rights that config/roles.sql gives.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from aio_pika.abc import AbstractChannel
from psycopg.sql import SQL, Identifier
from psycopg.types.json import Json

from relay.config.settings import KeyScope, Ordering, Settings
from relay.engine.session.session import LaneSession, array_text
from relay.engine.settle.parking import FIND_PARKED
from relay.engine.settle.quarantine_table import SET_ASIDE_BEHIND
from relay.operate.holders import HeldUp, held_up
from relay.operate.parked.read import ParkedSelection, first_parked
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import PostgresServer
from tests.doctor.findings import OK, WARNING, look
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.bulk import operate, retry
from tests.support.eventually import eventually
from tests.support.plans import EXPLAIN, scans
from tests.support.roles import granted_roles

COPY_TO_ALL = {"headers": Json({"CC": ["everything"]})}  # parked: `broker.sender_selected_distribution` is off
NOWHERE = {"exchange": "", "routing_key": "nowhere"}  # quarantined
ROLE = {"key_scope": KeyScope.ROLE}


class Writer:
    """An application with a login, which may write rows and not read them."""

    def __init__(self, connection: psycopg.AsyncConnection, outbox: Outbox) -> None:
        self.role = connection.info.user
        self._connection = connection
        self._outbox = outbox

    async def insert(self, **columns: Any) -> int:
        """Write a row of the key that both writers have, and return its id."""
        values = {
            "message_id": uuid4(),
            "aggregate_type": "customer",
            "aggregate_id": "7",
            "event_type": "InvoiceIssued",
            "payload": Json(1),
            **columns,
        }
        statement = SQL("INSERT INTO outbox.message ({}) VALUES ({})").format(
            SQL(", ").join(map(Identifier, values)), SQL(", ").join(SQL("%s") for _ in values)
        )
        await self._connection.execute(statement, list(values.values()))
        found = await self._outbox.connection.execute(
            "SELECT id FROM outbox.message WHERE message_id = %s", [values["message_id"]]
        )
        (id_,) = await found.fetchone() or (0,)
        return int(id_)


@pytest.fixture
def logins(database_url: str) -> Iterator[list[str]]:
    names = [f"{name}_{secrets.token_hex(4)}" for name in ("attacker", "victim")]
    with psycopg.connect(database_url, autocommit=True) as owner, granted_roles(owner, *names):
        for name in names:
            owner.execute(SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(Identifier(name)))
            owner.execute(SQL("GRANT outbox_writer TO {}").format(Identifier(name)))
        yield names


@pytest.fixture
async def writers(
    logins: list[str], database_url: str, postgres: PostgresServer, outbox: Outbox
) -> AsyncIterator[list[Writer]]:
    """The attacker and the victim."""
    database = database_url.rpartition("/")[2]
    opened = [
        await psycopg.AsyncConnection.connect(postgres.url(database, user=name, password="x"), autocommit=True)
        for name in logins
    ]
    yield [Writer(connection, outbox) for connection in opened]
    for connection in opened:
        await connection.close()


@pytest.mark.parametrize(
    ("never_sent", "state", "command"),
    [(COPY_TO_ALL, "parked", "relay parked list --held"), (NOWHERE, "quarantined", "relay quarantine list")],
)
async def test_who_holds_up_whose_rows_is_named(
    writers: list[Writer],
    outbox: Outbox,
    settings: Settings,
    database_url: str,
    run_node: RunNode,
    monkeypatch: pytest.MonkeyPatch,
    never_sent: dict[str, Any],
    state: str,
    command: str,
) -> None:
    monkeypatch.setattr("relay.engine.settle.quarantine.PROBE_INITIAL", 60.0)
    attacker, victim = writers
    head = await attacker.insert(**never_sent)
    followers = [await victim.insert() for _ in range(2)]
    await attacker.insert()

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
    with psycopg.connect(database_url, autocommit=True) as connection:
        found = held_up(Tables(connection, "outbox"))
        reasons = read_status(Tables(connection, "outbox")).reasons
        parked = first_parked(Tables(connection, "outbox"), ParkedSelection(limit=10), with_held=True)
    (finding,) = await asyncio.to_thread(look, settings, "database.writers")

    words = f"role {attacker.role} holds up 2 rows of role {victim.role}, by {state} rows of their keys"
    assert found == [HeldUp(state, attacker.role, victim.role, 2)]
    assert f"{words}: see `{command}`" in reasons
    assert (finding.verdict, finding.words) == (WARNING, words)
    assert f"the rows of role {attacker.role}" in finding.remedy
    if state == "parked":
        assert {row.id: row.written_as for row in parked}.items() >= {
            head: attacker.role, followers[0]: victim.role, followers[1]: victim.role,
        }.items()  # fmt: skip


async def test_nobody_is_named_for_rows_that_a_role_holds_up_itself_or_that_tell_no_role(
    writers: list[Writer], outbox: Outbox, settings: Settings, database_url: str, run_node: RunNode
) -> None:
    attacker, victim = writers
    for columns in (COPY_TO_ALL, {}, {"aggregate_id": "8", **COPY_TO_ALL}):
        await attacker.insert(**columns)
    later = await victim.insert(aggregate_id="8")
    await outbox.connection.execute("UPDATE outbox.message SET written_as = '' WHERE id = %s", [later])

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
    (finding,) = await asyncio.to_thread(look, settings, "database.writers")

    assert await outbox.column("held_behind", later) is not None
    assert finding.verdict == OK


@pytest.mark.parametrize("ordering", Ordering)
@pytest.mark.parametrize("never_sent", [COPY_TO_ALL, NOWHERE])
async def test_with_keys_by_role_a_writer_holds_up_its_own_rows_alone(
    writers: list[Writer],
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    never_sent: dict[str, Any],
    ordering: Ordering,
) -> None:
    attacker, victim = writers
    mine = [await attacker.insert(**never_sent)]
    theirs = [await victim.insert()]
    mine += [await attacker.insert()] if ordering is Ordering.KEY else []

    async with run_node(ordering=ordering, **ROLE):
        await eventually(lambda: all_sent(outbox, theirs), "the victim's row is sent")
        await eventually(lambda: is_away(outbox, mine), "the attacker's rows are put away")
        mine.append(await attacker.insert())
        theirs += [await victim.insert() for _ in range(20)]
        await eventually(lambda: all_sent(outbox, theirs), "the victim's rows are sent")
        await eventually(lambda: is_away(outbox, mine), "the attacker's rows are put away")

    assert await queue.ids(len(theirs)) == theirs
    assert await outbox.ids("sent") == theirs


@pytest.mark.usefixtures("refused_by_broker")
async def test_with_keys_by_role_a_row_that_backs_off_holds_up_its_own_role_alone(
    writers: list[Writer], outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    attacker, victim = writers
    mine = [await attacker.insert(headers=Json({"x" * 129: True})), await attacker.insert()]
    theirs = [await victim.insert() for _ in range(3)]

    async with run_node(backoff_initial=600.0, backoff_max=600.0, **ROLE):
        await eventually(lambda: has_attempts(outbox, mine[0]), "the attacker's row was refused")
        theirs += [await victim.insert() for _ in range(3)]
        await eventually(lambda: all_sent(outbox, theirs), "the victim's rows are sent")

    assert await queue.ids(6) == theirs
    assert await outbox.ids("pending") == mine


async def test_with_keys_by_role_a_route_is_probed_next_to_rows_of_another_role(
    writers: list[Writer], outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    attacker, victim = writers
    mine = [await attacker.insert(**NOWHERE), await attacker.insert(aggregate_id="8", **COPY_TO_ALL)]
    theirs = [await victim.insert(aggregate_id=key, exchange="", routing_key="later") for key in ("7", "8")]

    async with run_node(**ROLE):
        await eventually(lambda: is_away(outbox, [*mine, *theirs]), "all are put away")
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert sorted(await later.ids(2)) == theirs
        await eventually(lambda: all_sent(outbox, theirs), "marked")


async def test_with_keys_by_role_each_role_has_its_rows_in_order(
    writers: list[Writer], outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    written: dict[str, list[int]] = {}
    for _ in range(50):
        for writer in writers:
            written.setdefault(writer.role, []).append(await writer.insert())

    async with run_node(**ROLE):
        arrived = await queue.ids(100)

    for ids in written.values():
        assert [id_ for id_ in arrived if id_ in ids] == ids


async def test_rows_that_tell_no_role_have_keys_of_their_own(
    writers: list[Writer], outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    attacker, victim = writers
    earlier = [await attacker.insert(**COPY_TO_ALL), await victim.insert()]
    await outbox.connection.execute("UPDATE outbox.message SET written_as = ''")
    later = await victim.insert()

    async with run_node(**ROLE):
        assert await queue.ids(1) == [later]
        await eventually(lambda: is_away(outbox, earlier), "the earlier rows are put away")

    assert await outbox.column("held_behind", earlier[1]) == earlier[0]


async def test_a_released_row_waits_behind_no_row_of_another_role(
    writers: list[Writer], outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str
) -> None:
    attacker, victim = writers
    mine = await attacker.insert(**COPY_TO_ALL)
    theirs = [await victim.insert(**COPY_TO_ALL), await victim.insert(), await victim.insert()]

    async with run_node(**ROLE):
        await eventually(lambda: is_away(outbox, [mine, *theirs]), "all are put away")
        await outbox.mend(theirs[0])
        done = await operate(
            database_url, lambda connection: retry(connection, "outbox", ParkedSelection(ids=theirs[:1]))
        )
        assert await queue.ids(3) == theirs
        await eventually(lambda: all_sent(outbox, theirs), "marked")

    assert (done.chosen, done.released) == (1, 2)
    assert await outbox.ids("parked") == [mine]


async def test_with_one_key_for_all_a_released_row_waits_behind_the_other_role_s_head(
    writers: list[Writer], outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str
) -> None:
    """The release leaves it to the relay, which knows `key_scope`."""
    attacker, victim = writers
    mine = await attacker.insert(**COPY_TO_ALL)
    theirs = [await victim.insert(**COPY_TO_ALL), await victim.insert()]
    async with run_node(**ROLE):
        await eventually(lambda: is_away(outbox, [mine, *theirs]), "all are put away")
    await outbox.mend(theirs[0])

    async with run_node():
        await operate(database_url, lambda connection: retry(connection, "outbox", ParkedSelection(ids=theirs[:1])))
        await eventually(outbox.is_empty, "nothing pending")
        behind = [await outbox.column("held_behind", id_) for id_ in theirs]
        await outbox.mend(mine)
        await operate(database_url, lambda connection: retry(connection, "outbox", ParkedSelection(ids=[mine])))
        assert await queue.ids(3) == [mine, *theirs]

    assert behind == [mine, mine]


async def test_a_million_rows_of_one_role_do_not_slow_down_another_one(
    writers: list[Writer], outbox: Outbox, settings: Settings
) -> None:
    """Shown by the plans: an index alone tells each statement whether the role has a row."""
    attacker, victim = writers
    await outbox.connection.execute("ALTER TABLE outbox.message_parked DISABLE TRIGGER USER")
    await outbox.connection.execute(
        """
        INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, held_behind, quarantine,
            written_as)
        SELECT 'customer', '7', 'e', '1', state, CASE state WHEN 'parked' THEN nullif(n, 1) END,
            CASE state WHEN 'quarantined' THEN 1 END, %s
        FROM unnest(ARRAY['parked', 'quarantined']) AS state, generate_series(1, 20000) AS n
        """,
        [attacker.role],
    )
    row = await victim.insert()
    lane = await outbox.column("lane", row)
    statements: list[tuple[SQL, dict[str, Any]]] = [
        (FIND_PARKED, {"kinds": ["customer"], "keys": ["7"], "roles": [victim.role]}),
        (SET_ASIDE_BEHIND, {"lanes": array_text([lane]), "ids": array_text([row])}),
    ]

    async with await LaneSession.open(settings.database, key_scope=KeyScope.ROLE) as lanes, lanes.use() as connection:
        for statement, values in statements:
            cursor = await connection.execute(EXPLAIN.encode() + lanes.sql(statement), values)
            (plans,) = await cursor.fetchone() or ([],)
            read = scans(plans[0]["Plan"])
            looked_at = sum(scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) for scan in read)
            assert looked_at < 10, (statement, read)


async def all_sent(outbox: Outbox, ids: list[int]) -> bool:
    return set(ids) <= set(await outbox.ids("sent"))


async def is_away(outbox: Outbox, ids: list[int]) -> bool:
    return sorted([*await outbox.ids("parked"), *await outbox.ids("quarantined")]) == sorted(ids)


async def has_attempts(outbox: Outbox, id_: int) -> bool:
    return bool(await outbox.column("attempts", id_))
