"""`config/roles.sql`: each side of the outbox can do its work and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate, sqlalchemy_engine
from relay.outbox import Event, OutboxMessage, add, add_many
from tests.cli.command import Command
from tests.migrations.conftest import Connection
from tests.migrations.rights import FILE, rights
from tests.support.roles import NAMES, SCRIPT, allowed, granted_roles, role

pytestmark = pytest.mark.every_postgres

INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"


@pytest.fixture(autouse=True)
def roles(connection: Connection) -> Iterator[None]:
    with granted_roles(connection):
        connection.execute("INSERT INTO outbox.node (name, backend_pid, version) VALUES ('n', 1, '1')")
        connection.execute(INSERT)
        yield


def test_each_role_has_the_rights_that_are_listed_and_no_others(connection: Connection) -> None:
    """After a change that is meant: `.venv/bin/python -m tests.migrations.rights`."""
    assert rights(connection).splitlines() == FILE.read_text().splitlines()


def test_the_script_can_be_run_again(connection: Connection) -> None:
    connection.execute(SCRIPT.encode())


def test_the_command_in_the_script_makes_it_one_for_another_schema(
    connection: Connection, database: DatabaseSettings, tmp_path: Path
) -> None:
    migrate(database.model_copy(update={"schema_name": "events"}))
    command = re.search("relay (config roles --schema .*)", SCRIPT)
    assert command is not None

    connection.execute(Command(tmp_path)(*command[1].split()).out.encode())

    insert: LiteralString = "INSERT INTO events.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"
    try:
        assert allowed(connection, "events_writer", [insert, INSERT]) == [insert]
        assert allowed(connection, "outbox_writer", [insert, INSERT]) == [INSERT]
    finally:
        events = ", ".join(NAMES).replace("outbox_", "events_")
        connection.execute(f"DROP OWNED BY {events}; DROP ROLE {events}".encode())


def test_a_writer_writes_with_plain_sql(connection: Connection) -> None:
    with role(connection, "outbox_writer") as writer:
        assert writer.execute(INSERT).rowcount == 1


def test_a_writer_rings_for_a_relay_that_sleeps(connection: Connection, other_connection: Connection) -> None:
    other_connection.execute('LISTEN "outbox.doorbell"')
    other_connection.execute("SELECT pg_advisory_lock_shared(hashtextextended('outbox.doorbell', 0))")

    with role(connection, "outbox_writer") as writer:
        writer.execute(INSERT)

    assert len(list(other_connection.notifies(timeout=20, stop_after=1))) == 1


def test_a_writer_writes_with_every_writer_of_the_package(connection: Connection, database: DatabaseSettings) -> None:
    event = Event("a", "k", "e", {"a": 1})

    with role(connection, "outbox_writer") as writer:
        add(writer, event, autocommit=True)
        add(writer, event, event, autocommit=True)
        add_many(writer, [event] * 100, autocommit=True)
    with Session(sqlalchemy_engine(database)) as session:
        session.connection().exec_driver_sql("SET ROLE outbox_writer")
        session.add_all([OutboxMessage(Event("a", "k", "e", {})) for _ in range(3)])
        session.commit()

    assert connection.execute("SELECT count(*) FROM outbox.message WHERE aggregate_id = 'k'").fetchone() == (106,)


def inserted(column: LiteralString, value: LiteralString) -> LiteralString:
    return f"INSERT INTO outbox.message (aggregate_type, event_type, payload, {column}) VALUES ('a', 'e', '1', {value})"


def test_a_writer_can_do_nothing_but_write(connection: Connection) -> None:
    statements: list[LiteralString] = [
        inserted("state, sent_at", "'sent', now()"),
        inserted("state", "'parked'"),
        inserted("id", "1"),
        inserted("attempts", "9"),
        inserted("created_at", "now()"),
        "SELECT 1 FROM outbox.message",
        "SELECT payload FROM outbox.message_pending",
        "SELECT state FROM outbox.message_state",
        "SELECT state FROM outbox.message_count",
        "UPDATE outbox.message SET state = 'sent', sent_at = now()",
        "DELETE FROM outbox.message",
        "TRUNCATE outbox.message",
        "INSERT INTO outbox.message_pending (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')",
        "SELECT outbox.ensure_sent_days(current_date, 1)",
        "SELECT setval('outbox.message_id_seq', 1)",
        "SELECT 1 FROM outbox.node",
        "SELECT 1 FROM outbox.processed_message",
        "CREATE TABLE outbox.mine ()",
    ]

    assert allowed(connection, "outbox_writer", statements) == []


def test_a_publisher_writes_the_time_and_sees_whose_rows_are_left_and_no_more(connection: Connection) -> None:
    may: list[LiteralString] = [
        inserted("writer, created_at", "'sensors', now()"),
        "SELECT 1 FROM outbox.message WHERE state = 'pending' AND writer = 'sensors' AND created_at <= now()",
        "SELECT 1 FROM outbox.message_state WHERE state = 'pending' AND writer = 'sensors' AND created_at <= now()",
    ]
    may_not: list[LiteralString] = [
        inserted("state", "'parked'"),
        inserted("id", "1"),
        "SELECT payload FROM outbox.message",
        "SELECT payload FROM outbox.message_state",
        "UPDATE outbox.message SET writer = 'mine'",
        "DELETE FROM outbox.message",
        "SELECT 1 FROM outbox.node",
        "CREATE TABLE outbox.mine ()",
    ]

    assert allowed(connection, "outbox_publisher", may + may_not) == may


def test_spark_writes_a_batch_and_its_ledger_row(connection: Connection) -> None:
    statements: list[LiteralString] = [
        inserted("writer, batch_id", "'job', 7"),
        "CREATE UNLOGGED TABLE outbox_staging.mine ()",
        """
        INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts)
        VALUES ('job', 7, 1, gen_random_uuid(), '{}') ON CONFLICT (app_id, version, partition) DO NOTHING
        """,
        "SELECT * FROM outbox.batch",
        "UPDATE outbox.batch SET row_counts = '{\"rows\": 1}'",
        "SELECT count(*) FROM outbox.message WHERE state = 'pending'",
        "SELECT count(*) FROM outbox.message_state WHERE state = 'pending'",
    ]
    refused: list[LiteralString] = [
        "UPDATE outbox.batch SET version = 8",
        "DELETE FROM outbox.batch",
        "SELECT payload FROM outbox.message",
        "SELECT payload FROM outbox.message_state",
        "CREATE TABLE outbox.mine ()",
    ]

    assert allowed(connection, "outbox_spark", [*statements, *refused]) == statements


def test_the_relay_can_do_its_work(connection: Connection) -> None:
    statements: list[LiteralString] = [
        "SELECT * FROM outbox.message",
        "SELECT state, messages FROM outbox.message_count",
        "SELECT * FROM outbox.message_state",
        "SELECT * FROM outbox.sent('-infinity', 'infinity')",
        "SELECT 1 FROM outbox.message FOR UPDATE SKIP LOCKED",
        "UPDATE outbox.message SET state = 'sent', sent_at = now()",
        "UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'x', attempts = 8",
        "UPDATE outbox.message SET state = 'discarded', last_error = 'x'",
        "UPDATE outbox.message SET exchange = '', routing_key = 'new'",
        "UPDATE outbox.message SET available_at = now(), attempts = attempts + 1, held_behind = 1",
        "SELECT outbox.ensure_sent_days(current_date, 1)",
        "INSERT INTO outbox.node (name, backend_pid, version) VALUES ('n', 1, '1') ON CONFLICT (name) DO NOTHING",
        "UPDATE outbox.node SET heartbeat_at = now()",
        "DELETE FROM outbox.node",
        "INSERT INTO outbox.published (node, messages) VALUES ('n', 1)",
        "SELECT * FROM outbox.published",
        "DELETE FROM outbox.published",
        """
        INSERT INTO outbox.lane_floor (lane, floor, watermark, running, since) VALUES (0, 1, 1, '{}', '{}')
        ON CONFLICT (lane) DO UPDATE SET floor = excluded.floor
        """,
        "SELECT * FROM outbox.lane_floor",
        "INSERT INTO outbox.lane_pause (lane, paused_by, paused_why) VALUES (7, 'ada', 'test')",
        "SELECT * FROM outbox.lane_pause",
        "DELETE FROM outbox.lane_pause",
        "SELECT * FROM outbox.migration",
        """
        INSERT INTO outbox.dead_letter_audit (command, queue, done_by, why) VALUES ('discard', 'q.dead', 'me', 'why')
        """,
        "SELECT * FROM outbox.dead_letter_audit",
        "INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('parked retry', 1, 'me')",
        "SELECT * FROM outbox.operator_audit",
    ]

    assert allowed(connection, "outbox_relay", statements) == statements


@pytest.mark.parametrize("role", ["outbox_relay", "outbox_archive"])
def test_what_was_sent_is_read_where_public_may_call_no_function(connection: Connection, role: LiteralString) -> None:
    connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC")
    statement: LiteralString = "SELECT * FROM outbox.sent('-infinity', 'infinity')"

    assert allowed(connection, role, [statement]) == [statement]


def test_the_relay_changes_no_event(connection: Connection) -> None:
    statements: list[LiteralString] = [
        INSERT,
        "UPDATE outbox.message SET payload = '2'",
        "UPDATE outbox.message SET aggregate_id = 'x'",
        "DELETE FROM outbox.message",
        "DELETE FROM outbox.message_state",
        "DROP TABLE outbox.message",
        "UPDATE outbox.migration SET version_num = '9999'",
        "UPDATE outbox.dead_letter_audit SET why = 'another'",
        "DELETE FROM outbox.dead_letter_audit",
        "UPDATE outbox.operator_audit SET why = 'another'",
        "DELETE FROM outbox.operator_audit",
    ]

    assert allowed(connection, "outbox_relay", statements) == []


def test_no_role_writes_which_login_did_what_and_when(connection: Connection) -> None:
    """An audit whose login and time can be chosen proves nothing."""
    rows = connection.execute(
        "SELECT role, relname, attname FROM unnest(%s::text[]) AS role,"
        " pg_attribute JOIN pg_class ON pg_class.oid = attrelid"
        " WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p') AND attnum > 0 AND NOT attisdropped"
        " AND relname !~ '^message_sent'"  # a mark copies what the row says
        " AND (attname LIKE '%%\\_as' OR attname IN ('made_at', 'done_at', 'archived_at'))"
        " AND (has_column_privilege(role, attrelid, attnum, 'INSERT')"
        "      OR has_column_privilege(role, attrelid, attnum, 'UPDATE'))",
        [list(NAMES)],
    )

    assert rows.fetchall() == []


def test_a_relay_orders_nothing_of_a_console(connection: Connection) -> None:
    """A console does its jobs with its own rights, as the login of a relay has not."""
    order: LiteralString = (
        "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'a', '{}')"
    )
    forged: LiteralString = (
        "INSERT INTO outbox.job (kind, source, made_by, filter, by_console) VALUES ('retry', 'parked', 'a', '{}', true)"
    )

    assert allowed(connection, "outbox_relay", [order, forged]) == [order]
    assert allowed(connection, "outbox_console", [order, forged]) == [order, forged]


def test_a_consumer_uses_its_inbox(connection: Connection) -> None:
    statement = (
        "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, business_key)"
        " VALUES ('c', %s, current_date + 5, 'k') ON CONFLICT (consumer_name, message_id, message_day) DO NOTHING"
    )
    message_id = uuid4()

    with role(connection, "outbox_consumer") as consumer:
        assert consumer.execute("SELECT outbox.ensure_inbox_days(current_date + 5, 1)").fetchone() == (1,)
        assert [consumer.execute(statement, [message_id]).rowcount for _ in range(2)] == [1, 0]


def test_a_consumer_holds_messages_and_counts_tries(connection: Connection) -> None:
    statements: list[LiteralString] = [
        "INSERT INTO outbox.begun_message (consumer_name, message_id) VALUES ('c', gen_random_uuid())",
        "UPDATE outbox.begun_message SET begun = begun + 1",
        "DELETE FROM outbox.begun_message",
        """
        INSERT INTO outbox.held_message (consumer_name, key, message_id, event_type, exchange, routing_key, envelope,
            body, attempts, due_at)
        VALUES ('c', 'k', gen_random_uuid(), 'e', '', '', '', '', 0, now())
        """,
        "UPDATE outbox.held_message SET begun = begun + 1",
        "DELETE FROM outbox.held_message",
    ]

    assert allowed(connection, "outbox_consumer", statements) == statements


@pytest.mark.parametrize("name", ["outbox_relay", "outbox_console"])
def test_operators_let_held_messages_be_tried_now_and_change_nothing_else(
    connection: Connection, name: LiteralString
) -> None:
    statements: list[LiteralString] = [
        "UPDATE outbox.held_message SET due_at = now()",
        "UPDATE outbox.held_message SET attempts = 0",
        "UPDATE outbox.held_message SET body = ''",
        "DELETE FROM outbox.held_message",
    ]

    assert allowed(connection, name, statements) == statements[:1]


def test_a_member_checks_in_and_releases_and_the_master_assigns(connection: Connection) -> None:
    of_member: list[LiteralString] = [
        "INSERT INTO outbox.pool (name, queue, check_in_timeout) VALUES ('c', 'q', 1) ON CONFLICT DO NOTHING",
        "INSERT INTO outbox.pool_partition (pool, partition) SELECT name, 0 FROM outbox.pool ON CONFLICT DO NOTHING",
        "INSERT INTO outbox.pool_member (pool, name) SELECT name, 'm' FROM outbox.pool",
        "UPDATE outbox.pool_member SET checked_in_at = now()",
        "SELECT FROM outbox.pool_partition FOR SHARE",
        "UPDATE outbox.pool_partition SET member = NULL, taken_from = NULL",
        "DELETE FROM outbox.pool_member",
    ]
    of_master: list[LiteralString] = [
        "SELECT FROM outbox.pool, outbox.pool_member, outbox.pool_partition",
        "INSERT INTO outbox.pool_master (name, backend_pid) VALUES ('r', 1) ON CONFLICT (is_the_only_row) DO NOTHING",
        "UPDATE outbox.pool_master SET seen_at = now()",
        "UPDATE outbox.pool_partition SET epoch = 1, member = 'm', wanted_by = NULL, taken_from = NULL, since = now()",
        "DELETE FROM outbox.pool_member",
    ]
    not_of_member: list[LiteralString] = [
        "UPDATE outbox.pool_partition SET epoch = 2",
        "DELETE FROM outbox.pool_partition",
        "INSERT INTO outbox.pool_master (name, backend_pid) VALUES ('r', 1)",
    ]

    assert allowed(connection, "outbox_consumer", of_member) == of_member
    assert allowed(connection, "outbox_relay", of_master) == of_master
    assert allowed(connection, "outbox_consumer", not_of_member) == []


def test_a_consumer_can_do_nothing_else(connection: Connection) -> None:
    statements: list[LiteralString] = [
        INSERT,
        "SELECT 1 FROM outbox.message",
        "DELETE FROM outbox.processed_message",
        "UPDATE outbox.processed_message SET consumer_name = 'x'",
        "UPDATE outbox.inbox_memory SET since = '2031-01-01'",
        "SELECT outbox.ensure_sent_days(current_date, 1)",
        "SELECT 1 FROM outbox.node",
    ]

    assert allowed(connection, "outbox_consumer", statements) == []
