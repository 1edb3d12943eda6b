"""`published_total` counts each marked row once, also when a relay is killed, and when it never comes back."""

import signal
from pathlib import Path

import psycopg
import pytest

from relay.engine.nodes import membership
from relay.operate.status import Status, read_status
from relay.servers.postgres.tables import Tables
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.victim import relay_victim
from tests.support.eventually import eventually

ADDED = "SELECT coalesce(sum(published_total), 0)::bigint FROM outbox.node"
COUNTED = "SELECT coalesce(sum(messages), 0)::bigint FROM outbox.published"
SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"


class PublishedTotals:
    """What the tables say, and `relay status` with them."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def number(self, query: str) -> int:
        row = self.connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def status(self) -> Status:
        return read_status(Tables(self.connection, "outbox"), progress_timeout=0)


async def test_no_kill_takes_a_marked_row_from_the_total(
    database_url: str, broker_url: str, outbox: Outbox, queue: Reader, tmp_path: Path
) -> None:
    relay = relay_victim(database_url, broker_url, tmp_path)
    table = PublishedTotals(database_url)
    with table.connection:
        await relay.start()
        try:
            await outbox.insert_many(200)
            await eventually(lambda: table.number(ADDED) == 200, "a heartbeat has told it")
            # From here no heartbeat adds anything: what is marked is known from the marks alone.
            with psycopg.connect(database_url) as other:
                other.execute("SELECT FROM outbox.node FOR UPDATE")
                await outbox.insert_many(30)
                await eventually(lambda: table.number(SENT) == 230, "they are marked, between two tries of a heartbeat")
                relay.stop(signal.SIGKILL)
            assert table.number(ADDED) == 200
            assert table.status().published_total == 230

            await relay.start()
            await outbox.insert_many(50)
            await eventually(lambda: table.number(SENT) == 280, "it goes on")
            assert table.status().published_total == 280
            assert relay.stop(signal.SIGTERM) == 0
        finally:
            relay.stop(signal.SIGKILL)

        assert table.number(ADDED) == 280
        (node,) = table.status().nodes
        assert node.published_total == table.status().published_total == 280


async def test_added_counts_are_deleted_and_those_of_a_lost_node_still_count(
    database_url: str, outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "CLEAR_INTERVAL", 0.05)
    monkeypatch.setattr(membership, "ROWS_PER_CLEAR", 2)
    table = PublishedTotals(database_url)
    with table.connection:
        table.connection.execute("""
            INSERT INTO outbox.node (name, backend_pid, version) VALUES ('gone', 1, '0');
            INSERT INTO outbox.published (node, messages) VALUES ('gone', 3), ('gone', 4), ('gone', 5), ('unknown', 6);
            UPDATE outbox.node SET published_total = 12, published_to = (
                SELECT max(position) FROM outbox.published WHERE node = 'gone');
            INSERT INTO outbox.published (node, messages) VALUES ('gone', 7);
        """)
        async with run_node(node="here"):
            await outbox.insert_many(100)
            await eventually(lambda: table.number(COUNTED) == 6 + 7, "what was added is deleted")
            await eventually(lambda: table.number(ADDED) == 12 + 100, "a heartbeat has told it")

        status = table.status()
        assert status.published_total == 12 + 6 + 7 + 100
        assert {node.name: node.published_total for node in status.nodes} == {"gone": 19, "here": 100}


async def test_a_total_goes_on_from_what_a_relay_of_an_older_release_has_added(
    database_url: str, outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    table = PublishedTotals(database_url)
    with table.connection:
        async with run_node(node="here"):
            await outbox.insert_many(100)
            await eventually(lambda: table.number(SENT) == 100, "they are marked")
        # As the older release beats: no row in `published`, and no word about `published_to`.
        table.connection.execute("UPDATE outbox.node SET published_total = published_total + 10")
        async with run_node(node="here"):
            await outbox.insert_many(5)
            await eventually(lambda: table.number(SENT) == 105, "they are marked")

        assert table.status().published_total == table.number(ADDED) == 115
