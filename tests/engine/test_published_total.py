"""`published_total` of a killed node misses what it had marked since its last heartbeat, and nothing else."""

import signal
from pathlib import Path

import psycopg

from tests.engine.conftest import Outbox, Reader
from tests.faults.victim import relay_victim
from tests.support.eventually import eventually


class Table:
    """What the table says."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def published(self) -> int:
        return self._number("SELECT coalesce(sum(published_total), 0) FROM outbox.node")

    def sent(self) -> int:
        return self._number("SELECT count(*) FROM outbox.message WHERE state = 'sent'")

    def _number(self, query: str) -> int:
        row = self.connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


async def test_after_a_kill_only_what_was_marked_since_the_last_heartbeat_is_missing(
    database_url: str, broker_url: str, outbox: Outbox, queue: Reader, tmp_path: Path
) -> None:
    relay = relay_victim(database_url, broker_url, tmp_path)
    table = Table(database_url)
    with table.connection:
        await relay.start()
        try:
            await outbox.insert_many(200)
            await eventually(lambda: table.published() == 200, "a heartbeat has told it")
            await outbox.insert_many(30)
            await eventually(lambda: table.sent() == 230, "they are marked")
            relay.stop(signal.SIGKILL)
            kept = table.published()
            assert 200 <= kept <= 230

            await relay.start()
            await outbox.insert_many(50)
            await eventually(lambda: table.sent() == 280, "it goes on")
            assert relay.stop(signal.SIGTERM) == 0
        finally:
            relay.stop(signal.SIGKILL)

        assert table.published() == kept + 50
