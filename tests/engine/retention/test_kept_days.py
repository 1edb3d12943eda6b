"""What keeps an old day: a replay that is to read it, and the archive that does not have it yet."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.work import order_replay
from relay.retention.kind import SENT_AND_ARCHIVED
from relay.servers.postgres.tables import Tables
from tests.engine.retention.conftest import OLD, round_of
from tests.support.days import Days
from tests.support.eventually import eventually

pytestmark = pytest.mark.every_postgres

ADVISORY_WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.mark.parametrize("since", [None, OLD + 1])
async def test_an_unfinished_replay_keeps_the_days_that_it_reads(
    days: Days, database: DatabaseSettings, since: int | None
) -> None:
    days.add(OLD, 3)
    begin = since and datetime.now(UTC) - timedelta(days=since)
    with psycopg.connect(database.url.get_secret_value(), autocommit=True) as connection:
        job = order_replay(Tables(connection, "outbox"), SentSelection(since=begin or None))

    (kept,) = await round_of(database)
    days.run("UPDATE outbox.job SET state = 'cancelled'")
    (dropped,) = await round_of(database)

    assert kept["event"] == "retention.postponed"
    assert kept["reason"].startswith(f"replay {job.id} needs it: `relay jobs resume`")
    assert dropped["event"] == "retention.dropped"


@pytest.mark.parametrize(
    "selection",
    [SentSelection(since=datetime.now(UTC) - timedelta(days=3)), SentSelection(until=datetime(2000, 1, 1, tzinfo=UTC))],
)
async def test_a_replay_keeps_no_other_days(days: Days, database: DatabaseSettings, selection: SentSelection) -> None:
    days.add(OLD, 3)
    with psycopg.connect(database.url.get_secret_value(), autocommit=True) as connection:
        order_replay(Tables(connection, "outbox"), selection)

    await round_of(database)

    assert days.past() == set()


async def test_a_replay_that_is_being_made_keeps_its_days(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 3)
    with psycopg.connect(database.url.get_secret_value()) as maker:
        order_replay(Tables(maker, "outbox"), SentSelection())  # not committed

        dropping = asyncio.create_task(round_of(database))
        await eventually(lambda: days.value(ADVISORY_WAITS) == 1, "retention waits for it")
        maker.commit()
        (event,) = await dropping

    assert event["event"] == "retention.postponed"
    assert days.past() == {OLD}


async def test_a_day_waits_until_it_is_archived_as_it_is(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 3)
    note = "INSERT INTO outbox.archived_day (day, rows, checksum, path) VALUES ({day}, {rows}, 0, 'archive')"
    day = f"(now() AT TIME ZONE 'UTC')::date - {OLD}"

    (unarchived,) = await round_of(database, kind=SENT_AND_ARCHIVED)
    days.run(note.format(day=day, rows=2))
    (incomplete,) = await round_of(database, kind=SENT_AND_ARCHIVED)
    kept = days.past()
    days.run("UPDATE outbox.archived_day SET rows = 3")
    (dropped,) = await round_of(database, kind=SENT_AND_ARCHIVED)

    assert unarchived["reason"] == "it is not archived: `outbox-spark archive` does that"
    assert incomplete["reason"] == ("it has 3 rows and 2 are archived: `outbox-spark archive --again` does that again")
    assert kept == {OLD}
    assert (dropped["event"], dropped["rows"]) == ("retention.dropped", 3)


async def test_a_replay_keeps_an_archived_day(days: Days, database: DatabaseSettings) -> None:
    days.add(OLD, 3)
    days.run(
        "INSERT INTO outbox.archived_day (day, rows, checksum, path) "
        f"VALUES ((now() AT TIME ZONE 'UTC')::date - {OLD}, 3, 0, 'archive')"
    )
    order_replay(Tables(days.connection, "outbox"), SentSelection())

    (postponed,) = await round_of(database, kind=SENT_AND_ARCHIVED)

    assert "replay 1 needs it" in postponed["reason"]
