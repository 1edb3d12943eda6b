"""What `/metrics` serves is what docs/metrics.md says, and true."""

import re
import secrets

import aio_pika
import psycopg
import pytest
from aiormq.exceptions import ConnectionClosed
from prometheus_client.parser import text_string_to_metric_families
from psycopg.sql import SQL, Identifier
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay import __version__
from relay.config.settings import DatabaseSettings, RelaySettings, Settings
from relay.consume.classify import FailureReason
from relay.engine.row import Outcome
from relay.operate.batches import IS_UNFINISHED, number_of
from relay.operate.status import BY_INDEX
from relay.probes import cached_answer
from relay.probes.backlog import COUNT_RECENT, COUNT_UNFINISHED, Backlog, Batches, Counts
from relay.servers.postgres import database
from relay.servers.rabbitmq import connection as broker
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.http.conftest import RunSite
from tests.http.metrics import DOCUMENT, documented, served
from tests.http.site import Site
from tests.operate.rows import Rows
from tests.support.days import ADD_DAY
from tests.support.eventually import eventually
from tests.support.roles import granted_roles

BATCHES = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts, committed_at)
    SELECT name, version, piece, 4, gen_random_uuid(), counts::jsonb, now() - age * interval '1 hour'
    FROM (VALUES ('a', 7, -2, 8, '{}'), ('a', 7, 0, 1, '{}'), ('b', 8, -2, 6, '{}'), ('b', 8, 1, 5, '{}'),
        ('c', 9, -2, 9, '{}'), ('d', 3, -2, 9, '{}'), ('d', 3, -1, 8, '{"rows": 5}'),
        ('e', 1, -1, 0, '{"rows": 10, "seconds": 7, "repeats": 2}'), ('e', 2, -1, 0, '{"rows": 1e900, "repeats": -5}'),
        ('e', 3, -1, 0, '{"rows": "many", "seconds": [1]}')) AS made (name, version, piece, age, counts);
    UPDATE outbox.batch SET given_up_at = now() WHERE app_id = 'c'
"""
MANY_BATCHES = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts, committed_at)
    SELECT 'a', n, piece, 1, gen_random_uuid(), '{"rows": 5}', now() - interval '9 days'
    FROM generate_series(1, 50000) AS n, unnest('{-1, -2}'::int[]) AS piece
"""


@pytest.fixture
async def queue(broker_url: str) -> None:
    """A queue that takes what goes to the default exchange with an invoice's key."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("outbox", aio_pika.ExchangeType.TOPIC, durable=True)
        events = await channel.declare_queue("events", durable=True)
        await events.bind(exchange, "invoice.*")


async def test_the_documented_list_is_what_is_served(run_site: RunSite) -> None:
    async with run_site() as site:
        await eventually(site.is_ready, "ready")
        assert await served(site) == documented("Metrics")


@pytest.mark.usefixtures("queue")
async def test_what_became_of_the_rows_is_counted(rows: Rows, run_site: RunSite) -> None:
    for key in range(30):
        rows.pending(str(key))
    rows.pending("lost", aggregate_type="nobody")
    rows.pending("lost", aggregate_type="nobody")

    async with run_site(max_attempts=2) as site:
        await eventually(site.is_ready, "ready")
        await eventually(lambda: "pending" not in {state for state, _ in rows.states().values()}, "all is settled")
        metrics = await site.metrics()

    assert metrics["outbox_published_total", ()] == 30
    assert metrics["outbox_publish_failures_total", (("reason", "returned"),)] >= 1  # probes of its route count as well
    assert metrics["outbox_publish_failures_total", (("reason", "nacked"),)] == 0
    assert metrics["outbox_returned_total", ()] == metrics["outbox_publish_failures_total", (("reason", "returned"),)]
    assert metrics["outbox_in_flight_messages", ()] in (0, 1)  # a probe of the route may be under way
    assert metrics["outbox_lanes_held", ()] == 16
    assert metrics["outbox_quarantined_routes", ()] == 1
    assert metrics["outbox_stalled", ()] == 0
    assert metrics["outbox_sweep_finds_total", ()] == 0
    assert metrics["outbox_ready", ()] == 1
    assert metrics["outbox_build_info", (("version", __version__),)] == 1
    assert metrics["process_resident_memory_bytes", ()] > 0


@pytest.mark.usefixtures("queue")
async def test_how_long_rows_took_is_counted_for_each_of_them(rows: Rows, run_site: RunSite) -> None:
    rows.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, created_at)"
        " SELECT 'invoice', n::text, 'Issued', '{}', now() - interval '90 s' FROM generate_series(1, 999) AS n"
    )

    async def are_counted(site: Site, number: int) -> bool:
        return (await site.metrics())["outbox_end_to_end_latency_seconds_count", ()] == number

    async with run_site() as site:
        await eventually(lambda: are_counted(site, 999), "all are counted")
        metrics = await site.metrics()
        rows.pending("alone")
        await eventually(lambda: are_counted(site, 1000), "it is counted")
        with_one_more = await site.metrics()

    assert metrics["outbox_publish_duration_seconds_count", ()] == 999
    assert 0 < metrics["outbox_publish_duration_seconds_sum", ()] < 999 * 30
    assert metrics["outbox_end_to_end_latency_seconds_count", ()] == 999
    assert metrics["outbox_end_to_end_latency_seconds_bucket", (("le", "60"),)] == 0
    assert metrics["outbox_end_to_end_latency_seconds_bucket", (("le", "300"),)] == 999
    assert with_one_more["outbox_publish_duration_seconds_count", ()] == 1000
    assert with_one_more["outbox_end_to_end_latency_seconds_count", ()] == 1000


async def test_lost_connections_are_counted_by_end_and_reason(
    settings: Settings, postgres: PostgresServer, rabbitmq: RabbitServer, run_site: RunSite
) -> None:
    vhost = settings.broker.url.get_secret_value().rpartition("/")[2]
    async with run_site() as site:
        await eventually(site.is_ready, "ready")
        before = await site.metrics()

        with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'outbox-relay' AND datname = %s",
                [settings.database.url.get_secret_value().rpartition("/")[2]],
            )
        await eventually(lambda: has_lost(site, end="database", reason="admin_shutdown"), "the session counts")
        rabbitmq.ctl("close_all_connections", "--vhost", vhost, "the drill")
        await eventually(lambda: has_lost(site, end="broker"), "the connection counts")
        await eventually(site.is_ready, "ready again")

    assert before["outbox_reconnects_total", (("end", "database"), ("reason", "lost"))] == 0
    assert before["outbox_reconnects_total", (("end", "broker"), ("reason", "lost"))] == 0


async def test_what_waits_in_the_table_is_counted(rows: Rows, database: DatabaseSettings) -> None:
    rows.pending("1", available_at="2020-01-01T00:00:00Z")
    rows.pending("2")
    head = rows.parked("3")
    rows.parked("3", behind=head)
    counting = Backlog(database, RelaySettings())

    counts = await counting.counts()

    await counting.close()
    assert counts is not None
    assert (counts.pending, counts.parked, counts.parked_held) == (2, 2, 1)
    assert counts.oldest_pending_age > 100_000_000


async def test_an_empty_table_has_no_age(database: DatabaseSettings) -> None:
    counting = Backlog(database, RelaySettings())

    counts = await counting.counts()

    await counting.close()
    assert counts is not None
    assert counts == Counts(
        pending=0,
        oldest_pending_age=0.0,
        parked=0,
        parked_held=0,
        quarantined_routes=0,
        paused_routes=0,
        paused_lanes=0,
        quarantined=0,
        overdue_days={"message_sent": 0, "processed_message": 0},
        batches=Batches(0, 0.0, 0.0, 0, 0.0, 0.0, 0.0),
        unarchived_days=0,
    )


async def test_batches_of_spark_are_counted_and_any_numbers_are_bounded(rows: Rows, database: DatabaseSettings) -> None:
    rows.connection.execute(BATCHES)
    counting = Backlog(database, RelaySettings())

    counts = await counting.counts()

    await counting.close()
    assert counts is not None
    assert counts.batches.unfinished == 2  # neither what was given up nor what is committed
    assert counts.batches.oldest_age == pytest.approx(8 * 3600, abs=300)
    assert counts.batches.longest_idle == pytest.approx(5 * 3600, abs=300)
    assert counts.batches.recent == 3
    assert (counts.batches.recent_rows, counts.batches.recent_seconds) == (1e15 + 10, 7)
    assert counts.batches.recent_repeats == 2


async def test_batches_are_counted_by_their_indexes(rows: Rows) -> None:
    """50,000 that are committed long ago, and of which the statistics know nothing."""
    rows.connection.execute("ALTER TABLE outbox.batch SET (autovacuum_enabled = off); ANALYZE outbox.batch")
    rows.connection.execute(MANY_BATCHES)
    names = {each: number_of("batch", each) for each in ("rows", "seconds", "repeats")}
    schema = Identifier("outbox")

    with rows.connection.transaction():
        rows.connection.execute(BY_INDEX)
        for statement in (COUNT_UNFINISHED, COUNT_RECENT):
            filled = statement.format(schema=schema, is_unfinished=SQL(IS_UNFINISHED).format(schema=schema), **names)
            plan = "\n".join(line for (line,) in rows.connection.execute(SQL("EXPLAIN {}").format(filled)))
            assert "Seq Scan" not in plan, plan
            assert re.search(r"batch_(begun|committed)", plan), plan


async def test_days_that_should_be_gone_or_archived_are_counted(rows: Rows, database: DatabaseSettings) -> None:
    add_old_days(rows.connection, [1, 2, 20, 21])
    rows.connection.execute(
        "INSERT INTO outbox.archived_day (day, rows, checksum, path) SELECT current_date - 20, 0, 0, '/archive'"
    )
    counting = Backlog(database, RelaySettings(retention="10 days"))
    keeping = Backlog(database, RelaySettings(retention="off"))

    counts, kept = await counting.counts(), await keeping.counts()

    await counting.close()
    await keeping.close()
    assert counts is not None
    assert counts.overdue_days == {"message_sent": 2, "processed_message": 0}
    assert counts.unarchived_days == 3
    assert kept is not None
    assert kept.overdue_days["message_sent"] == 0


async def test_days_are_not_behind_where_no_archive_is_in_use(rows: Rows, database: DatabaseSettings) -> None:
    add_old_days(rows.connection, [1, 2])
    counting = Backlog(database, RelaySettings())
    waiting = Backlog(database, RelaySettings(retention_waits_for_archive=True))

    counts, waited = await counting.counts(), await waiting.counts()

    await counting.close()
    await waiting.close()
    assert counts is not None
    assert waited is not None
    assert (counts.unarchived_days, waited.unarchived_days) == (0, 2)


async def test_a_relay_with_the_rights_of_an_earlier_release_counts_all_but_the_archive(
    rows: Rows, database: DatabaseSettings, postgres: PostgresServer
) -> None:
    name = f"relay_{secrets.token_hex(4)}"
    url = postgres.url(database.url.get_secret_value().rpartition("/")[2], user=name, password=name)
    login = DatabaseSettings(url=SecretStr(url))
    rows.pending()
    with granted_roles(rows.connection, name):
        rows.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{name}'; GRANT outbox_relay TO {name}".encode())
        counting = Backlog(login, RelaySettings())
        counts = await counting.counts()
        await counting.close()
        rows.connection.execute("REVOKE SELECT ON outbox.archived_day FROM outbox_relay")
        earlier = Backlog(login, RelaySettings())
        fewer = await earlier.counts()
        await earlier.close()

    assert counts is not None
    assert (counts.pending, counts.unarchived_days) == (1, 0)
    assert fewer is not None
    assert (fewer.pending, fewer.unarchived_days) == (1, None)


async def test_many_scrapes_count_once(rows: Rows, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_answer, "FRESH_FOR", 3600.0)
    counting = Backlog(database, RelaySettings())
    first = await counting.counts()
    rows.pending()

    again = await counting.counts()
    monkeypatch.setattr(counting._seldom, "_due_at", 0.0)
    later = await counting.counts()

    await counting.close()
    assert first is again
    assert later is not None
    assert later.pending == 1


async def test_a_scrape_does_not_wait_for_a_slow_count(
    rows: Rows, run_site: RunSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_answer, "PATIENCE", 0.1)
    async with run_site() as site:
        await eventually(site.is_ready, "ready")
        with rows.connection.transaction():
            rows.connection.execute("LOCK TABLE outbox.message IN ACCESS EXCLUSIVE MODE")
            slow = await site.metrics()
        monkeypatch.setattr(cached_answer, "PATIENCE", 20.0)
        quick = await site.metrics()

    assert ("outbox_in_flight_messages", ()) in slow
    assert ("outbox_pending_messages", ()) not in slow
    assert quick["outbox_pending_messages", ()] == 0


async def test_a_count_that_fails_is_told_once_and_leaves_no_number(
    rows: Rows, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_answer, "FRESH_FOR", 0.0)
    monkeypatch.setattr(cached_answer, "SHARE", 0)
    counting = Backlog(database, RelaySettings())
    assert await counting.counts() is not None
    rows.connection.execute("ALTER VIEW outbox.message_count RENAME TO elsewhere")

    with capture_logs() as told:
        failed = [await counting.counts() for _ in range(3)]
    rows.connection.execute("ALTER VIEW outbox.elsewhere RENAME TO message_count")
    healed = await counting.counts()

    await counting.close()
    assert failed == [None] * 3
    assert healed is not None
    assert [event["event"] for event in told] == ["backlog.not_counted"]


def test_every_value_of_reason_is_documented() -> None:
    (text,) = (each for each in DOCUMENT.read_text().split("\n## ") if each.startswith("Values of `reason`\n"))
    told = {
        re.findall(r"\w+", heading)[-1]: set(re.findall(r"`(\w+)`", items))
        for heading, items in re.findall(r"^(\S.*):\n\n((?:[- ] .*\n)+)", text, re.MULTILINE)
    }

    assert told == {
        "outbox_publish_failures_total": set(Outcome) - {Outcome.CONFIRMED},
        "outbox_consumer_dead_letters_total": set(FailureReason),
        "ends": {broker.LOST, broker.SILENT, broker.OTHER},
        "broker": broker.ENDS,
        "database": database.LOSSES,
    }
    assert {database.LOST, database.SILENT, database.OTHER} == told["ends"]
    labelled = set(re.findall(r"^- `(\w+)\{[^}]*reason[^}]*\}`", DOCUMENT.read_text(), re.MULTILINE))
    assert labelled == {name for name in re.findall(r"\w+", text) if name.startswith("outbox_")}


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ConnectionClosed(320, "CONNECTION_FORCED - bye"), "connection_forced"),
        (ConnectionClosed(541, "WORD_OF-A:STRANGER 1"), "other"),
        (ConnectionClosed(200, ""), "other"),
        (TimeoutError(), "silent"),
        (OSError(), "lost"),
    ],
)
def test_the_broker_s_end_is_one_of_the_documented_words(end: Exception, kind: str) -> None:
    assert broker.kind_of_end(end) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.errors.AdminShutdown(), "admin_shutdown"),
        (psycopg.errors.DivisionByZero(), "other"),
        (TimeoutError(), "silent"),
        (psycopg.OperationalError(), "lost"),
    ],
)
def test_a_lost_session_is_one_of_the_documented_words(error: Exception, kind: str) -> None:
    assert database.kind_of_loss(error) == kind


async def test_openmetrics_is_served_to_who_asks_for_it(run_site: RunSite) -> None:
    async with run_site() as site:
        usual = await site.get("/metrics")
        openmetrics = await site.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")

    assert usual.content_type.startswith("text/plain; version=0.0.4")
    assert list(text_string_to_metric_families(usual.body))
    assert openmetrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.body.endswith("# EOF\n")


async def has_lost(site: Site, **labels: str) -> bool:
    metrics = await site.metrics()
    return any(
        name == "outbox_reconnects_total" and number == 1 and labels.items() <= dict(of).items()
        for (name, of), number in metrics.items()
    )


def add_old_days(connection: psycopg.Connection, ages: list[int]) -> None:
    """Make empty days of sent rows, so many days before today."""
    for ago in ages:
        connection.execute(ADD_DAY, {"ago": ago})
