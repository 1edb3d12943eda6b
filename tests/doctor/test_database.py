"""What the checks of the database say with a fault there, and without it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from relay.config.settings import HttpSettings, Settings
from relay.engine.read.floors import IDENTIFY
from relay.operate import holders
from relay.operate.doctor import database as part
from relay.operate.doctor import server
from relay.operate.doctor.finding import Finding
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.doctor.findings import FAILED, OK, SKIPPED, WARNING, at, look, operator, verdicts
from tests.support import pgbouncer
from tests.support.pgbouncer import PgBouncer, PoolMode

BACKLOG = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload)
    SELECT 'a', 'e', '1' FROM generate_series(1, 100001);
    DELETE FROM outbox.message_pending;
    SELECT pg_stat_force_next_flush()
"""
BATCHES = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts, committed_at)
    SELECT name, version, piece, 4, gen_random_uuid(), '{"rows": 5}', now() - age * interval '1 hour'
    FROM (VALUES ('runs', 7, -2, 9), ('runs', 7, 0, 0), ('left', 8, -2, 9), ('left', 8, 1, 5), ('done', 9, -2, 9),
        ('done', 9, 0, 9), ('done', 9, -1, 8), ('given', 3, -2, 9)) AS made (name, version, piece, age);
    UPDATE outbox.batch SET given_up_at = now() WHERE app_id = 'given'
"""
ROW_OF_7 = """
    INSERT INTO outbox.message (id, aggregate_type, event_type, payload, state, sent_at)
    VALUES (7, 'a', 'e', '1', '{state}', now())
"""
HERE = IDENTIFY.as_bytes()


@pytest.fixture(scope="module")
def own() -> Iterator[Settings]:
    """The database of a server for this file alone: as durable as for real work, small, and without autovacuum."""
    small = {"max_connections": "10", "superuser_reserved_connections": "3", "autovacuum": "off"}
    with PostgresServer(durable=True, settings=small) as started:
        settings = at(started.admin_url)
        migrate(settings.database)
        yield settings


def with_options(settings: Settings, options: str) -> Settings:
    """Return the settings with a URL whose sessions have these settings of PostgreSQL."""
    url = settings.database.url.get_secret_value()
    return at(f"{url}?options={options.replace('=', '%3D').replace(' ', '%20')}")


def test_version(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(settings, "database.version") == [OK]

    monkeypatch.setattr(server, "NEWEST_SERVER", 12)
    (newer,) = look(settings, "database.version")
    assert (newer.verdict, newer.words.endswith(": newer than 12, the newest that the tests run on")) == (OK, True)

    monkeypatch.setattr(server, "NEWEST_SERVER", 99)
    monkeypatch.setattr(server, "OLDEST_SERVER", 99)
    (finding,) = look(settings, "database.version")

    assert (finding.verdict, finding.remedy) == (FAILED, "the relay needs PostgreSQL 99 or later")


@pytest.mark.parametrize(("version", "verdict"), [("0001", FAILED), ("9999", OK)])
def test_tables_of_another_version(settings: Settings, version: str, verdict: str) -> None:
    assert verdicts(settings, "database.tables") == [OK]

    with operator(settings) as connection:
        connection.execute("UPDATE outbox.migration SET version_num = %s", [version])
    (finding,) = look(settings, "database.tables")

    assert finding.verdict == verdict
    assert f"schema outbox is of version {version}" in finding.words


def test_floors_that_were_saved_above_all_messages(settings: Settings) -> None:
    assert verdicts(settings, "database.history") == [OK]

    with operator(settings) as connection:
        connection.execute(b"INSERT INTO outbox.lane_floor VALUES (3, 90, 100, '{}', '{}', now(), (%s))" % HERE)
    (finding,) = look(settings, "database.history")

    assert (finding.verdict, finding.words) == (FAILED, "the database went back from message 100 to 0")


@pytest.mark.parametrize("state", ["pending", "parked", "quarantined", "discarded", "archived", "sent"])
def test_a_sequence_below_the_highest_id(settings: Settings, state: str) -> None:
    """Logical replication has copied a row, and sets no sequence."""
    assert verdicts(settings, "database.sequences") == [OK]

    with operator(settings) as connection:
        connection.execute(ROW_OF_7.format(state=state).encode())
        (finding,) = look(settings, "database.sequences")
        connection.execute(finding.remedy.partition("then: ")[2].encode())

    words = "the sequence is below the highest id: outbox.message_id_seq has given 0, message has 7"
    assert (finding.verdict, finding.words) == (FAILED, words)
    assert verdicts(settings, "database.sequences") == [OK]


@pytest.mark.every_postgres
def test_other_sequences_that_are_behind(settings: Settings) -> None:
    """Ids that were given on the former server, and rolled back there, count as well."""
    with operator(settings) as connection:
        connection.execute("INSERT INTO outbox.lane_floor VALUES (3, 90, 100, '{}', '{}', now(), '7/5')")
        connection.execute("""
            INSERT INTO outbox.replay (id, made_by, filter) OVERRIDING SYSTEM VALUE VALUES (2, 'ada', '{}')
        """)
        found = look(settings, "database.sequences")

    assert [(each.verdict, each.words.partition(": ")[2]) for each in found] == [
        (FAILED, "outbox.message_id_seq has given 0, message has 100"),
        (FAILED, "outbox.replay_id_seq has given 0, job has 2"),
    ]
    assert verdicts(settings, "database.history") == [OK]


@pytest.mark.every_postgres
def test_days_that_are_missing(settings: Settings) -> None:
    assert verdicts(settings, "database.days") == [OK]

    with operator(settings) as connection:
        (name,) = connection.execute("""
            SELECT 'message_sent_' || to_char((now() AT TIME ZONE 'UTC')::date + 1, 'YYYYMMDD')
        """).fetchone() or ("",)
        connection.execute(f"DROP TABLE outbox.{name}".encode())
        (missing,) = look(settings, "database.days")
        connection.execute(f"CREATE TABLE outbox.{name} ()".encode())
        (in_the_way,) = look(settings, "database.days")

    assert (missing.verdict, in_the_way.verdict) == (WARNING, FAILED)
    assert missing.words.startswith(f"no partition {name};")
    assert in_the_way.words.startswith(f"{name} is no partition of message_sent")


@pytest.mark.every_postgres
@pytest.mark.parametrize("what", ["FOR ALL TABLES", "FOR TABLES IN SCHEMA outbox", "FOR TABLE outbox.message"])
def test_a_publication_that_keeps_rows_from_being_marked(settings: Settings, what: str) -> None:
    """An operator took an identity away, or the publication leaves out a part of it; the remedy mends both."""
    assert verdicts(settings, "database.publications") == [OK]

    with operator(settings) as connection:
        connection.execute(f"CREATE PUBLICATION inserts {what} WITH (publish = 'insert')".encode())
        connection.execute("ALTER TABLE outbox.message_pending REPLICA IDENTITY NOTHING")
        connection.execute(f"CREATE PUBLICATION changes {what}".encode())
        (finding,) = look(settings, "database.publications")
        _, _, identities = finding.remedy.partition("or: ")
        connection.execute(identities.encode())
        connection.execute("INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')")
        connection.execute("UPDATE outbox.message SET state = 'parked' WHERE state = 'pending'")
        is_18 = connection.info.server_version >= 180000

    assert finding.verdict == FAILED
    assert finding.words.startswith("publication changes has changes of outbox.message_pending, which have no usable ")
    identity = "ALTER TABLE outbox.message_pending REPLICA IDENTITY USING INDEX message_pending_lane_id"
    generated = "; ALTER PUBLICATION changes SET (publish_generated_columns = stored)"
    assert identities == identity + generated * is_18
    (right,) = look(settings, "database.publications")
    assert (right.verdict, right.words.partition(" changes of ")[0]) == (OK, "publication changes has")


@pytest.mark.parametrize("identity", ["USING INDEX message_pending_lane_id", "FULL"])
def test_an_identity_with_a_generated_column_that_a_publication_leaves_out(settings: Settings, identity: str) -> None:
    with operator(settings) as connection:
        if connection.info.server_version < 180000:
            pytest.skip("no publication of this server publishes a generated column")
        connection.execute(f"ALTER TABLE outbox.message_pending REPLICA IDENTITY {identity}".encode())
        connection.execute("CREATE PUBLICATION with_lane FOR ALL TABLES WITH (publish_generated_columns = stored)")
        connection.execute("INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')")
        connection.execute("DELETE FROM outbox.message_pending")
        assert verdicts(settings, "database.publications") == [OK]
        connection.execute("CREATE PUBLICATION without FOR ALL TABLES")
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            connection.execute("DELETE FROM outbox.message_pending")

    assert verdicts(settings, "database.publications") == [OK, FAILED]


def test_connections_that_are_taken(own: Settings) -> None:
    # Sessions that were closed just now may still be counted.
    wait_for(lambda: verdicts(own, "database.connections") == [OK], "enough are free", 20)

    words = "3 of 7 connections are free by max_connections; a relay with its operators uses 4"
    url = own.database.url.get_secret_value()
    with ExitStack() as taken:
        for _ in range(4):
            taken.enter_context(psycopg.connect(url))
        wait_for(lambda: look(own, "database.connections")[0].words == words, words, 20)
        assert verdicts(own, "database.connections") == [WARNING]


def test_a_limit_below_what_is_needed(settings: Settings) -> None:
    with operator(settings) as connection:
        (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
        connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 4".encode())
    metrics = settings.model_copy(update={"http": HttpSettings(listen="127.0.0.1:8080")})

    wait_for(lambda: verdicts(settings, "database.connections") == [OK], "the operator's session is gone", 20)
    (finding,) = look(metrics, "database.connections")

    assert (finding.verdict, finding.remedy) == (FAILED, "raise the database's CONNECTION LIMIT")


@pytest.mark.skipif(
    not pgbouncer.is_installed(),
    reason="PgBouncer is not installed; as root, `tests/support/packages test` installs it",
)
@pytest.mark.parametrize(("mode", "verdict"), [(PoolMode.SESSION, OK), (PoolMode.TRANSACTION, FAILED)])
def test_a_pooler(postgres: PostgresServer, settings: Settings, mode: PoolMode, verdict: str) -> None:
    assert verdicts(settings, "database.pooler") == [OK]

    with PgBouncer(postgres, mode) as pooler:
        found = list(part.examine_database(at(pooler.url(settings.database.url.get_secret_value()))))

    (finding,) = [each for each in found if each.check == "database.pooler"]
    assert finding.verdict == verdict
    assert ("pool_mode = session" in finding.remedy) is (verdict == FAILED)
    assert [each for each in found if each.check == "database.tables" and each.verdict == OK]


def test_an_old_snapshot(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with operator(settings) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        assert verdicts(settings, "database.snapshots") == [OK]

        monkeypatch.setattr(holders, "HELD_LONG", 0.0)
        (finding,) = look(settings, "database.snapshots")
        pid = connection.info.backend_pid

    assert finding.verdict == WARNING
    assert finding.words.startswith(f"session {pid} ")


def test_a_slot_that_nobody_reads(own: Settings) -> None:
    assert verdicts(own, "database.slots") == [OK]

    with operator(own) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('forgotten', true)")
        (finding,) = look(own, "database.slots")
        connection.execute("SELECT pg_drop_replication_slot('forgotten')")

    assert finding.verdict == WARNING
    assert finding.words.startswith("nobody reads replication slot forgotten, which keeps ")


def test_dead_rows_that_nobody_clears_away(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(settings, "database.vacuum") == [OK]
    monkeypatch.setattr(server, "VACUUMED_WITHIN", -1.0)  # autovacuum may come by, and finds them held

    with operator(settings) as holder, operator(settings) as connection, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        connection.execute(BACKLOG)
        (finding,) = look(settings, "database.vacuum")

    assert finding.verdict == WARNING
    assert finding.words.startswith("message_pending has 0 live and 100001 dead rows, ")


def test_autovacuum_that_is_off(settings: Settings, own: Settings) -> None:
    with operator(settings) as connection:
        connection.execute("ALTER TABLE outbox.message_pending SET (autovacuum_enabled = off)")
    (here,) = look(settings, "database.vacuum")
    (everywhere,) = look(own, "database.vacuum")

    assert (here.verdict, everywhere.verdict) == (WARNING, WARNING)
    assert here.remedy == "ALTER TABLE outbox.message_pending RESET (autovacuum_enabled)"
    assert everywhere.words.startswith("autovacuum is off;")


def test_old_transaction_ids(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(settings, "database.transaction_ids") == [OK]

    monkeypatch.setattr(server, "OLD_TRANSACTION_IDS", 1)

    assert verdicts(settings, "database.transaction_ids") == [WARNING]  # none left: tests/faults/test_wraparound.py


def test_durability(own: Settings, settings: Settings) -> None:
    assert verdicts(own, "database.durability") == [OK]

    risky = look(settings, "database.durability")  # the server of the tests
    (asynchronous,) = look(with_options(own, "-csynchronous_commit=off"), "database.durability")

    assert [finding.words.partition(" ")[0] for finding in risky] == ["fsync", "full_page_writes"]
    assert {finding.verdict for finding in risky} == {WARNING}
    assert asynchronous.words.startswith("synchronous_commit is off (client): a crash of the server loses")


def test_keepalive(settings: Settings) -> None:
    url = settings.database.url.get_secret_value()
    soon = "-ctcp_keepalives_idle=60 -ctcp_keepalives_interval=10 -ctcp_keepalives_count=3"

    (late,) = look(with_options(settings, "-ctcp_keepalives_idle=7200"), "database.keepalive")
    (in_time,) = look(with_options(settings, soon), "database.keepalive")
    (switched_off, _) = look(at(f"{url}?keepalives=0"), "database.keepalive")

    assert (late.verdict, in_time.verdict, switched_off.verdict) == (WARNING, OK, WARNING)
    assert in_time.words == "the server notices within 90 s that a writer's machine died"
    assert switched_off.words.startswith("database.url says keepalives=0")


@pytest.mark.parametrize(("step", "direction"), [(5.0, "behind"), (-5.0, "ahead of")])
def test_a_clock_that_differs(settings: Settings, monkeypatch: pytest.MonkeyPatch, step: float, direction: str) -> None:
    assert verdicts(settings, "database.clock") == [OK]

    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + step)
    (finding,) = look(settings, "database.clock")

    assert finding.verdict == WARNING
    assert f" s {direction} this host's" in finding.words


def test_what_this_role_may_not_see_is_skipped_with_the_reason(settings: Settings, postgres: PostgresServer) -> None:
    with operator(settings) as connection:
        name = f"blind_{connection.info.dbname}"
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'b'".encode())
        blind = at(postgres.url(connection.info.dbname, user=name, password="b"))
        (tables,) = look(blind, "database.tables")
        (snapshots,) = look(blind, "database.snapshots")
        connection.execute(f"DROP ROLE {name}".encode())

    assert (tables.verdict, tables.words) == (SKIPPED, "permission denied for schema outbox")
    assert (snapshots.verdict, snapshots.remedy) == (SKIPPED, f"GRANT pg_read_all_stats TO {name}")


def test_a_connection_that_is_lost_on_the_way_skips_the_rest(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_session(connection: psycopg.Connection, _: Settings) -> Iterator[Finding]:
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        yield from ()

    monkeypatch.setitem(part.CHECKS, "database.version", end_session)

    found = {finding.check: finding for finding in part.examine_database(settings)}

    assert [found[name].verdict for name in part.CHECKS] == [SKIPPED] * len(part.CHECKS)
    assert found["database.clock"].words == "the connection was lost"


def test_a_batch_that_was_begun_and_left_is_named(settings: Settings) -> None:
    assert verdicts(settings, "database.batches") == [OK]

    with operator(settings) as connection:
        connection.execute(BATCHES)
    (finding,) = look(settings, "database.batches")

    words = "batch 'left' version 8 has 1 of its 4 pieces, and no new one for 5 h"
    assert (finding.verdict, finding.words) == (WARNING, words)
    assert "relay batches give-up" in finding.remedy
