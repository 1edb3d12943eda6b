"""A relay in a small container carries large rows without being killed, and sends each once."""

import asyncio

import psycopg
import pytest

from tests.container.run import RelayImage
from tests.container.witness import LEFT, has_none, witness
from tests.support.eventually import eventually

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(600),  # the first test builds the image
    pytest.mark.parametrize("servers", ["private"], indirect=True),
]

WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload_bytes)
    SELECT 'customer', (n %% 100)::text, 'Scanned', convert_to(repeat('x', %s), 'UTF8') FROM generate_series(1, %s) AS n
"""


@pytest.mark.parametrize(("rows", "size"), [(2000, 150_000), (20, 16_000_000)])
async def test_128_mib_are_enough(
    relay: RelayImage, empty_database_url: str, broker_url: str, rows: int, size: int
) -> None:
    migrated = relay("migrate")
    assert migrated.code == 0, migrated.err
    async with (
        witness(broker_url) as queue,
        await psycopg.AsyncConnection.connect(empty_database_url, autocommit=True) as reader,
    ):
        await reader.execute(WRITE, [size, rows])

        running = relay.start(limits=["--memory=128m", "--memory-swap=128m"])
        await eventually(lambda: has_none(reader, LEFT), "every row is sent", 200)
        code = await asyncio.to_thread(running.stop)

        assert code == 0, running.log()  # 137 if it was killed
        assert "settings.memory" not in running.log()
        declared = await queue.declare()
        assert declared.message_count == rows
