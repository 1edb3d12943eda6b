"""A file as the buffer: whose it may be, and what it keeps."""

import asyncio
import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, RelaySettings
from relay.errors import BufferFileError, BusyError
from relay.publisher import DurablePublisher
from relay.publisher.file import BEHIND, File
from relay.testing.servers.process import Process
from tests.engine.conftest import Reader
from tests.publisher.events import NOWHERE, first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "buffer.sqlite"


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.seek(at)
        stream.write(data)


def run(file: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute(statement).fetchall()


def contents(file: Path) -> bytes:
    return file.read_bytes()


def publisher(file: Path, broker: BrokerSettings = NOWHERE) -> DurablePublisher:
    return DurablePublisher(file, broker=broker, name="sensors")


async def test_a_file_of_another_publisher_is_refused(file: Path) -> None:
    async with publisher(file):
        with pytest.raises(BusyError, match="another process"):
            await publisher(file).__aenter__()

    async with publisher(file):  # and is free after its end
        pass


async def test_what_is_no_database_is_refused_and_left(file: Path) -> None:
    overwrite(file, 0, diary := b"Dear diary," * 100)

    with pytest.raises(BufferFileError, match="not a database"):
        await publisher(file).__aenter__()
    assert contents(file) == diary


async def test_a_database_of_something_else_is_refused_and_left(file: Path) -> None:
    run(file, "CREATE TABLE message (mine)")

    with pytest.raises(BufferFileError, match="something else"):
        await publisher(file).__aenter__()
    assert run(file, "SELECT name FROM sqlite_schema") == [("message",)]


async def test_a_file_of_a_later_release_is_refused(file: Path) -> None:
    async with publisher(file):
        pass
    run(file, "PRAGMA user_version = 2")

    with pytest.raises(BufferFileError, match="version 2"):
        await publisher(file).__aenter__()


async def test_a_damaged_file_is_refused(file: Path) -> None:
    async with publisher(file) as sensors:
        await asyncio.gather(*(sensors.publish(measured(number)) for number in range(200)))
    overwrite(file, 4096, b"\xee" * 8192)

    with pytest.raises(BufferFileError, match=r"damaged|malformed"):
        await publisher(file).__aenter__()


async def test_a_place_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(BufferFileError, match="missing"):
        await publisher(tmp_path / "missing" / "buffer").__aenter__()


async def test_refused_messages_keep_no_other_key_back_also_after_a_restart(
    file: Path, queue: Reader, channel: AbstractChannel, broker: BrokerSettings
) -> None:
    relay = RelaySettings(max_window_rows=20, backoff_initial=0.05, backoff_max=0.2)
    nowhere = [measured(number, f"lost {number % 50}", exchange="missing") for number in range(100)]

    async with DurablePublisher(file, broker=broker, name="sensors", relay=relay) as sensors:
        await asyncio.gather(*map(sensors.publish, nowhere))
        ids = await publish_all(sensors, range(10))
        await eventually(lambda: any("missing" in reason for reason in sensors.state.reasons), "it is shown")
    async with DurablePublisher(file, broker=broker, name="sensors", relay=relay) as sensors:
        assert any("missing" in reason for reason in sensors.state.reasons)
        ids += await publish_all(sensors, range(10, 20))
        # A refusal closes the channel, and what was in flight on it goes out again.
        assert first_of_each(await queue.drain_different(20)) == {"a": ids}

        exchange = await channel.declare_exchange("missing", ExchangeType.FANOUT, durable=True)
        await queue.queue.bind(exchange)
        await eventually(lambda: is_direct(sensors), "all went out", 60)

    late = first_of_each(await queue.everything())
    assert [id_ for key in sorted(late.keys() - {"a"}) for id_ in late[key]] == [
        str(event.message_id) for event in sorted(nowhere, key=lambda event: str(event.aggregate_id))
    ]


async def test_a_key_that_was_held_or_let_go_by_half_is_so_as_a_whole_after_a_restart(file: Path) -> None:
    async with publisher(file) as sensors:
        for key in ("held", "free"):
            await publish_all(sensors, range(3), key)
    with closing(sqlite3.connect(file)) as database, database:  # as a kill between two pieces leaves them
        database.execute("UPDATE message SET due = 1 WHERE position = 1")
        database.execute(f"UPDATE message SET due = {BEHIND} WHERE position IN (3, 6)")

    opened = File(file)
    await opened.open()
    await opened.close()

    assert run(file, "SELECT due FROM message ORDER BY position") == [(1,), (BEHIND,), (BEHIND,), (0,), (0,), (0,)]


async def test_what_was_refused_is_tried_at_once_after_a_restart_whatever_any_clock_says(
    file: Path, queue: Reader, channel: AbstractChannel, broker: BrokerSettings
) -> None:
    hours = RelaySettings(backoff_initial=36_000.0, backoff_max=36_000.0)
    event = measured(1, exchange="missing")
    async with DurablePublisher(file, broker=broker, name="sensors", relay=hours) as sensors:
        await sensors.publish(event)
        await eventually(lambda: any("missing" in reason for reason in sensors.state.reasons), "it is refused")

    exchange = await channel.declare_exchange("missing", ExchangeType.FANOUT, durable=True)
    await queue.queue.bind(exchange)
    async with DurablePublisher(file, broker=broker, name="sensors", relay=hours) as sensors:
        await eventually(lambda: is_direct(sensors), "it went out")

    assert [message.message_id for message in await queue.drain(1)] == [str(event.message_id)]


async def test_a_killed_process_leaves_what_was_accepted(
    file: Path, queue: Reader, broker: BrokerSettings, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = Process([sys.executable, "-m", "tests.publisher.endless", str(file)], log=log)
    await eventually(lambda: len(log.read_text().split()) > 100, "some are accepted")
    process.stop(signal.SIGKILL)
    accepted = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async with publisher(file, broker) as sensors:
        await eventually(lambda: is_direct(sensors), "the file is drained")

    arrived = [str(message.message_id) for message in await queue.everything()]
    assert arrived[: len(accepted)] == [line.strip() for line in accepted]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_the_file_and_those_beside_it_are_its_owner_s_alone(file: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with publisher(file) as open_publisher:
            await open_publisher.publish(measured(1))
            modes = modes_in(file.parent)
    finally:
        os.umask(before)

    assert file.name in modes
    assert f"{file.name}-wal" in modes
    assert set(modes.values()) == {0o600}


async def test_a_file_that_others_can_read_is_told_of_and_left(file: Path) -> None:
    async with publisher(file):
        pass
    os.chmod(file, 0o644)

    with capture_logs() as events:
        async with publisher(file):
            pass

    (told,) = (event for event in events if event["event"] == "buffer.exposed")
    assert (told["path"], told["mode"], told["remedy"]) == (str(file), "0644", f"chmod 600 {file}")
    assert modes_in(file.parent)[file.name] == 0o644


def modes_in(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}


async def test_a_folder_that_is_not_there_is_an_error_that_names_the_file(file: Path) -> None:
    with pytest.raises(BufferFileError, match=r"elsewhere/buffer.sqlite cannot be a buffer: No such file"):
        await publisher(file.parent / "elsewhere" / file.name).__aenter__()
