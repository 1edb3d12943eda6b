"""What was sent since the last count, by the blocks that were written since."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.sql import Identifier

from relay.operate import throughput
from relay.operate.throughput import COUNT, SentCounter
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.plans import explain, scans

pytestmark = pytest.mark.every_postgres

SENT = """
    INSERT INTO outbox.message (aggregate_type, event_type, exchange, routing_key, payload, state, sent_at)
    SELECT 'order', %s, %s, %s, to_json(repeat('x', %s)), 'sent', %s FROM generate_series(1, %s)
"""


def send(
    connection: psycopg.Connection, rows: int, event_type: str = "Placed", *, at: datetime | None = None, size: int = 1
) -> None:
    values = [event_type, None, None, size, at or datetime.now(UTC), rows]
    connection.execute(SENT, values)


def seconds_of(monkeypatch: pytest.MonkeyPatch, *moments: datetime) -> None:
    """Let the counts be at these moments."""
    times = iter(moments)
    monkeypatch.setattr(throughput, "now", lambda _: next(times))


def test_a_count_has_each_kind_since_the_last_one(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    at = datetime.now(UTC)
    counter = SentCounter()
    send(tables.connection, 50, at=at - timedelta(seconds=1))
    seconds_of(monkeypatch, at, at + timedelta(seconds=10), at + timedelta(seconds=20))
    first = counter.count(tables)
    send(tables.connection, 30, at=at + timedelta(seconds=1))
    send(tables.connection, 20, "Paid", at=at + timedelta(seconds=9))
    second = counter.count(tables)
    third = counter.count(tables)

    assert first is None
    assert second == {(None, None, "order", "Placed"): 3.0, (None, None, "order", "Paid"): 2.0}
    assert third == {}


def test_after_a_long_while_a_count_is_no_rate_of_now(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    at = datetime.now(UTC)
    seconds_of(monkeypatch, at, at + timedelta(seconds=600), at + timedelta(seconds=610))
    counter = SentCounter()

    assert [counter.count(tables) for _ in range(3)] == [None, None, {}]


def test_at_midnight_both_days_count(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    seconds_of(monkeypatch, midnight - timedelta(seconds=5), midnight + timedelta(seconds=5))
    counter = SentCounter()
    counter.count(tables)
    send(tables.connection, 30, at=midnight - timedelta(seconds=1))
    send(tables.connection, 20, at=midnight + timedelta(seconds=1))

    assert counter.count(tables) == {(None, None, "order", "Placed"): 5.0}


def test_of_many_blocks_some_stand_for_the_others(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "BLOCKS", 64)
    at = datetime.now(UTC)
    seconds_of(monkeypatch, at, at + timedelta(seconds=10))
    counter = SentCounter()
    counter.count(tables)
    for _ in range(10):
        send(tables.connection, 600, at=at + timedelta(seconds=1), size=500)
        send(tables.connection, 200, "Paid", at=at + timedelta(seconds=1), size=500)
    found = counter.count(tables) or {}

    assert sum(found.values()) == pytest.approx(800, rel=0.1)
    assert found[None, None, "order", "Placed"] == pytest.approx(600, rel=0.25)


def test_a_count_reads_no_more_than_the_new_blocks(rows: Rows, tables: Tables) -> None:
    at = datetime.now(UTC)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    send(tables.connection, 20_000, at=at)
    values = {"since": at, "until": at + timedelta(seconds=10), "first": 100, "end": 110}
    parts = {"day": day.isoformat(), "next_day": (day + timedelta(days=1)).isoformat(), "most": 10}

    plan = explain(rows.connection, COUNT.format(schema=Identifier("outbox"), **parts), values)

    (scan,) = scans(plan)
    assert (scan["Relation Name"], scan["Node Type"]) == (f"message_sent_{day:%Y%m%d}", "Tid Range Scan")
    assert scan["Shared Hit Blocks"] + scan["Shared Read Blocks"] <= 20
