"""How long the last rows took."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.latency import read_latency
from relay.operate.session import session

pytestmark = pytest.mark.every_postgres


def test_rows_count_from_the_time_they_were_due(database: DatabaseSettings, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("""
            INSERT INTO outbox.message (aggregate_type, event_type, payload, state, created_at, available_at, sent_at)
            SELECT 'a', 'e', '1', 'sent', now() - '9 s'::interval, now() - '5 s'::interval, now() - '3 s'::interval
            FROM generate_series(1, 20)
        """)

    with session(database) as tables:
        assert read_latency(tables) == pytest.approx(2.0)


def test_without_rows_there_is_none(database: DatabaseSettings) -> None:
    with session(database) as tables:
        assert read_latency(tables) is None
