"""A publisher whose calls wait: it opens itself in a thread, and never in a fork of a process that has used it."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.errors import DatabaseUnavailableError, NotAcceptedError, UsageError
from relay.publisher import BlockingPublisher, DurablePublisher
from relay.testing.servers.process import free_port
from tests.engine.conftest import Outbox, Reader
from tests.publisher.events import NOWHERE, first_of_each, measured
from tests.support.eventually import eventually
from tests.support.proxied import with_port

ROOT = Path(__file__).parents[2]


async def test_threads_share_it_and_each_keeps_its_order(
    place: DatabaseSettings | Path, broker: BrokerSettings, queue: Reader
) -> None:
    def publish(publisher: BlockingPublisher, key: str) -> list[str]:
        events = [measured(number, key) for number in range(50)]
        for event in events:
            publisher.publish(event)
        return [str(event.message_id) for event in events]

    def run() -> dict[str, list[str]]:
        with (
            BlockingPublisher(DurablePublisher(place, broker=broker, name="web")) as publisher,
            ThreadPoolExecutor(4) as threads,
        ):
            futures = {key: threads.submit(publish, publisher, key) for key in "abcd"}
            sent = {key: each.result() for key, each in futures.items()}
            assert publisher.state.confirmed + publisher.state.buffered == 200
        return sent

    sent = await asyncio.to_thread(run)

    assert first_of_each(await queue.everything()) == sent


async def test_without_a_broker_events_are_in_the_table_and_nothing_waits_for_its_end(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    publisher = BlockingPublisher(DurablePublisher(database, broker=NOWHERE, name="web"))

    await asyncio.to_thread(publisher.publish, measured(1))

    assert len(await outbox.ids("pending")) == 1
    assert publisher.state.buffered == 1
    await asyncio.to_thread(publisher.close)
    await asyncio.to_thread(publisher.close)  # again, which changes nothing


async def test_closed_it_takes_no_events(database: DatabaseSettings) -> None:
    publisher = BlockingPublisher(DurablePublisher(database, broker=NOWHERE, name="web"))
    await asyncio.to_thread(publisher.close)

    with pytest.raises(NotAcceptedError, match="the publisher is closed"):
        await asyncio.to_thread(publisher.publish, measured(1))


async def test_events_that_other_threads_publish_are_accepted_or_refused_by_a_close(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    publisher = BlockingPublisher(DurablePublisher(database, broker=NOWHERE, name="web"))
    began = threading.Barrier(5, timeout=20)

    def publish_until_closed() -> int:
        began.wait()
        for count in range(100_000):
            try:
                publisher.publish(measured(count))
            except NotAcceptedError:
                return count
        raise AssertionError("it was never closed")

    def run() -> int:
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(publish_until_closed) for _ in range(4)]
            began.wait()
            publisher.close()
            return sum(each.result(timeout=20) for each in futures)

    accepted = await asyncio.to_thread(run)

    assert len(await outbox.ids("pending")) == accepted


async def test_what_cannot_be_opened_is_raised_and_tried_again(database: DatabaseSettings, outbox: Outbox) -> None:
    away = with_port(database, free_port()).model_copy(update={"command_timeout": 0.2, "connect_timeout": 1})
    publisher = BlockingPublisher(DurablePublisher(away, broker=NOWHERE, name="web"))

    for _ in range(2):
        with pytest.raises(DatabaseUnavailableError):
            await asyncio.to_thread(publisher.publish, measured(1))


async def test_an_event_loop_is_not_blocked(database: DatabaseSettings) -> None:
    publisher = BlockingPublisher(DurablePublisher(database, broker=NOWHERE, name="web"))

    with pytest.raises(UsageError, match="use DurablePublisher"):
        publisher.publish(measured(1))


async def test_a_loop_that_ends_with_unsent_events_warns(database: DatabaseSettings) -> None:
    async def main() -> None:
        sensors = DurablePublisher(database, broker=NOWHERE, name="sensors")
        await sensors.__aenter__()
        publishing = asyncio.create_task(sensors.publish(measured(1)))
        await asyncio.sleep(0)
        assert not publishing.done()

    with capture_logs() as events:
        await asyncio.to_thread(asyncio.run, main())

    assert [(each["event"], each["events"]) for each in events if each["event"] == "publisher.unsent"] == [
        ("publisher.unsent", 1)
    ]


FORKING = """
import os, sys
from tests.publisher.events import measured
from relay.errors import ForkedError
from relay.publisher import BlockingPublisher, DurablePublisher

publisher = BlockingPublisher(DurablePublisher(sys.argv[1], broker="amqp://127.0.0.1:1/", name="web"))
if sys.argv[2] == "used":
    publisher.publish(measured(0))
if (pid := os.fork()) == 0:
    try:
        publisher.publish(measured(1))
    except ForkedError as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
publisher.publish(measured(2))
"""


@pytest.mark.parametrize(("use", "count"), [("used", 2), ("new", 2)])
async def test_a_fork_opens_its_own_unless_the_parent_has_opened_it(
    use: str, count: int, database: DatabaseSettings, outbox: Outbox
) -> None:
    command = [sys.executable, "-c", FORKING, database.url.get_secret_value(), use]

    done = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100
    )

    assert done.returncode == 0, done.stderr
    assert ("the blocking publisher 'web'" in done.stdout) == (use == "used")
    await eventually(lambda: has_pending(outbox, count), "both are in the table")


INTERRUPTED = """
import signal, socket, sys
from tests.publisher.events import measured
from relay.errors import NotAcceptedError
from relay.publisher import BlockingPublisher, DurablePublisher

silent = socket.create_server(("127.0.0.1", 0))  # so that the opening waits for the broker for a second
broker = f"amqp://127.0.0.1:{silent.getsockname()[1]}/"
publisher = BlockingPublisher(DurablePublisher(sys.argv[1], broker=broker, name="web"))

def interrupt(*_):
    if sys.argv[2] == "closes":
        publisher.close()
    else:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    publisher.publish(measured(1))
except (KeyboardInterrupt, NotAcceptedError) as error:
    print(type(error).__name__)
if sys.argv[2] == "raises":
    publisher.publish(measured(2))
publisher.close()
"""


@pytest.mark.parametrize(("handler", "raised", "count"), [("raises", "KeyboardInterrupt", 1), ("closes", "", 0)])
async def test_a_signal_while_it_is_opened_leaves_it_usable(
    handler: str, raised: str, count: int, database: DatabaseSettings, outbox: Outbox
) -> None:
    command = [sys.executable, "-c", INTERRUPTED, database.url.get_secret_value(), handler]

    done = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert raised in done.stdout
    assert len(await outbox.ids("pending")) == count


async def has_pending(outbox: Outbox, count: int) -> bool:
    return len(await outbox.ids("pending")) == count
