"""Old days of the inbox are dropped as those of sent rows are, and never made again."""

import asyncio

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, Settings
from relay.retention import rounds
from relay.retention.kind import INBOX, SENT
from relay.retention.rounds import drop_old_days, keep_days
from tests.engine.retention.conftest import lock_is_free
from tests.support.days import Days, InboxDays
from tests.support.eventually import eventually
from tests.support.publication import publish_all

pytestmark = pytest.mark.every_postgres

KEEP = 30  # days
OLD = KEEP + 1  # days ago: it ended KEEP days ago
REMEMBERED = "SELECT (now() AT TIME ZONE 'UTC')::date - since FROM outbox.inbox_memory"
UNDATED = "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day) VALUES ('c', %s, '1970-01-01')"
COUNT = "SELECT count(*) FROM outbox.processed_message"


@pytest.fixture
def inbox(database_url: str) -> InboxDays:
    return InboxDays(database_url)


async def test_days_are_dropped_under_a_publication_of_all_tables(
    inbox: InboxDays, database: DatabaseSettings, database_url: str
) -> None:
    sent = Days(database_url)
    with inbox.connection, sent.connection:
        inbox.add(OLD, 3)
        sent.add(OLD, 3)
        inbox.connection.execute(publish_all(inbox.connection.info.server_version))

        await drop_old_days(database, {INBOX: KEEP, SENT: KEEP})

        assert (inbox.past(), sent.past()) == (set(), set())


async def test_days_older_than_is_remembered_are_dropped_and_are_not_made_again(
    inbox: InboxDays, database: DatabaseSettings
) -> None:
    with inbox.connection:
        for ago, rows in ((OLD, 3), (OLD + 5, 2), (KEEP, 4)):
            inbox.add(ago, rows)
        inbox.connection.execute(UNDATED, ["2a3b4c5d-0000-4000-8000-000000000000"])

        with capture_logs() as events:
            await drop_old_days(database, {INBOX: KEEP})

        assert [(each["event"], each["table"], each["rows"]) for each in events] == [
            ("retention.dropped", "processed_message", 2),
            ("retention.dropped", "processed_message", 3),
        ]
        assert inbox.past() == {KEEP}
        assert inbox.value(COUNT) == 5
        assert inbox.value(REMEMBERED) == KEEP
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            inbox.add(OLD, 1)


async def test_memory_never_grows_again(inbox: InboxDays, database: DatabaseSettings) -> None:
    with inbox.connection:
        inbox.add(OLD + 5, 1)  # it was made before the inbox forgot what came later
        inbox.run(f"UPDATE outbox.inbox_memory SET since = (now() AT TIME ZONE 'UTC')::date - {KEEP}")

        await drop_old_days(database, {INBOX: KEEP})

        assert (inbox.past(), inbox.value(REMEMBERED)) == (set(), KEEP)


async def test_what_is_postponed_is_remembered_until_it_is_dropped(
    inbox: InboxDays, database_url: str, database: DatabaseSettings
) -> None:
    with inbox.connection, psycopg.connect(database_url, application_name="report") as reader:
        inbox.add(OLD, 3)
        reader.execute(COUNT)

        with capture_logs() as events:
            await drop_old_days(database, {INBOX: KEEP})
        remembered, past = inbox.value(REMEMBERED), inbox.past()
        reader.rollback()
        await lock_is_free(inbox)
        await drop_old_days(database, {INBOX: KEEP})

        (event,) = events
        assert (event["event"], event["table"]) == ("retention.postponed", "processed_message")
        assert f"session {reader.info.backend_pid} (report)" in event["reason"]
        assert (past, inbox.past()) == ({OLD}, set())
        assert remembered != KEEP
        assert inbox.value(REMEMBERED) == KEEP


async def test_a_running_node_drops_both_by_their_settings(
    inbox: InboxDays, database_url: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FIRST_AFTER", 0)
    sent = Days(database_url)
    with inbox.connection, sent.connection:
        for ago in (15, 31):
            sent.add(ago, 1)
            inbox.add(ago, 1)

        dropping = asyncio.create_task(keep_days(settings))
        await eventually(lambda: inbox.past() == {15}, "the inbox is at its 30 days")
        dropping.cancel()

        assert sent.past() == set()


async def test_the_days_of_one_table_say_nothing_of_the_other(
    inbox: InboxDays, database_url: str, database: DatabaseSettings
) -> None:
    sent = Days(database_url)
    with inbox.connection, sent.connection:
        sent.add(OLD, 1)
        inbox.add(OLD, 1)

        await drop_old_days(database, {SENT: KEEP})

        assert (sent.past(), inbox.past()) == (set(), {OLD})
