"""Segments of the log that are dropped under a session."""

from typing import Any

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.engine.read import positions
from tests.engine.conftest import Outbox
from tests.engine.test_log_moves import Reader, everything, is_in, reading, value
from tests.support.log import ensure, use_log


async def dropped_segment(database_url: str, outbox: Outbox, reader: Reader) -> int:
    """Fill two segments, and drop the first, as retention does; return an id that nobody has used."""
    unused: int = await value(outbox, "SELECT nextval('outbox.message_id_seq')")
    for _ in range(8):
        await outbox.insert_many(1100)
        await reader.mark(await reader.read())
    await outbox.connection.execute("UPDATE outbox.receipt SET sent_at = now() - interval '40 days'")
    with psycopg.connect(database_url, autocommit=True) as other:
        ensure(other, ahead=4)
        await reader.read()
        for _ in range(200):
            try:
                (kept_by,) = other.execute("SELECT kept_by FROM outbox.empty_segment(1, false, false)").fetchone() or (
                    "",
                )
                assert kept_by is None, kept_by
                break
            except psycopg.errors.LockNotAvailable:
                pass
        for _ in range(200):
            try:
                assert other.execute("SELECT outbox.drop_segment()").fetchone() == (1,)
                break
            except psycopg.errors.LockNotAvailable:
                pass
    return unused


async def test_a_transaction_older_than_a_dropped_segment_does_not_end_the_session(
    database: DatabaseSettings, database_url: str, outbox: Outbox, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    with psycopg.connect(database_url, autocommit=True) as other:
        use_log(other)
    async with reading(database) as reader:
        await reader.read()
        await outbox.insert_many(10)
        await reader.mark(await reader.read())
        await writer.execute("SELECT pg_current_xact_id()")  # business that has not come to its messages yet
        await outbox.insert_many(10)
        await reader.mark(await reader.read())
        await dropped_segment(database_url, outbox, reader)

        await writer.commit()

        id_ = await outbox.insert("1")
        assert [row.id for row in await reader.read()] == [id_]


async def test_the_sweep_finds_a_late_row_of_a_segment_that_was_dropped(
    database: DatabaseSettings, database_url: str, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    with psycopg.connect(database_url, autocommit=True) as other:
        use_log(other)
    async with reading(database) as reader:
        unused = await dropped_segment(database_url, outbox, reader)
        await outbox.insert("1", id=unused)
        assert await is_in(outbox, unused, "message_log_0")

        found = await everything(reader)
        for _ in range(2):
            await outbox.insert_many(10)
            found += await everything(reader)

        assert unused in {row.id for row in found}
