"""Old days are dropped whole, by one process at a time, without a long wait for marks; what is in the way is named."""

import asyncio

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, Settings
from relay.retention import rounds
from relay.retention.drop import Retention
from relay.retention.kind import SENT
from relay.retention.rounds import drop_old_days, keep_days
from relay.testing.servers.postgres import PostgresServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.retention.conftest import KEEP, OLD, READ_ALL, lock_is_free, round_of
from tests.support.days import Days
from tests.support.eventually import eventually
from tests.support.roles import SCRIPT

pytestmark = pytest.mark.every_postgres

MARK_SENT = "UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE state = 'pending'"
RETRIES = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'retention' AND wait_event = 'PgSleep'"


async def test_days_older_than_is_kept_are_dropped_and_logged_with_their_rows(
    days: Days, outbox: Outbox, database: DatabaseSettings
) -> None:
    for ago, rows in ((OLD, 30), (OLD + 300, 20), (KEEP, 10), (1, 5)):
        days.add(ago, rows)
    await outbox.insert()
    await outbox.connection.execute(MARK_SENT)

    events = await round_of(database)

    assert [(each["event"], each["rows"]) for each in events] == [("retention.dropped", 20), ("retention.dropped", 30)]
    assert f"outbox.message_sent_{events[1]['day'].replace('-', '')}" == days.table(OLD)
    assert all(each["bytes"] > 0 for each in events)
    assert days.past() == {KEEP, 1}
    assert days.value(READ_ALL) == 16
    assert await round_of(database) == []


async def test_rows_that_are_not_sent_are_never_dropped(days: Days, outbox: Outbox, database: DatabaseSettings) -> None:
    states = ("parked", "discarded", "quarantined", "pending")
    for state in states:
        id_ = await outbox.insert(state)
        await outbox.connection.execute(
            "UPDATE outbox.message SET state = %s, created_at = '2020-01-01', parked_at = '2020-01-01' WHERE id = %s",
            [state, id_],
        )
    days.add(2, 1)

    await round_of(database, keep=1)

    assert [len(await outbox.ids(state)) for state in states] == [1, 1, 1, 1]
    assert await outbox.ids("sent") == []


async def test_a_day_with_a_row_that_is_not_sent_stays_as_it_is(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 3)
    table = days.table(OLD)
    bound = str(days.value(f"SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = '{table}'::regclass"))
    # Nothing that PostgreSQL offers lets such a row in: a constraint is passed off as one that was checked.
    days.run(f"ALTER TABLE outbox.message_sent DETACH PARTITION {table}")
    days.run(f"UPDATE {table} SET state = 'pending' WHERE id = (SELECT min(id) FROM {table})")
    first, end = bound.removeprefix("FOR VALUES FROM (").removesuffix(")").split(") TO (")
    inside = f"state IS NOT NULL AND state = 'sent' AND sent_at IS NOT NULL AND sent_at >= {first} AND sent_at < {end}"
    days.run(f"ALTER TABLE {table} ADD CONSTRAINT lie CHECK ({inside}) NOT VALID")
    days.run("UPDATE pg_constraint SET convalidated = true WHERE conname = 'lie'")
    days.run(f"ALTER TABLE outbox.message_sent ATTACH PARTITION {table} {bound}")

    (event,) = await round_of(database)

    assert event["event"] == "retention.postponed"
    assert event["reason"] == f"1 of its rows are not sent: look at {table}"
    assert days.value(READ_ALL) == 3


async def test_nothing_is_dropped_when_retention_is_off(
    days: Days, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FIRST_AFTER", 0)
    days.add(5000, 1)
    off = settings.model_copy(update={"relay": settings.relay.model_copy(update={"retention": "off"})})

    async with asyncio.timeout(20):
        await keep_days(off)

    assert days.past() == {5000}


async def test_an_open_snapshot_postpones_the_drop_and_stops_nobody_else(
    days: Days, outbox: Outbox, reader: psycopg.AsyncConnection, database: DatabaseSettings
) -> None:
    days.add(OLD, 3)
    await outbox.connection.execute("SET lock_timeout = '2s'")  # a drop that waits holds up a mark for 150 ms at most
    await reader.execute(READ_ALL)

    dropping = asyncio.create_task(round_of(database))
    while not dropping.done():
        await outbox.insert()
        await outbox.connection.execute(MARK_SENT)
        await asyncio.sleep(0.01)
    (first,) = await dropping
    await reader.rollback()
    (last,) = await round_of(database)

    assert first["event"] == "retention.postponed"
    assert f"session {reader.info.backend_pid} (report)" in first["reason"]
    assert (last["event"], last["rows"]) == ("retention.dropped", 3)
    assert days.past() == set()


async def test_a_reader_of_all_days_lets_a_mark_not_wait_for_the_drop(
    days: Days, reader: psycopg.AsyncConnection, database: DatabaseSettings
) -> None:
    """The drop asks for the day first: only behind a reader of other days alone does it ask for the parent."""
    asked = """
        SELECT count(*) FROM pg_locks WHERE relation = 'outbox.message_sent'::regclass AND mode = 'AccessExclusiveLock'
    """
    days.add(OLD, 3)
    await reader.execute(READ_ALL)

    dropping = asyncio.create_task(round_of(database))
    await eventually(lambda: days.value(RETRIES) == 1, "the drop tries again")
    seen = []
    while not dropping.done():
        seen.append(days.value(asked))
        await asyncio.sleep(0.01)

    assert set(seen) == {0}


async def test_a_reader_that_ends_in_time_postpones_nothing(
    days: Days, reader: psycopg.AsyncConnection, database: DatabaseSettings
) -> None:
    days.add(OLD, 3)
    await reader.execute(READ_ALL)

    dropping = asyncio.create_task(round_of(database))
    await eventually(lambda: days.value(RETRIES) == 1, "the drop tries again")
    await reader.rollback()
    (event,) = await dropping

    assert (event["event"], event["rows"]) == ("retention.dropped", 3)


async def test_a_drop_whose_session_is_lost_has_changed_nothing(
    days: Days, reader: psycopg.AsyncConnection, database: DatabaseSettings
) -> None:
    days.add(OLD, 3)
    await reader.execute(READ_ALL)
    dropping = asyncio.create_task(drop_old_days(database, {SENT: KEEP}))
    await eventually(lambda: days.value(RETRIES) == 1, "the drop tries again")

    days.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ 'retention'")
    with pytest.raises(psycopg.OperationalError):
        await dropping
    kept = days.value(READ_ALL)
    await reader.rollback()
    await lock_is_free(days)
    (event,) = await round_of(database)

    assert kept == 3
    assert (event["event"], event["rows"]) == ("retention.dropped", 3)


async def test_a_day_that_an_operator_has_detached_is_left_alone(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 3)
    days.run(f"ALTER TABLE outbox.message_sent DETACH PARTITION {days.table(OLD)}")

    assert await round_of(database) == []
    assert days.past() == {OLD}


@pytest.mark.parametrize("ago", [0, -1, OLD])
def test_no_day_but_a_past_one_of_the_table_is_dropped(days: Days, ago: int) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="is no past day"):
        days.run(f"SELECT outbox.drop_sent_day((now() AT TIME ZONE 'UTC')::date - ({ago}), false, false)")


async def test_of_several_at_once_one_drops(days: Days, database: DatabaseSettings) -> None:
    for ago in range(OLD, OLD + 5):
        days.add(ago, 2)

    with capture_logs() as events:
        await asyncio.gather(*(drop_old_days(database, {SENT: KEEP}) for _ in range(4)))

    assert [(each["event"], each["rows"]) for each in events] == [("retention.dropped", 2)] * 5
    assert days.past() == set()


async def test_while_one_drops_another_one_does_nothing(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 1)

    async with Retention.open(database) as first:
        assert await first.take_lock()
        assert await round_of(database) == []
    await lock_is_free(days)
    await round_of(database)

    assert days.past() == set()


async def test_a_role_without_the_grant_is_told_which_one_is_missing(
    days: Days, postgres: PostgresServer, database_url: str
) -> None:
    days.add(OLD, 3)
    days.run(SCRIPT)
    name = days.connection.info.dbname
    login = f"login_{name}"
    as_login = DatabaseSettings(url=SecretStr(postgres.url(name, user=login, password="x")))
    try:
        days.run(f"CREATE ROLE {login} LOGIN PASSWORD 'x' IN ROLE outbox_relay")
        (refused,) = await round_of(as_login)
        days.run(f"GRANT outbox_retention TO {login}")
        (granted,) = await round_of(as_login)
        made = days.value("SELECT outbox.ensure_sent_days(current_date + 5, 1)")
    finally:
        days.run(f"DROP ROLE IF EXISTS {login}")

    assert refused["event"] == "retention.postponed"
    assert "GRANT EXECUTE ON FUNCTION" in refused["reason"]
    assert f'TO "{login}"`' in refused["reason"]
    assert (granted["event"], granted["rows"], made) == ("retention.dropped", 3, 1)


async def test_a_running_node_drops_old_days_and_relays_meanwhile(
    days: Days, outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FIRST_AFTER", 0)
    monkeypatch.setattr(rounds, "INTERVAL", 0.2)
    days.add(OLD, 3)

    with capture_logs() as events:
        async with run_node():
            await outbox.insert_many(200)
            await eventually(lambda: days.past() == set(), "the day is dropped")
            days.add(OLD + 1, 4)
            await eventually(lambda: days.past() == set(), "and the next one")
            await eventually(outbox.is_empty, "everything is marked")

    await queue.drain(200)
    assert [each["rows"] for each in events if each["event"] == "retention.dropped"] == [3, 4]


async def test_a_round_without_a_database_is_told_and_tried_again(
    settings: Settings, days: Days, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FIRST_AFTER", 0)
    monkeypatch.setattr(rounds, "INTERVAL", 0.05)
    days.add(OLD, 1)
    name = days.connection.info.dbname

    with psycopg.connect(postgres.admin_url, autocommit=True) as admin, capture_logs() as events:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        dropping = asyncio.create_task(keep_days(settings))
        await eventually(lambda: bool(events), "it says that it failed")
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
        await eventually(lambda: days.past() == set(), "the day is dropped")
        dropping.cancel()

    assert events[0]["event"] == "retention.failed"
    assert "not currently accepting connections" in events[0]["reason"]
