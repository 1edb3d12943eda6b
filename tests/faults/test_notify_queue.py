"""The queue of NOTIFY, which all applications of a server share: no writer fails because a listener reads nothing."""

from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import psycopg
import pytest

from relay.operate.doctor.finding import Verdict
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from tests.doctor.findings import at, look, verdicts
from tests.engine.conftest import Outbox
from tests.faults.victim import relay_victim
from tests.support.eventually import eventually

SMALL = {"max_notify_queue_pages": "64"}  # 512 KB; servers before release 17 have 8 GB
ASLEEP = "SELECT pg_advisory_lock_shared(hashtextextended('outbox.doorbell', 0))"
RINGS = """
    DO $$ BEGIN FOR n IN 1..10000 LOOP
        INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1');
        COMMIT;
    END LOOP; END $$
"""
LONG_RINGS = """
    DO $$ BEGIN FOR n IN 1..1000 LOOP PERFORM pg_notify('outbox.doorbell', repeat('x', 7000)); COMMIT; END LOOP; END $$
"""
FILL = "DO $$ BEGIN FOR n IN 1..{times} LOOP PERFORM pg_notify('reports', repeat('x', 7000)); COMMIT; END LOOP; END $$"
USAGE = "SELECT pg_notification_queue_usage()"
HAS_SESSION = """
    SELECT FROM pg_stat_activity WHERE application_name = 'outbox-relay' AND datname = current_database()
"""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of this test alone, whose queue of NOTIFY is full soon."""
    with PostgresServer(settings=SMALL) as started:
        yield started


def usage(connection: psycopg.Connection) -> float:
    (share,) = connection.execute(USAGE).fetchone() or (0,)
    return float(share)


def test_no_writer_fails_while_another_application_s_listener_fills_the_queue(server: PostgresServer) -> None:
    """Each of 10,000 transactions would ring: 360 KB of a queue that is half full, and has 512 KB."""
    settings = at(server.create_database("shop"))
    url = settings.database.url.get_secret_value()
    migrate(settings.database)
    with (
        psycopg.connect(url, autocommit=True) as listener,
        psycopg.connect(url, autocommit=True) as relay,
        psycopg.connect(url, autocommit=True) as writer,
    ):
        listener.execute("LISTEN reports")
        listener.execute("BEGIN")
        listener.execute("SELECT 1")
        relay.execute(ASLEEP)
        before = verdicts(settings, "database.notifications")
        writer.execute(FILL.format(times=10).encode())
        (grows,) = look(settings, "database.notifications")
        writer.execute(FILL.format(times=24).encode())

        writer.execute(RINGS)

        (full,) = look(settings, "database.notifications")
        listener.execute("ROLLBACK")
        assert (before, grows.verdict, full.verdict) == ([Verdict.OK], Verdict.WARNING, Verdict.WARNING)
        assert "reads nothing" in grows.words
        assert "writers do not ring" in full.words
        assert writer.execute("SELECT count(*) FROM outbox.message_pending").fetchone() == (10_000,)


@pytest.mark.drills
async def test_a_frozen_relay_keeps_no_queue(
    database_url: str, broker_url: str, outbox: Outbox, tmp_path: Path
) -> None:
    """A sleeping relay is frozen while writers ring; the server ends its session, and no writer fails."""
    with psycopg.connect(database_url, autocommit=True) as writer:
        victim = relay_victim(database_url, broker_url, tmp_path)
        await victim.start()
        await eventually(outbox.has_sleeping_relay, "it listens, and asks writers to ring")
        victim.tell(SIGSTOP)
        try:

            def is_ended() -> bool:
                writer.execute(LONG_RINGS)
                return writer.execute(HAS_SESSION).rowcount == 0

            await eventually(is_ended, "the server has ended its session", 120)
            await eventually(lambda: usage(writer) == 0, "the queue is empty")
        finally:
            victim.stop(SIGKILL)
