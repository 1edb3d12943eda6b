"""Segments of the log are made, cut, counted, emptied and dropped; what is not sent stays, and is told."""

from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings
from relay.doctor.tables import log_covered
from relay.http.backlog import Backlog
from relay.retention.kind import LOG, LOG_AND_ARCHIVED, SENT
from relay.retention.segments import look_after_segments
from tests.engine.retention.conftest import KEEP, OLD, round_of
from tests.support.days import Days
from tests.support.eventually import eventually
from tests.support.log import IDS, mark, note_checkpoint, use_log

pytestmark = pytest.mark.every_postgres

Connection = psycopg.Connection[Any]
INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1' FROM generate_series(1, %s) AS n
"""
CUT = "SELECT outbox.cut_segment()"
NUMBERS = "SELECT array_agg(number ORDER BY number) FROM outbox.segment WHERE number > 0"
AGED = "UPDATE outbox.segment SET {} = now() - %s * interval '1 day' WHERE number > 0"


@pytest.fixture
def log(days: Days) -> Connection:
    use_log(days.connection)
    return days.connection


def old_segment(log: Connection, rows: int = 3, *, ago: int = OLD, unsent: int = 0) -> None:
    """Write rows, send them so many days ago, and cut their segment on that day."""
    log.execute(INSERT, [rows])
    mark(log, hours_ago=24 * ago)
    if unsent:
        log.execute(INSERT, [unsent])
    log.execute(CUT)
    log.execute("UPDATE outbox.segment SET cut_at = now() - %s * interval '1 day' WHERE cut_at IS NOT NULL", [ago])


def numbers(log: Connection) -> list[int]:
    (found,) = log.execute(NUMBERS).fetchone() or ([],)
    return list(found or [])


async def look(database: DatabaseSettings) -> list[Any]:
    """Look after the segments once; return the events."""
    with capture_logs() as events:
        await look_after_segments(database, ahead=2, ids=IDS)
    return events


async def test_an_old_segment_is_emptied_and_dropped(log: Connection, database: DatabaseSettings) -> None:
    old_segment(log)

    (event,) = await round_of(database, kind=LOG)

    assert (event["event"], event["table"], event["rows"]) == ("retention.dropped", "message_log_1", 3)
    assert event["bytes"] > 0
    assert log.execute("SELECT count(*) FROM outbox.message").fetchone() == (0,)
    assert 1 not in numbers(log)
    assert await round_of(database, kind=LOG) == []


@pytest.mark.parametrize("ago", [0, KEEP])
async def test_a_segment_stays_as_long_as_its_rows_are_kept(
    log: Connection, database: DatabaseSettings, ago: int
) -> None:
    old_segment(log, ago=ago)

    assert await round_of(database, kind=LOG) == []
    assert log.execute("SELECT count(*) FROM outbox.message").fetchone() == (3,)


async def test_a_segment_that_was_sent_long_after_it_was_cut_stays(log: Connection, database: DatabaseSettings) -> None:
    old_segment(log)
    log.execute(INSERT, [1])
    log.execute("UPDATE outbox.receipt SET sent_at = now() - interval '1 day'")

    assert await round_of(database, kind=LOG) == []


async def test_a_row_that_is_not_sent_keeps_its_segment(log: Connection, database: DatabaseSettings) -> None:
    old_segment(log, unsent=1)

    (event,) = await round_of(database, kind=LOG)

    assert (event["event"], event["table"]) == ("retention.postponed", "message_log_1")
    assert event["reason"] == "1 of its rows have no receipt: the relay has not sent them"


async def test_an_archive_is_waited_for(log: Connection, database: DatabaseSettings) -> None:
    old_segment(log)

    (event,) = await round_of(database, kind=LOG_AND_ARCHIVED)

    assert event["event"] == "retention.postponed"
    assert "it is not archived" in event["reason"]


async def test_late_rows_of_dropped_segments_leave_once_they_are_old(
    log: Connection, database: DatabaseSettings
) -> None:
    old_segment(log)
    await round_of(database, kind=LOG)
    log.execute("INSERT INTO outbox.message (id, aggregate_type, event_type, payload) VALUES (2, 'a', 'e', '1')")
    mark(log, hours_ago=24 * OLD)

    (event,) = await round_of(database, kind=LOG)

    assert (event["table"], event["rows"]) == ("message_log_0", 1)
    assert await round_of(database, kind=LOG) == []


async def test_a_day_and_the_segments_of_its_rows_leave_together(
    log: Connection, days: Days, database: DatabaseSettings
) -> None:
    """An archive has the rows of both, and whichever leaves first, the other may leave as well."""
    days.add(OLD, 0)
    log.execute("""
        INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)
        SELECT 'a', 'e', '1', 'sent', (now() AT TIME ZONE 'UTC' - interval '15 days')::date + interval '12 hours'
        FROM generate_series(1, 2)
    """)
    old_segment(log)
    log.execute("UPDATE outbox.receipt SET sent_at = (now() AT TIME ZONE 'UTC' - interval '15 days')::date")
    log.execute("""
        INSERT INTO outbox.archived_day (day, rows, checksum, path)
        SELECT (now() AT TIME ZONE 'UTC' - interval '15 days')::date, 5, 0, 'archive'
    """)
    log.execute("SELECT 1 FROM outbox.drop_sent_day((now() AT TIME ZONE 'UTC')::date - 15, true, false)")

    assert days.past() == set()
    assert log.execute("SELECT emptied FROM outbox.archived_day").fetchone() == (2,)
    (event,) = await round_of(database, kind=LOG_AND_ARCHIVED)
    assert (event["event"], event["rows"]) == ("retention.dropped", 3)


async def test_a_day_whose_rows_are_in_the_log_is_not_complete_without_them(
    log: Connection, days: Days, database: DatabaseSettings
) -> None:
    days.add(OLD, 2)
    old_segment(log)
    log.execute("UPDATE outbox.receipt SET sent_at = (now() AT TIME ZONE 'UTC' - interval '15 days')::date")
    log.execute("""
        INSERT INTO outbox.archived_day (day, rows, checksum, path)
        SELECT (now() AT TIME ZONE 'UTC' - interval '15 days')::date, 2, 0, 'archive'
    """)

    told = log.execute("SELECT kept_by FROM outbox.drop_sent_day((now() AT TIME ZONE 'UTC')::date - 15, true, true)")

    assert "it has 5 rows and 2 are archived" in str(told.fetchone())
    assert [event["event"] for event in await round_of(database, kind=SENT)] == ["retention.dropped"]


async def test_nothing_is_made_while_the_log_is_not_used(days: Days, database: DatabaseSettings) -> None:
    assert await look(database) == []
    assert numbers(days.connection) == []


async def test_segments_are_made_ahead(log: Connection, database: DatabaseSettings) -> None:
    log.execute(INSERT, [2 * IDS + 10])

    await look(database)

    ahead = "SELECT count(*) FROM outbox.segment WHERE first > (SELECT last_value FROM outbox.message_id_seq)"
    assert log.execute(ahead).fetchone() == (2,)
    assert log.execute("SELECT count(*) FROM outbox.message_log_far").fetchone() == (0,)


@pytest.mark.parametrize(
    ("rows", "made", "cut", "is_cut"), [(5, 1, 2, True), (5, 0, 2, False), (5, 1, 0, False), (0, 1, 2, False)]
)
async def test_the_segment_of_yesterday_is_cut_once(
    log: Connection, database: DatabaseSettings, rows: int, made: int, cut: int, is_cut: bool
) -> None:
    """It was made and no other has ended today; an empty one stays."""
    log.execute(INSERT, [1])
    log.execute(CUT)
    log.execute(INSERT, [rows])
    log.execute(AGED.format("made_at").encode(), [made])
    log.execute("UPDATE outbox.segment SET cut_at = now() - %s * interval '1 day' WHERE cut_at IS NOT NULL", [cut])

    for _ in range(2):
        await look(database)

    (position,) = log.execute("SELECT last_value FROM outbox.message_id_seq").fetchone() or (0,)
    assert position == (2 * IDS if is_cut else IDS + rows)


async def test_rows_that_the_relay_has_passed_and_not_sent_are_an_alarm(
    log: Connection, database: DatabaseSettings, settings: Any
) -> None:
    log.execute(INSERT, [10])
    mark(log, up_to=7)
    log.execute(CUT)
    log.execute(INSERT, [1])
    note_checkpoint(log)

    events = await look(database)

    assert [(each["event"], each["log_level"], each["segment"], each["rows"]) for each in events] == [
        ("segment.uncovered", "error", 1, 3)
    ]
    counting = Backlog(database)

    async def is_counted() -> bool:  # a caller waits for an answer for two seconds only, and a first one takes longer
        counts = await counting.counts()
        return counts is not None and counts.uncovered == 3

    await eventually(is_counted, "three rows are counted")
    await counting.close()
    (finding,) = log_covered(log, settings)
    assert finding.verdict == "failed"
    assert "no receipt names 3 rows" in finding.words
    assert await look(database) == []  # told once an hour
    mark(log)
    log.execute("UPDATE outbox.segment SET counted_at = now() - interval '2 hours'")
    assert await look(database) == []
    (finding,) = log_covered(log, settings)
    assert finding.verdict == "ok"


@pytest.mark.parametrize("why", ["above the checkpoint", "unseen", "no checkpoint", "another cluster"])
async def test_rows_that_are_still_to_be_read_are_no_alarm(
    log: Connection, database: DatabaseSettings, database_url: str, why: str
) -> None:
    with psycopg.connect(database_url) as late:
        log.execute(INSERT, [10])
        mark(log)
        late.execute(INSERT, [2])
        if why == "unseen":
            log.execute("SELECT pg_current_xact_id()")
            log.execute(CUT)
            note_checkpoint(log)
        late.commit()
    log.execute(CUT)
    if why == "above the checkpoint":
        note_checkpoint(log, 10)
    elif why == "another cluster":
        note_checkpoint(log)
        log.execute("UPDATE outbox.checkpoint SET cluster = 1")
    log.execute("UPDATE outbox.segment SET cut_at = now() - interval '1 hour' WHERE cut_at IS NOT NULL")

    assert await look(database) == []
    assert log.execute("SELECT uncovered FROM outbox.segment WHERE number = 1").fetchone() == (0,)
